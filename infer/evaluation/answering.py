"""Reading a prompt one way and answering it greedily: the prediction, and the units, bytes and seconds that it took."""
# N prompt tokens, D of them of the document

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from locret import RetentionCache, generate, prefill
from locret.backbone.adapters import unwrap
from locret.backbone.passes import gathering_root
from locret.chunked_prefill import read_turn
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
    return {"prediction": _decoded(prompt.setup.tokenizer, new), "generated_tokens": len(new), **measured}


@torch.no_grad()
def answers(prompts: Sequence[Prompt], run: Run, task: Task, batch: int = 1) -> Iterator[dict[str, Any]]:
    """Read each prompt as a whole, write the answers, as many side by side as a batch has, and yield what they took.

    Args:
        prompts: The prompts.
        run: How they are read.
        task: Says how long an answer may be, and where it ends.
        batch: Most answers that are written side by side.
    """
    if _alone(run, batch):
        for prompt in prompts:
            yield answer(prompt, run, task.max_new_tokens, task.stop, task.min_new_tokens)
        return
    yield from _in_batches((_Read(one, *_read_bounded(one, run, task.max_new_tokens)) for one in prompts), task, batch)


@torch.no_grad()
def answers_on_forks(
    texts: Sequence[Sequence[Prompt]], run: Run, task: Task, batch: int = 1
) -> Iterator[dict[str, Any]]:
    """Read documents one way, ask each question on a fork of what was kept, and yield what `answer` returns, in order.

    The seconds of the read count for every question, as if it were the only one.

    Args:
        texts: The prompts of each text's questions, which begin with the same document.
        run: How they are read.
        task: Says how long an answer may be, and where it ends.
        batch: Most answers that are written side by side, whichever texts they are about.
    """
    if _alone(run, batch):
        for prompts in texts:
            document = prompts[0].document
            ask = _read_plain(document) if run.method.plain else _forks(*_read_bounded(document, run, 0))
            yield from _one_by_one(prompts, ask, task)
    else:
        yield from _in_batches(_read_questions(texts, run, task), task, batch)


def _read_questions(
    texts: Sequence[Sequence[Prompt]], run: Run, task: Task
) -> Iterator[_Read | Iterator[dict[str, Any]]]:
    """Read documents and yield their questions, read on forks; those that evict for themselves are yet to be asked."""
    for prompts in texts:
        cache, measured = _read_bounded(prompts[0].document, run, 0)
        for prompt in prompts:
            if prompt.ids_1N.shape[1] - cache.seen > cache.turn_room:
                yield _one_by_one([prompt], _forks(cache, measured), task)
            else:
                yield _read_question(prompt, cache, measured, task)


def _in_batches(found: Iterable[_Read | Iterator[dict[str, Any]]], task: Task, batch: int) -> Iterator[dict[str, Any]]:
    """Yield the answers to what was read, in order, those under one policy side by side."""
    waiting = list[_Read]()
    for one in found:
        fits = isinstance(one, _Read) and (not waiting or one.cache.policy == waiting[0].cache.policy)
        if waiting and (not fits or len(waiting) == batch):
            yield from _side_by_side(waiting, task)
            waiting = []
        if isinstance(one, _Read):
            waiting.append(one)
        else:
            yield from one
    if waiting:
        yield from _side_by_side(waiting, task)


def _one_by_one(prompts: Sequence[Prompt], ask: Ask, task: Task) -> Iterator[dict[str, Any]]:
    tokenizer, settings = prompts[0].setup.tokenizer, _settings(prompts[0], task)
    for prompt in prompts:
        new, measured = ask(prompt.ids_1N, settings)
        yield {"prediction": _decoded(tokenizer, new), "generated_tokens": len(new), **measured}


def _alone(run: Run, batch: int) -> bool:
    """Return whether each answer is written by itself, as it must be where units are counted or evicted per answer."""
    policy = run.policy
    return batch == 1 or run.method.plain or policy is None or policy.decode_budget is not None


def _settings(prompt: Prompt, task: Task) -> dict[str, Any]:
    settings = greedy(prompt.setup.model, prompt.setup.tokenizer, task.max_new_tokens)
    return settings | ending(prompt.setup.tokenizer, settings["eos_token_id"], task.stop, task.min_new_tokens)


