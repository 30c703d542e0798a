"""Reading a prompt one way and answering it greedily: the prediction, and the units, bytes and seconds that it took."""
# N prompt tokens, D of them of the document

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from locret import RetentionCache, generate, prefill
from locret.backbone.adapters import unwrap
from locret.backbone.passes import gathering_root
from locret.conversation.document import decode
from locret.generation import check_finite_logits
from locret.infer.evaluation.methods import Prompt, make_scorer
from locret.infer.evaluation.records import second_tier

if TYPE_CHECKING:
    from locret.data.tasks import Task
    from locret.infer.evaluation.plan import Run


@torch.no_grad()
def answer(prompt: Prompt, run: Run, task: Task) -> dict[str, Any]:
    """Read a prompt as a whole, answer it greedily, and return the prediction, units, bytes and seconds."""
    settings = settings_of(prompt, task)
    return _plain(prompt, settings) if run.method.plain else _write(_read(prompt, run, task.max_new_tokens), settings)


@torch.no_grad()
def answers_on_forks(prompts: Sequence[Prompt], run: Run, task: Task) -> Iterator[dict[str, Any]]:
    """Read a document one way, ask each question on a fork of what was kept, and yield what `answer` returns, in order.

    The seconds of the read count for every question, as if it were the only one.
    """
    if run.method.plain:
        yield from _asked_plainly(prompts, task)
        return
    document = _read(prompts[0].document, run, 0)
    for prompt in prompts:
        yield _write(replace(document, prompt=prompt, cache=document.cache.copy()), settings_of(prompt, task))


@dataclass
class _Read:
    """A prompt that has been read, as a whole or up to its question, whose answer has not been written."""

    prompt: Prompt
    cache: RetentionCache
    measured: dict[str, Any]
    """Of the read, by the names of a record."""


def _read(prompt: Prompt, run: Run, new_tokens: int) -> _Read:
    ids_1N, meter = prompt.ids_1N, _UnitMeter()
    cache = RetentionCache(prompt.setup.model, make_scorer(run.method, prompt), run.policy_of(ids_1N.shape[1]))
    start = now(ids_1N.device)
    prefill(prompt.setup.model, ids_1N, cache, new_tokens=new_tokens, on_chunk=meter)
    measured = {
        "kept_units": round(fmean(layer.fill for layer in cache.governed)),
        "peak_units": max(meter.peak, ids_1N.shape[1] if cache.policy.when == "prompt_end" else 0),
        "cache_bytes": cache.memory().actual,
        "prefill_seconds": now(ids_1N.device) - start,
    }
    return _Read(prompt, cache, measured)


def _write(read: _Read, settings: dict[str, Any]) -> dict[str, Any]:
    """Read what a cache has not of its prompt, write the answer, and return what a record says."""
    prompt, cache, measured, times = read.prompt, read.cache, read.measured, dict[str, float]()
    whole = cache.seen == prompt.ids_1N.shape[1]

    def look(_ids: Tensor, logits: Tensor) -> Tensor:
        times.setdefault("read", now(prompt.ids_1N.device))  # the prompt has been read, and nothing has been written
        return logits

    start = now(prompt.ids_1N.device)
    ids = () if whole else (prompt.ids_1N,)
    out = generate(prompt.setup.model, *ids, cache=cache, logits_processor=[look], **settings)
    end, after = now(prompt.ids_1N.device), cache.memory()
    return {
        **_said(prompt, out[0, 0 if whole else prompt.ids_1N.shape[1] :].tolist()),
        **measured,
        "peak_units": max(measured["peak_units"], after.units),
        "peak_bytes": after.peak,
        **second_tier(after),
        "prefill_seconds": measured["prefill_seconds"] + times["read"] - start,
        "decode_seconds": end - times["read"],
    }


def _said(prompt: Prompt, new: Sequence[int]) -> dict[str, Any]:
    return {"prediction": decode(prompt.setup.tokenizer, new), "generated_tokens": len(new)}


