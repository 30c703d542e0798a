"""Contexts in an unmodified vLLM: a KV connector that finds the units of a saved context instead of computing them.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "LocretConnector", "kv_role": "kv_consumer",
        "kv_connector_module_path": "locret.engines.vllm", "kv_connector_extra_config": {"contexts": "FOLDER"}}'

A prompt that begins with the placeholder ids of a context in the folder (`Prefix.placeholders`) is answered from the
context. A request may say `"kv_transfer_params": {"locret": true}`, and then fails if the context is not there, where
vLLM would otherwise take the ids for text. Written against vLLM 0.32.
"""

# U units, K KV heads of this worker, D head dim

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.logger import init_logger

from locret.backbone.adapters import describe
from locret.base.fields import shown
from locret.engines.prefix import Prefix

_OPTIONS = {"contexts": "", "contexts_in_memory": 16}
_SHAPE = ("model_type", "num_layers", "layers", "num_heads", "num_kv_heads", "head_dim", "shapes")

_logger = init_logger("vllm.locret")  # vLLM shows loggers below its own name only

Units = tuple[tuple[Tensor, Tensor], ...]
"""For each layer keys and values, (U, K, D)."""
LEAD = 8
"""Ids by which a context is recognised: those of another one differ, as they are drawn from a digest, and an ordinary
text does not begin with them."""

Stamp = tuple[int, int]
"""When a file was changed, in nanoseconds, and its bytes: a file with another stamp is read again."""


def stamp_of(path: str | Path) -> Stamp:
    """Return the stamp of a file."""
    stat = os.stat(path)
    return stat.st_mtime_ns, stat.st_size


@dataclass(frozen=True)
class Listed:
    """A file of the folder."""

    path: Path
    stamp: Stamp
    ids: tuple[int, ...] = ()
    """What stands for the context in a prompt; none if the file is no context."""
    wrong: str = ""
    """Why it cannot be asked here."""

    @property
    def unchanged(self) -> bool:
        """Whether the file is as it was when it was read."""
        try:
            return stamp_of(self.path) == self.stamp
        except OSError:
            return False


class ContextFolder:
    """The contexts in a folder, read once for each change of a file; of their units nothing stays in memory.

    Hidden files, and folders below, are left alone. `check` raises ValueError for a context that cannot be used.
    """

    def __init__(self, folder: str | Path, check: Callable[[Path, Prefix], None]) -> None:
        self.folder, self._check = Path(folder).expanduser(), check
        if not self.folder.is_dir():
            raise ValueError(f"contexts={str(folder)!r} is no folder; give the one that contexts are saved in")
        self._files: dict[str, Listed] = {}
        self._by_lead: dict[tuple[int, ...], Listed] = {}

    def refresh(self) -> None:
        """Look for files that are new, changed or gone."""
        paths = sorted(path for path in self.folder.iterdir() if path.is_file() and not path.name.startswith("."))
        known = {name: listed for name, listed in self._files.items() if listed.unchanged}
        self._files = {path.name: known.get(path.name) or self._listed(path) for path in paths}
        self._by_lead = {listed.ids[:LEAD]: listed for listed in self._files.values() if listed.ids}

    def _listed(self, path: Path) -> Listed:
        stamp: Stamp = (0, 0)
        ids: tuple[int, ...] = ()
        try:
            stamp, prefix = stamp_of(path), Prefix.from_file(path)
            if prefix.units < LEAD:
                raise ValueError(f"{path} has so few units that their ids may begin any text; read more text")
            ids = tuple(prefix.placeholders)
            self._check(path, prefix)
        except (ValueError, OSError) as error:
            return Listed(path, stamp, ids, str(error))
        return Listed(path, stamp, ids)

    def beginning(self, ids: Sequence[int]) -> Listed | None:
        """Return the context whose ids a prompt begins with; only the first few of them have been compared."""
        return self._by_lead.get(tuple(ids[:LEAD]))


@dataclass(frozen=True)
class Load:
    """Units of a context that a step has to write."""

    request_id: str
    path: str
    stamp: Stamp
    start: int
    """Units before it are in vLLM's own prefix cache."""
    stop: int
    blocks: list[int]
    """All blocks of the request."""