def _decoded(tokenizer: Any, new: Sequence[int]) -> str:
    return str(tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@dataclass
class _Read:
    """A prompt that has been read, as a whole or but for its last token, whose answer has not been written."""

    prompt: Prompt
    cache: RetentionCache
    measured: dict[str, Any]
    """Of the read, by the names of a record."""


def _read_question(prompt: Prompt, cache: RetentionCache, measured: dict[str, Any], task: Task) -> _Read:
    """Read the question about a document that a cache has read, but for its last token, on a fork."""
    own, start = cache.copy(), _now(prompt.ids_1N.device)
    rest_1L = prompt.ids_1N[:, cache.seen : -1]
    if rest_1L.shape[1]:
        read_turn(prompt.setup.model, rest_1L, own, new_tokens=task.max_new_tokens + 1)
    seconds = measured["prefill_seconds"] + _now(prompt.ids_1N.device) - start
    return _Read(prompt, own, {**measured, "prefill_seconds": seconds})


def _read_bounded(prompt: Prompt, run: Run, new_tokens: int) -> tuple[RetentionCache, dict[str, Any]]:
    """Read a prompt into a bounded cache; return it, and what a record says of the read."""
    ids_1N, cache, meter = prompt.ids_1N, _cache_of(prompt, run), _UnitMeter()
    start = _now(ids_1N.device)
    prefill(prompt.setup.model, ids_1N, cache, new_tokens=new_tokens, on_chunk=meter)
    return cache, {
        "kept_units": round(fmean(layer.fill for layer in cache.governed)),
        "peak_units": max(meter.peak, ids_1N.shape[1] if cache.policy.when == "prompt_end" else 0),
        "cache_bytes": cache.memory().actual,
        **_protected(cache),
        "prefill_seconds": _now(ids_1N.device) - start,
    }


def _side_by_side(readings: Sequence[_Read], task: Task) -> Iterator[dict[str, Any]]:
    """Write the answers to what was read as one batch, and yield what a record says of each.

    What is held is that of one answer, and so are the seconds of writing: an equal share of those of the batch.
    """
    first, rows = readings[0].prompt, len(readings)
    settings, device = _settings(first, task), first.ids_1N.device
    before, cache, start = [one.cache.memory() for one in readings], readings[0].cache, _now(device)
    if rows > 1:
        cache = cache.fresh()
        cache.join([one.cache for one in readings], max(one.cache.seen for one in readings), task.max_new_tokens + 1)
    units, ids_BN = cache.memory().units, _padded([one.prompt.ids_1N for one in readings], settings["pad_token_id"])
    mask_BN = _padded([torch.ones_like(one.prompt.ids_1N) for one in readings], 0)
    out = generate(first.setup.model, ids_BN, attention_mask=mask_BN, cache=cache, **settings)
    seconds, after = (_now(device) - start) / rows, cache.memory()
    moved = (after.moved - sum(one.moved for one in before)) // rows
    for reading, own, row in zip(readings, before, out[:, ids_BN.shape[1] :].tolist(), strict=True):
        new = _until_end(row, settings)
        tier = {"host_bytes": after.host // rows, "moved_bytes": own.moved + moved} if after.host_planned else {}
        yield {
            "prediction": _decoded(first.setup.tokenizer, new),
            "generated_tokens": len(new),
            **reading.measured,
            "peak_units": max(reading.measured["peak_units"], own.units + after.units - units),
            "peak_bytes": max(own.peak, after.peak // rows),
            **tier,
            "decode_seconds": seconds,
        }


def _padded(rows: Sequence[Tensor], value: int) -> Tensor:
    """Return rows (1, N) of different lengths as one batch, aligned to the right."""
    width = max(row.shape[1] for row in rows)
    return torch.cat([nn.functional.pad(row, (width - row.shape[1], 0), value=value) for row in rows])


def _until_end(new: list[int], settings: dict[str, Any]) -> list[int]:
    """Return an answer without the padding that waits for longer ones beside it."""
    ends = settings["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    last = next((nth for nth, token in enumerate(new) if token in ends), None)
    if last is not None:
        return new[: last + 1]
    while new and new[-1] == settings["pad_token_id"]:
        new = new[:-1]
    return new


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


def _forks(cache: RetentionCache, measured: dict[str, Any]) -> Ask:
    """Return what asks forks of a bounded cache that has read a document."""

    def ask(ids_1N: Tensor, settings: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        fork, read = cache.copy(), dict[str, float]()

        def look(_ids: Tensor, logits: Tensor) -> Tensor:
            read.setdefault("end", _now(ids_1N.device))  # the question has been read, and nothing has been written
            return logits

        start = _now(ids_1N.device)
        out = generate(cache.model, ids_1N, cache=fork, logits_processor=[look], **settings)
        end, after = _now(ids_1N.device), fork.memory()
        return out[0, ids_1N.shape[1] :].tolist(), {
            **measured,
            "peak_units": max(measured["peak_units"], after.units),
            "peak_bytes": after.peak,
            **second_tier(after),
            "prefill_seconds": measured["prefill_seconds"] + read["end"] - start,
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
