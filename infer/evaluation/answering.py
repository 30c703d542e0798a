"""Reading a prompt one way and answering it greedily: the prediction, and the units, bytes and seconds that it took."""
# N prompt tokens, D of them of the document

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from locret import RetentionCache, generate, prefill
from locret.backbone.adapters import unwrap
from locret.backbone.passes import gathering_root
from locret.infer.evaluation.methods import Prompt, make_scorer, protects
from locret.infer.evaluation.records import second_tier
from locret.policy.protection import Guarantee

if TYPE_CHECKING:
    from transformers import DynamicCache

    from locret.data.tasks import Task
    from locret.infer.evaluation.runner import Run


@torch.no_grad()
def answer(
    prompt: Prompt, run: Run, max_new_tokens: int, stop: Sequence[str] = (), min_new_tokens: int = 0
) -> dict[str, Any]:
    """Read a prompt one way and answer it greedily; return the prediction, units, bytes and seconds.

    Args:
        prompt: The prompt.
        run: How it is read.
        max_new_tokens: Longest answer.
        stop: Texts that end the answer, which still includes them.
        min_new_tokens: 1 if the answer may not begin with its end.
    """
    ids_1N, model = prompt.ids_1N, prompt.setup.model
    settings = greedy(model, prompt.setup.tokenizer, max_new_tokens)
    settings |= ending(prompt.setup.tokenizer, settings["eos_token_id"], stop, min_new_tokens)
    if run.method.plain:
        new, measured = _plain(model, ids_1N, settings)
    else:
        cache = _cache_of(prompt, run)
        new, measured = _retained(model, cache, ids_1N, settings)
    tokenizer = prompt.setup.tokenizer
    prediction = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"prediction": str(prediction), "generated_tokens": len(new), **measured}