@dataclass
class Loads(KVConnectorMetadata):
    """What the scheduler tells the workers in a step."""

    loads: list[Load] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Why requests cannot be answered, by their ids."""


class LocretConnector(KVConnectorBase_V1):
    """One in vLLM's scheduler, which recognises contexts, and one in each worker, which writes their units."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = self._options()
        _check_engine(vllm_config, kv_cache_config)
        self._block_size = int(vllm_config.cache_config.block_size)
        if role == KVConnectorRole.SCHEDULER:
            self._contexts = ContextFolder(options["contexts"], lambda path, prefix: _check(path, prefix, vllm_config))
            self._contexts.refresh()
            self._verdicts: dict[str, Listed | str] = {}
            """The context of a request, or what is wrong with it; none for an ordinary one."""
            self._next = Loads()
        else:
            self._units = lru_cache(options["contexts_in_memory"])(self._read)
            self._failed: set[str] = set()
            self._bad_blocks: set[int] = set()

    def _options(self) -> dict[str, Any]:
        given = self._kv_transfer_config.kv_connector_extra_config
        options = {**_OPTIONS, **given}
        if unknown := given.keys() - _OPTIONS.keys():
            known = " or ".join(_OPTIONS)
            raise ValueError(f"kv_connector_extra_config has {min(unknown)!r}, which means nothing here; give {known}")
        if not isinstance(options["contexts"], str) or not options["contexts"]:
            raise ValueError('kv_connector_extra_config needs "contexts", the folder that contexts are saved in')
        if type(most := options["contexts_in_memory"]) is not int or most < 1:
            raise ValueError(f"contexts_in_memory={most!r} is no number of contexts; give 1 or more")
        return options

    def on_new_request(self, request: Any) -> None:
        """Decide what a request is about, once.

        What is about a context always looks into caches. Asking for prompt_logprobs implies the contrary, and then the
        ids would be computed as text, which would stay in vLLM's prefix cache for everybody who asks that context.
        """
        try:
            verdict: Listed | str | None = self._verdict(request)
        except Exception as error:
            verdict = str(error)
        if verdict is None:
            return
        self._verdicts[request.request_id] = verdict
        request.skip_reading_prefix_cache = False
        if request.sampling_params is not None:
            request.sampling_params.prompt_logprobs = None

    def _verdict(self, request: Any) -> Listed | None:
        """Return which context a request is about; None for an ordinary one."""
        params, ids = request.kv_transfer_params or {}, request.prompt_token_ids or []
        if not isinstance(params, dict):
            raise ValueError(f'kv_transfer_params={shown(params)} is no object; give one such as {{"locret": true}}')
        asked, listed = params.get("locret"), self._contexts.beginning(ids)
        if asked not in (None, True):
            raise ValueError(f"kv_transfer_params.locret={shown(asked)} means nothing here; give true")
        if listed is None or not listed.unchanged:  # a look at all files takes longer
            try:
                self._contexts.refresh()
            except OSError as error:
                if asked:
                    raise
                _logger.error("the folder of contexts cannot be listed, so what it held before counts: %s", error)
            listed = self._contexts.beginning(ids)
        if asked and listed is None:
            raise ValueError(f"the prompt begins with the placeholders of no context in {self._contexts.folder}")
        if listed is not None:
            _check_request(request, listed)
        return listed

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many units follow what vLLM holds itself; they are loaded in the step that needs them.

        What is wrong is said to be on its way: that it does not arrive ends this request alone, as the blocks are
        shared with no other until they do.
        """
        if (verdict := self._verdicts.get(request.request_id)) is None:
            return 0, False
        if isinstance(verdict, str):
            return 1, True
        return max(0, len(verdict.ids) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note where the units of a request have their place; also of one that comes back after a preemption."""
        if (verdict := self._verdicts.get(request.request_id)) is None or num_external_tokens == 0:
            return
        if isinstance(verdict, str):
            self._next.failed[request.request_id] = verdict
            return
        place, stop = list(blocks.get_block_ids()[0]), len(verdict.ids)
        start, path = stop - num_external_tokens, str(verdict.path)
        self._next.loads.append(Load(request.request_id, path, verdict.stamp, start, stop, place))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """Return what this step has to load."""
        loads, self._next = self._next, Loads()
        return loads

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request."""
        self._verdicts.pop(request.request_id, None)
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Refuse, when the engine starts, layers that cannot be written to."""
        layers = self._vllm_config.model_config.get_num_layers(self._vllm_config.parallel_config)
        if len({_index(name) for name in kv_caches}) != len(kv_caches) or len(kv_caches) != layers:
            raise ValueError(
                f"vLLM holds keys and values of {len(kv_caches)} layers where the backbone has {layers}, and a context "
                "has none for those of a draft model; answer without speculative decoding by a model"
            )
        for name in kv_caches:
            layer = self._vllm_config.compilation_config.static_forward_context[name]
            if not hasattr(layer.impl, "do_kv_cache_update"):
                raise ValueError(
                    f"{name} holds keys and values in a way that {type(layer.impl).__name__} does not let others "
                    "write; choose another attention backend"
                )

    @torch.no_grad()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write the units that this step needs, before it computes anything."""
        told = self._get_connector_metadata()
        for request_id, wrong in told.failed.items():
            _logger.error("request %s: %s", request_id, wrong)
            self._failed.add(request_id)
        for load in told.loads:
            try:
                self._write(load, forward_context.no_compile_layers)
            except Exception as error:  # a file that has gone, or gives no memory: its requests fail, the engine lives
                _logger.error("request %s: %s cannot be loaded: %s", load.request_id, load.path, error)
                first, end = load.start // self._block_size, -(-load.stop // self._block_size)
                self._bad_blocks.update(load.blocks[first:end])

    def _write(self, load: Load, layers: dict[str, Any]) -> None:
        caches = ((_index(name), layer, getattr(layer, "kv_cache", None)) for name, layer in layers.items())
        attention = {nth: layer for nth, layer, cache in caches if cache is not None and cache.numel() > 0}
        units = self._units(load.path, load.stamp, next(iter(attention.values())).impl.num_kv_heads)
        at = torch.arange(load.start, load.stop)
        slots = torch.tensor(load.blocks)[at // self._block_size] * self._block_size + at % self._block_size
        for index, layer in attention.items():
            cache = layer.kv_cache
            keys, values = (states[load.start : load.stop].to(cache.device) for states in units[index])
            # The backend's own way to write: it knows its layout, packing and quantisation.
            layer.impl.do_kv_cache_update(layer, keys, values, cache, slots.to(cache.device))
        _logger.debug("request %s: %d units of %s", load.request_id, len(at), load.path)

    def _read(self, path: str, stamp: Stamp, heads: int) -> Units:
        """Return the units of a file in the model's dtype, of the KV heads that this worker has.

        They are copies: a file that is written again must not change below the engine.
        """
        prefix = Prefix.from_file(path)
        if stamp_of(path) != stamp:
            raise ValueError("it has been written again since the request came in; ask once more")
        dtype = self._vllm_config.model_config.dtype
        return tuple(
            (self._own(keys, heads).to(dtype).contiguous(), self._own(values, heads).to(dtype).contiguous())
            for keys, values in zip(prefix.keys, prefix.values, strict=True)
        )

    def _own(self, states: Tensor, heads: int) -> Tensor:
        """Return this worker's KV heads of (U, all KV heads, D); where there are more workers, several share a head."""
        workers, every = self._vllm_config.parallel_config.tensor_parallel_size, states.shape[1]
        if workers == 1:
            return states
        rank = get_tensor_model_parallel_rank()
        first = rank * heads if every >= workers else rank * every // workers
        return states[:, first : first + heads]

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests that were waiting for what does not come."""
        failed, self._failed = self._failed, set()
        return KVConnectorTransferResults(finished_recving=failed, failed_recving=set(failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that should hold units and do not: whoever shares them fails."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all is there when a step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: contexts are read elsewhere."""

    def wait_for_save(self) -> None:
        """Do nothing."""


