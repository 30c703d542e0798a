"""Reading a prompt one way and answering it greedily: the prediction, and the units, bytes and seconds that it took."""
# N prompt tokens, D of them of the document

from __future__ import annotations

import copy
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
from locret.conversation.chat import now
from locret.conversation.document import decode
from locret.conversation.head_shares import sharing
from locret.generation import FiniteLogits
from locret.infer.evaluation.methods import Prompt, make_scorer

if TYPE_CHECKING:
    from locret.infer.evaluation.plan import Run


@torch.no_grad()
def answer(prompt: Prompt, run: Run) -> dict[str, Any]:
    """Read a prompt as a whole, answer it greedily, and return the prediction, units, bytes and seconds."""
    if run.method.plain:  # read within `generate`: transformers alone, and nothing of ours but a look at it in between
        return _write(_Read(prompt, cache_of(prompt, run), {}), settings_of(prompt))
    return _write(_read(prompt, run, prompt.text.task.max_new_tokens), settings_of(prompt))


@torch.no_grad()
def answers_on_forks(prompts: Sequence[Prompt], run: Run) -> Iterator[dict[str, Any]]:
    """Read a document one way, ask each question on a fork of what was kept, and yield what `answer` returns, in order.

    The seconds of the read count for every question, as if it were the only one.
    """
    document = _read(prompts[0].document, run, 0)
    for prompt in prompts:
        yield _write(replace(document, prompt=prompt, cache=fork(document.cache)), settings_of(prompt))


@dataclass
class _Read:
    """A prompt that has been read, as a whole or up to its question, whose answer has not been written."""

    prompt: Prompt
    cache: RetentionCache | DynamicCache
    measured: dict[str, Any]
    """Of the read, by the names of a record; empty where it is read with its answer."""


def _read(prompt: Prompt, run: Run, new_tokens: int) -> _Read:
    ids_1N, cache, meter = prompt.ids_1N, cache_of(prompt, run), _UnitMeter()
    kept = peak = ids_1N.shape[1]
    start = now(ids_1N.device)
    if isinstance(cache, RetentionCache):
        prefill(prompt.setup.model, ids_1N, cache, new_tokens=new_tokens, on_chunk=meter)
        kept = round(fmean(layer.fill for layer in cache.governed))
        peak = max(meter.peak, peak if cache.policy.when == "prompt_end" else 0)
    else:
        model: Any = unwrap(prompt.setup.model)
        model(input_ids=ids_1N, past_key_values=cache, use_cache=True, logits_to_keep=1)
    measured = {"kept_units": kept, "peak_units": peak, "cache_bytes": held(cache)["cache_bytes"]}
    return _Read(prompt, cache, {**measured, "prefill_seconds": now(ids_1N.device) - start})


def _write(read: _Read, settings: dict[str, Any]) -> dict[str, Any]:
    """Read what a cache has not of its prompt, write the answer, and return what a record says."""
    prompt, cache, device, seen = read.prompt, read.cache, read.prompt.ids_1N.device, dict[str, Any]()

    def look(_ids: Tensor, logits: Tensor) -> Tensor:
        if not seen:  # the prompt's last logits: it has been read, and nothing has been written
            seen.update(at=now(device), units=units_of(cache), size=held(cache)["cache_bytes"])
        return logits

    start = now(device)
    new = written(prompt.setup.model, cache, prompt.ids_1N, {**settings, "logits_processor": [look]})
    end, measured = now(device), {"kept_units": seen["units"], "cache_bytes": seen["size"], **read.measured}
    return {
        "prediction": until(decode(prompt.setup.tokenizer, new), prompt.text.task.stop),
        "generated_tokens": len(new),
        **held(cache),
        **measured,
        "peak_units": max(measured.get("peak_units", 0), units_of(cache)),
        "prefill_seconds": measured.get("prefill_seconds", 0.0) + seen["at"] - start,
        "decode_seconds": end - seen["at"],
    }


def cache_of(prompt: Prompt, run: Run) -> RetentionCache | DynamicCache:
    """Return a new cache of a run, for a prompt of such a length."""
    if run.method.plain:
        return DynamicCache(config=unwrap(prompt.setup.model).config)
    setup, scorer, policy = prompt.setup, make_scorer(run.method, prompt), run.policy_of(prompt.ids_1N.shape[1])
    assert policy is not None
    policy = sharing(policy, scorer, setup.model, setup.tokenizer, prompt.text.template)
    return RetentionCache(setup.model, scorer, policy)


def fork(cache: Any) -> Any:
    """Return a copy of a cache that can be read and answered without changing it."""
    return cache.copy() if isinstance(cache, RetentionCache) else copy.deepcopy(cache)


def units_of(cache: Any) -> int:
    """Return the units that the fullest KV head holds."""
    return cache.memory().units if isinstance(cache, RetentionCache) else int(cache.get_seq_length())


def held(cache: Any) -> dict[str, int]:
    """Return what a record says of a cache's bytes."""
    if isinstance(cache, RetentionCache):
        memory = cache.memory()
        tier = {"host_bytes": memory.host, "moved_bytes": memory.moved} if memory.host_planned else {}
        return {"cache_bytes": memory.actual, "peak_bytes": memory.peak, **tier}
    plain = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return dict.fromkeys(("cache_bytes", "peak_bytes"), plain)


def written(model: Any, cache: Any, ids_1N: Tensor, settings: dict[str, Any]) -> list[int]:
    """Let the backbone's own `generate` read what a cache lacks of a prompt and go on; return the new tokens."""
    if isinstance(cache, RetentionCache):
        whole = cache.seen == ids_1N.shape[1]
        out_1N = generate(model, *(() if whole else (ids_1N,)), cache=cache, **settings)
        return out_1N[0, 0 if whole else ids_1N.shape[1] :].tolist()  # type: ignore[no-any-return]
    look = [*settings.get("logits_processor", ()), FiniteLogits(model)]
    given = {"attention_mask": torch.ones_like(ids_1N), "past_key_values": cache, **settings, "logits_processor": look}
    if gathering_root(model) is not None:
        given["synced_gpus"] = False  # `in_step` keeps the processes together
    return unwrap(model).generate(ids_1N, **given)[0, ids_1N.shape[1] :].tolist()  # type: ignore[operator]


class _UnitMeter:
    """Follows a read chunk by chunk: a layer attends to a chunk and to all that was kept before it evicts."""

    def __init__(self) -> None:
        self.peak = self._held = self._seen = 0

    def __call__(self, cache: RetentionCache) -> None:
        self.peak = max(self.peak, self._held + cache.seen - self._seen)
        self._held, self._seen = max((layer.fill for layer in cache.governed), default=0), cache.seen


def settings_of(prompt: Prompt) -> dict[str, Any]:
    """Return settings of greedy decoding; neutral ones too, or the backbone's own sampling would fill them in."""
    tokenizer, task = prompt.setup.tokenizer, prompt.text.task
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


def until(answer: str, stop: tuple[str, ...]) -> str:
    """Return an answer up to the first of the texts that end it."""
    return answer[: min((answer.find(text) for text in stop if text in answer), default=len(answer))]