@torch.no_grad()
def answers_on_forks(prompts: Sequence[Prompt], run: Run, task: Task) -> Iterator[dict[str, Any]]:
    """Read a document one way, ask each question on a fork of what was kept of it, and yield what `answer` returns.

    The seconds of the read count for every question, as if it were the only one.

    Args:
        prompts: The questions' prompts, which begin with the same document.
        run: How it is read.
        task: Says how long an answer may be, and where it ends.
    """
    first = prompts[0]
    ask = _read_plain(first.document) if run.method.plain else _read_retained(first.document, run)
    tokenizer, model = first.setup.tokenizer, first.setup.model
    settings = greedy(model, tokenizer, task.max_new_tokens)
    settings |= ending(tokenizer, settings["eos_token_id"], task.stop, task.min_new_tokens)
    for prompt in prompts:
        new, measured = ask(prompt.ids_1N, settings)
        prediction = str(tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        yield {"prediction": prediction, "generated_tokens": len(new), **measured}


Ask = Callable[[Tensor, dict[str, Any]], tuple[list[int], dict[str, Any]]]
"""Answers a whole prompt (1, N), whose document was read, with settings of `generate`."""


def _read_plain(document: Prompt) -> Ask:
    """Read a document into the plain cache of transformers."""
    from transformers import DynamicCache

    model, ids_1D = document.setup.model, document.ids_1N
    cache, start = DynamicCache(config=unwrap(model).config), _now(ids_1D.device)
    unwrap(model)(input_ids=ids_1D, past_key_values=cache, use_cache=True, logits_to_keep=1)
    seconds = _now(ids_1D.device) - start

    def ask(ids_1N: Tensor, settings: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        fork = copy.deepcopy(cache)
        new, measured = _plain(model, ids_1N, settings, fork)
        measured["prefill_seconds"] += seconds
        return new, {**measured, "kept_units": cache.get_seq_length(), "cache_bytes": _bytes(cache)}

    return ask


def _read_retained(document: Prompt, run: Run) -> Ask:
    """Read a document into a bounded cache."""
    model, ids_1D = document.setup.model, document.ids_1N
    cache, meter, start = _cache_of(document, run), _UnitMeter(), _now(ids_1D.device)
    prefill(model, ids_1D, cache, on_chunk=meter)
    seconds, memory = _now(ids_1D.device) - start, cache.memory()
    kept = round(fmean(layer.fill for layer in cache.governed))
    everything = ids_1D.shape[1] if cache.policy.when == "prompt_end" else 0

    def ask(ids_1N: Tensor, settings: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        fork, read = cache.copy(), dict[str, float]()

        def look(_ids: Tensor, logits: Tensor) -> Tensor:
            read.setdefault("end", _now(ids_1N.device))  # the question has been read, and nothing has been written
            return logits

        start = _now(ids_1N.device)
        out = generate(model, ids_1N, cache=fork, logits_processor=[look], **settings)
        end, after = _now(ids_1N.device), fork.memory()
        return out[0, ids_1N.shape[1] :].tolist(), {
            "kept_units": kept,
            "peak_units": max(meter.peak, after.units, everything),
            "cache_bytes": memory.actual,
            "peak_bytes": after.peak,
            **second_tier(after),
            **_protected(cache),
            "prefill_seconds": seconds + read["end"] - start,
            "decode_seconds": end - read["end"],
        }

    return ask


def _plain(
    model: nn.Module, ids_1N: Tensor, settings: dict[str, Any], cache: DynamicCache | None = None
) -> tuple[list[int], dict[str, Any]]:
    """Answer with transformers alone: its cache, its `generate`, nothing of ours but a look at the cache in between."""
    from transformers import DynamicCache

    cache = DynamicCache(config=unwrap(model).config) if cache is None else cache
    if gathering_root(model) is not None:
        settings = {**settings, "synced_gpus": False}  # `in_step` keeps the processes together
    read: dict[str, Any] = {}

    def look(_ids: Tensor, logits: Tensor) -> Tensor:
        if not read:  # the prompt's last logits: it has been read, and nothing has been written
            read.update(seconds=_now(ids_1N.device), units=cache.get_seq_length(), size=_bytes(cache))
        return logits

    start = _now(ids_1N.device)
    out = unwrap(model).generate(
        ids_1N, attention_mask=torch.ones_like(ids_1N), past_key_values=cache, logits_processor=[look], **settings
    )
    return out[0, ids_1N.shape[1] :].tolist(), {
        "kept_units": read["units"],
        "peak_units": cache.get_seq_length(),
        "cache_bytes": read["size"],
        "peak_bytes": _bytes(cache),
        "prefill_seconds": read["seconds"] - start,
        "decode_seconds": _now(ids_1N.device) - read["seconds"],
    }


def _cache_of(prompt: Prompt, run: Run) -> RetentionCache:
    """Return an empty cache that protects what of the prompt is to be."""
    policy = run.policy_of(prompt.ids_1N.shape[1])
    cache = RetentionCache(prompt.setup.model, make_scorer(run.method, prompt), policy)
    if protects(run.method) and (spans := prompt.protected()):
        cache.protect(spans)
    return cache


def _protected(cache: RetentionCache) -> dict[str, int]:
    """Return what a record says of protected tokens, if there are some."""
    spans = cache.protected[0] if cache.protected else ()
    return {"protected": Guarantee.of(spans, cache.policy.budget).needed(cache.seen)} if spans else {}


def _retained(
    model: nn.Module, cache: RetentionCache, ids_1N: Tensor, settings: dict[str, Any]
) -> tuple[list[int], dict[str, Any]]:
    """Answer from a bounded cache."""
    meter = _UnitMeter()
    start = _now(ids_1N.device)
    prefill(model, ids_1N, cache, new_tokens=settings["max_new_tokens"], on_chunk=meter)
    read, memory = _now(ids_1N.device), cache.memory()
    kept = round(fmean(layer.fill for layer in cache.governed))
    new = generate(model, cache=cache, **settings)[0].tolist()
    end, after = _now(ids_1N.device), cache.memory()
    everything = ids_1N.shape[1] if cache.policy.when == "prompt_end" else 0
    return new, {
        "kept_units": kept,
        "peak_units": max(meter.peak, after.units, everything),
        "cache_bytes": memory.actual,
        "peak_bytes": after.peak,
        **second_tier(after),
        **_protected(cache),
        "prefill_seconds": read - start,
        "decode_seconds": end - read,
    }


class _UnitMeter:
    """Follows a read chunk by chunk: a layer attends to a chunk and to all that was kept before it evicts."""

    def __init__(self) -> None:
        self.peak = self._held = self._seen = 0

    def __call__(self, cache: RetentionCache) -> None:
        self.peak = max(self.peak, self._held + cache.seen - self._seen)
        self._held, self._seen = max((layer.fill for layer in cache.governed), default=0), cache.seen


def greedy(model: nn.Module, tokenizer: Any, max_new_tokens: int) -> dict[str, Any]:
    """Return the settings of `generate`; neutral ones too, or the backbone's own sampling would fill them in."""
    ends = unwrap(model).generation_config.eos_token_id  # type: ignore[union-attr]
    ends = tokenizer.eos_token_id if ends is None else ends
    first = ends[0] if isinstance(ends, list) else ends
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 50,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else first,
    }


def ending(tokenizer: Any, ends: Any, stop: Sequence[str], min_new_tokens: int) -> dict[str, Any]:
    """Return the settings of `generate` for texts that end an answer."""
    if not stop:
        return {}
    settings = {"stop_strings": list(stop), "tokenizer": tokenizer}
    if min_new_tokens:
        last = [tokenizer(text, add_special_tokens=False)["input_ids"][-1:] for text in stop]
        first = [*(ends if isinstance(ends, list) else [ends]), *(id for ids in last for id in ids)]
        settings["begin_suppress_tokens"] = [id for id in first if id is not None]
    return settings


def _bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