def _check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse an engine that could only answer wrongly."""
    if (groups := len(kv_cache_config.kv_cache_groups)) != 1:
        raise ValueError(
            f"this backbone has {groups} groups of KV caches, and a context is an ordinary prefix only where all "
            "layers have full attention; answer with locret.generate"
        )
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "fail":
        raise ValueError(
            f"kv_load_failure_policy={policy!r} would compute the ids that stand for a context as text where it cannot "
            'be loaded; leave it at "fail"'
        )
    describe(vllm_config.model_config.hf_text_config)


def _check(path: Path, prefix: Prefix, vllm_config: Any) -> None:
    """Refuse a context that was read with another backbone than vLLM has."""
    saved, rotary, config = prefix.backbone, prefix.rotary, vllm_config.model_config.hf_text_config
    here, rotation = describe(config), json.loads(json.dumps(config.rope_parameters or {}, default=str))
    sides = [(name, getattr(saved, name), getattr(here, name)) for name in _SHAPE]
    sides.append(("vocab_size", prefix.vocab_size, vllm_config.model_config.get_vocab_size()))
    sides += [(f"rope_parameters.{name}", rotary[name], rotation[name]) for name in rotary.keys() & rotation.keys()]
    different = [f"{name} {ours} in the file, {theirs} in vLLM" for name, ours, theirs in sides if ours != theirs]
    if different:
        raise ValueError(f"{path} was read with another backbone ({'; '.join(different)})")
    if "dynamic" in str(rotation.get("rope_type")):
        raise ValueError(
            "vLLM scales a dynamic rotation once, at its start, and contexts are read unscaled; answer with "
            "locret.generate"
        )
    original, most = rotation.get("original_max_position_embeddings"), vllm_config.model_config.max_model_len
    if "longrope" in str(rotation.get("rope_type")) and original and most <= original:
        raise ValueError(
            f"max_model_len={most} makes vLLM rotate keys with the short factors, and contexts are read with the long "
            f"ones; raise it above {original}"
        )


def _check_request(request: Any, listed: Listed) -> None:
    """Refuse what cannot be answered from a context."""
    ids, sampling, units = request.prompt_token_ids, request.sampling_params, len(listed.ids)
    wrong = {
        listed.wrong: bool(listed.wrong),
        f"the prompt has not all {units} placeholders of {listed.path.name}, or other ones": tuple(ids[:units])
        != listed.ids,
        "the prompt ends with the placeholders, and there is no question": len(ids) == units,
        "an embedding of the ids that stand for a context would be one of no text": sampling is None,
        "prompt_logprobs cannot be given for units whose tokens are not there; leave it out": sampling is not None
        and sampling.prompt_logprobs is not None,
        "repetition_penalty would count the placeholders, which stand for no words; send 1, also where the backbone's "
        "generation_config recommends another": sampling is not None and sampling.repetition_penalty != 1,
        "the context was read without an adapter; ask without lora_request": request.lora_request is not None,
    }
    for why in (why for why, so in wrong.items() if so):
        raise ValueError(why)


def _index(layer_name: str) -> int:
    return next(int(part) for part in layer_name.split(".") if part.isdigit())
