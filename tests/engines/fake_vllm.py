"""As much of vLLM as the connector touches, for machines without it; `test_vllm_engine.py` runs the real one.

Signatures are those of vLLM 0.32.0: `vllm/distributed/kv_transfer/kv_connector/v1/base.py`
(connector, metadata, roles, transfer results), `vllm/v1/core/sched/scheduler.py` (the order of calls, what happens to
tokens that are promised, which requests fail), `vllm/v1/worker/kv_connector_model_runner_mixin.py` (the worker's calls)
and the attention implementations' `do_kv_cache_update`.
"""

import enum
import sys
import types
from dataclasses import dataclass, field

import torch

BLOCK = 8


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class KVConnectorBase_V1:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def _get_connector_metadata(self):
        assert self._connector_metadata is not None
        return self._connector_metadata


RANK = 0


def _remember(text, *values):
    LOGGER.lines.append(text % values)


LOGGER = types.SimpleNamespace(lines=[], error=_remember, debug=_remember)
"""Remembers what is logged."""


def modules():
    """Return the fake package, module by module."""
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    names = [base.rsplit(".", n)[0] for n in range(base.count(".") + 1)] + ["vllm.logger"]
    made = {name: types.ModuleType(name) for name in names}
    for name in ("KVConnectorRole", "KVConnectorMetadata", "KVConnectorTransferResults", "KVConnectorBase_V1"):
        setattr(made[base], name, globals()[name])
    made["vllm.distributed"].get_tensor_model_parallel_rank = lambda: sys.modules[__name__].RANK
    made["vllm.logger"].init_logger = lambda name: LOGGER
    return made


# -- what vLLM holds --------------------------------------------------------------------------------------------------


class Attention:
    """A layer, and its implementation in one: pages of (block, K, D) keys and values."""

    def __init__(self, blocks, heads, size):
        self.num_kv_heads, self.head_size, self.impl = heads, size, self
        self.kv_cache = torch.full((2, blocks, BLOCK, heads, size), float("nan"))

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        assert layer is self
        assert slot_mapping.dtype == torch.int64
        assert key.shape == value.shape == (len(slot_mapping), self.num_kv_heads, self.head_size)
        for states, pages in zip((key, value), kv_cache, strict=True):
            assert states.is_contiguous()
            assert states.dtype == pages.dtype
            pages.view(-1, self.num_kv_heads, self.head_size)[slot_mapping] = states


@dataclass
class SamplingParams:
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict | None = None
    sampling_params: SamplingParams | None = field(default_factory=SamplingParams)
    lora_request: object = None
    skip_reading_prefix_cache: bool = False
    blocks: list[int] = field(default_factory=list)
    outcome: str = ""


class Engine:
    """One scheduler and its workers, with vLLM's order of calls: blocks, prefix cache, loads, failures."""

    def __init__(self, connector, config, groups=(1,), blocks=64, workers=1):
        cache = types.SimpleNamespace(kv_cache_groups=groups)
        text = config.model_config.hf_text_config
        local = max(1, text.num_key_value_heads // workers)
        config.parallel_config.tensor_parallel_size = workers
        self.layers = [
            {
                f"model.layers.{i}.self_attn.attn": Attention(blocks, local, text.head_dim)
                for i in range(text.num_hidden_layers)
            }
            for _ in range(workers)
        ]
        self.scheduler = connector(config, KVConnectorRole.SCHEDULER, kv_cache_config=cache)
        self.workers = []
        for layers in self.layers:
            config.compilation_config.static_forward_context = {**layers, "model.layers.0.mlp": object()}
            self.workers.append(connector(config, KVConnectorRole.WORKER, kv_cache_config=cache))
            self.workers[-1].register_kv_caches({name: layer.kv_cache for name, layer in layers.items()})
        self.free, self.cached = list(range(blocks)), {}

    def step(self, *requests):
        """Run new requests, or ones that come back after a preemption, through one step; note what becomes of them."""
        waiting = set()
        for request in requests:
            if request.outcome != "preempted":
                self.scheduler.on_new_request(request)
            self._admit(request, waiting)
        self._run(requests, waiting, self.scheduler.build_connector_meta(object()))

    def _admit(self, request, waiting):
        ids, shared = request.prompt_token_ids or [], []
        hits = 0 if request.skip_reading_prefix_cache else (len(ids) - 1) // BLOCK
        for nth in range(hits):
            block = self.cached.get(tuple(ids[: (nth + 1) * BLOCK]))
            if block is None:
                break
            shared.append(block)
        local = len(shared) * BLOCK
        external, later = self.scheduler.get_num_new_matched_tokens(request, local)
        if request.skip_reading_prefix_cache:
            external, later = 0, False
        assert external or not later
        assert local + external <= len(ids)
        new = -(-(local + external if later else len(ids)) // BLOCK) - len(shared)
        request.blocks = shared + [self.free.pop(0) for _ in range(new)]
        blocks = types.SimpleNamespace(get_block_ids=lambda: (list(request.blocks),))
        self.scheduler.update_state_after_alloc(request, blocks, external)
        request.local, request.external = local, external
        if later:
            waiting.add(request.request_id)
        else:
            for nth in range(len(ids) // BLOCK):
                self.cached[tuple(ids[: (nth + 1) * BLOCK])] = request.blocks[nth]

    def _run(self, requests, waiting, metadata):
        bad, finished, failed = set(), [], set()
        for worker, layers in zip(self.workers, self.layers, strict=True):
            sys.modules[__name__].RANK = self.workers.index(worker)
            context = types.SimpleNamespace(no_compile_layers={**layers, "model.layers.0.mlp": object()})
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(context)
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            finished.append(results.finished_recving)
            failed |= results.failed_recving
            bad |= worker.get_block_ids_with_load_errors()
            worker.clear_connector_metadata()
        for request in requests:
            if request.request_id in waiting:
                assert all(request.request_id in done for done in finished)
                request.outcome = "error" if request.request_id in failed else "received"
            else:
                computed = request.blocks[: -(-(request.local + request.external) // BLOCK)]
                request.outcome = "error" if bad & set(computed) else "ok"
            if request.outcome == "error":
                self.cached = {ids: block for ids, block in self.cached.items() if block not in bad}

    def units(self, request, count, worker=0):
        """Return keys and values of each layer, (count, K, D), where a request's first positions are."""
        pages = [layer.kv_cache[:, request.blocks] for layer in self.layers[worker].values()]
        return [states.flatten(1, 2)[:, :count].unbind() for states in pages]