def _asked_plainly(prompts: Sequence[Prompt], task: Task) -> Iterator[dict[str, Any]]:
    """Read a document into the plain cache of transformers, and yield the answers to its questions, each on a copy."""
    model, ids_1D = unwrap(prompts[0].setup.model), prompts[0].document.ids_1N
    cache, start = DynamicCache(config=model.config), now(ids_1D.device)
    model(input_ids=ids_1D, past_key_values=cache, use_cache=True, logits_to_keep=1)
    seconds, held = now(ids_1D.device) - start, {"kept_units": ids_1D.shape[1], "cache_bytes": bytes_of(cache)}
    for prompt in prompts:
        found = _plain(prompt, settings_of(prompt, task), copy.deepcopy(cache))
        yield {**found, **held, "prefill_seconds": found["prefill_seconds"] + seconds}


def _plain(prompt: Prompt, settings: dict[str, Any], cache: DynamicCache | None = None) -> dict[str, Any]:
    """Answer with transformers alone: its cache, its `generate`, nothing of ours but a look at the cache in between."""
    ids_1N, model = prompt.ids_1N, unwrap(prompt.setup.model)
    cache = DynamicCache(config=model.config) if cache is None else cache
    if gathering_root(prompt.setup.model) is not None:
        settings = {**settings, "synced_gpus": False}  # `in_step` keeps the processes together
    read: dict[str, Any] = {}

    def look(_ids: Tensor, logits: Tensor) -> Tensor:
        if not read:  # the prompt's last logits: it has been read, and nothing has been written
            read.update(seconds=now(ids_1N.device), units=cache.get_seq_length(), size=bytes_of(cache))
        check_finite_logits(model, logits)
        return logits

    start = now(ids_1N.device)
    out = model.generate(
        ids_1N, attention_mask=torch.ones_like(ids_1N), past_key_values=cache, logits_processor=[look], **settings
    )
    return {
        **_said(prompt, out[0, ids_1N.shape[1] :].tolist()),
        "kept_units": read["units"],
        "peak_units": cache.get_seq_length(),
        "cache_bytes": read["size"],
        "peak_bytes": bytes_of(cache),
        "prefill_seconds": read["seconds"] - start,
        "decode_seconds": now(ids_1N.device) - read["seconds"],
    }


class _UnitMeter:
    """Follows a read chunk by chunk: a layer attends to a chunk and to all that was kept before it evicts."""

    def __init__(self) -> None:
        self.peak = self._held = self._seen = 0

    def __call__(self, cache: RetentionCache) -> None:
        self.peak = max(self.peak, self._held + cache.seen - self._seen)
        self._held, self._seen = max((layer.fill for layer in cache.governed), default=0), cache.seen


def settings_of(prompt: Prompt, task: Task) -> dict[str, Any]:
    """Return settings of greedy decoding; neutral ones too, or the backbone's own sampling would fill them in."""
    tokenizer = prompt.setup.tokenizer
    ends = unwrap(prompt.setup.model).generation_config.eos_token_id  # type: ignore[union-attr]
    ends = tokenizer.eos_token_id if ends is None else ends
    every = ends if isinstance(ends, list) else [ends]
    settings = {
        "max_new_tokens": task.max_new_tokens,
        "do_sample": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 50,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else every[0],
    }
    if task.stop:
        settings |= {"stop_strings": list(task.stop), "tokenizer": tokenizer}
    if task.stop and task.min_new_tokens:
        last = [id for text in task.stop for id in tokenizer(text, add_special_tokens=False)["input_ids"][-1:]]
        settings["begin_suppress_tokens"] = [id for id in (*every, *last) if id is not None]
    return settings


def bytes_of(cache: Any) -> int:
    """Return what the plain cache of transformers holds."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def now(device: torch.device) -> float:
    """Return the seconds of a clock, once the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
