"""Reading a prompt one way and answering it greedily: the prediction, and the units, bytes and seconds that it took."""
# N prompt tokens, D of them of the document

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from locret import RetentionCache, generate, prefill
from locret.backbone.adapters import unwrap
from locret.backbone.passes import gathering_root
from locret.chunked_prefill import read_turn
from locret.generation import check_finite_logits
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
    settings = _settings(prompt, max_new_tokens, stop, min_new_tokens)
    return _plain(prompt, settings) if run.method.plain else _write(_read(prompt, run, max_new_tokens), settings)


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
    else:
        yield from _in_batches((_read(prompt, run, task.max_new_tokens) for prompt in prompts), task, batch)


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
    if not _alone(run, batch):
        yield from _in_batches(_questions(texts, run, task), task, batch)
        return
    for prompts in texts:
        if run.method.plain:
            yield from _asked_plainly(prompts, task)
            continue
        document = _read(prompts[0].document, run, 0)
        for prompt in prompts:
            yield _write(document.fork(prompt), settings_of(prompt, task))


@dataclass
class _Read:
    """A prompt that has been read, as a whole or up to some token, whose answer has not been written."""

    prompt: Prompt
    cache: RetentionCache
    measured: dict[str, Any]
    """Of the read, by the names of a record."""

    def fork(self, prompt: Prompt) -> _Read:
        """Return another prompt that begins with this one."""
        return _Read(prompt, self.cache.copy(), self.measured)


def _questions(texts: Sequence[Sequence[Prompt]], run: Run, task: Task) -> Iterator[_Read | dict[str, Any]]:
    """Read documents and yield their questions, read on forks but for their last tokens; or the answers to questions
    that evict for themselves.
    """
    for prompts in texts:
        document = _read(prompts[0].document, run, 0)
        for prompt in prompts:
            fork, start = document.fork(prompt), _now(prompt.ids_1N.device)
            if prompt.ids_1N.shape[1] - fork.cache.seen > fork.cache.turn_room:
                yield _write(fork, settings_of(prompt, task))
                continue
            rest_1L = prompt.ids_1N[:, fork.cache.seen : -1]
            if rest_1L.shape[1]:
                read_turn(prompt.setup.model, rest_1L, fork.cache, new_tokens=task.max_new_tokens + 1)
            seconds = document.measured["prefill_seconds"] + _now(prompt.ids_1N.device) - start
            fork.measured = {**document.measured, "prefill_seconds": seconds}
            yield fork


def _in_batches(found: Iterable[_Read | dict[str, Any]], task: Task, batch: int) -> Iterator[dict[str, Any]]:
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
            yield one
    if waiting:
        yield from _side_by_side(waiting, task)


def _alone(run: Run, batch: int) -> bool:
    """Return whether each answer is written by itself, as it must be where units are counted or evicted per answer."""
    policy = run.policy
    return batch == 1 or run.method.plain or policy is None or policy.decode_budget is not None


def _read(prompt: Prompt, run: Run, new_tokens: int) -> _Read:
    """Read a prompt into a bounded cache, which protects what of it is to be."""
    ids_1N, meter = prompt.ids_1N, _UnitMeter()
    cache = RetentionCache(prompt.setup.model, make_scorer(run.method, prompt), run.policy_of(ids_1N.shape[1]))
    if protects(run.method) and (spans := prompt.protected()):
        cache.protect(spans)
    start = _now(ids_1N.device)
    prefill(prompt.setup.model, ids_1N, cache, new_tokens=new_tokens, on_chunk=meter)
    seconds, spans = _now(ids_1N.device) - start, list(cache.protected[0]) if cache.protected else []
    protected = {"protected": Guarantee.of(spans, cache.policy.budget).needed(cache.seen)} if spans else {}
    measured = {
        "kept_units": round(fmean(layer.fill for layer in cache.governed)),
        "peak_units": max(meter.peak, ids_1N.shape[1] if cache.policy.when == "prompt_end" else 0),
        "cache_bytes": cache.memory().actual,
        **protected,
        "prefill_seconds": seconds,
    }
    return _Read(prompt, cache, measured)


def _write(read: _Read, settings: dict[str, Any]) -> dict[str, Any]:
    """Read what a cache has not of its prompt, write the answer, and return what a record says."""
    prompt, cache, measured, times = read.prompt, read.cache, read.measured, dict[str, float]()
    whole = cache.seen == prompt.ids_1N.shape[1]

    def look(_ids: Tensor, logits: Tensor) -> Tensor:
        times.setdefault("read", _now(prompt.ids_1N.device))  # the prompt has been read, and nothing has been written
        return logits

    start = _now(prompt.ids_1N.device)
    ids = () if whole else (prompt.ids_1N,)
    out = generate(prompt.setup.model, *ids, cache=cache, logits_processor=[look], **settings)
    end, after = _now(prompt.ids_1N.device), cache.memory()
    new = out[0, 0 if whole else prompt.ids_1N.shape[1] :].tolist()
    return {
        **_said(prompt, new),
        **measured,
        "peak_units": max(measured["peak_units"], after.units),
        "peak_bytes": after.peak,
        **second_tier(after),
        "prefill_seconds": measured["prefill_seconds"] + times["read"] - start,
        "decode_seconds": end - times["read"],
    }


def _said(prompt: Prompt, new: Sequence[int]) -> dict[str, Any]:
    decoded = prompt.setup.tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return {"prediction": str(decoded), "generated_tokens": len(new)}


def _side_by_side(readings: Sequence[_Read], task: Task) -> Iterator[dict[str, Any]]:
    """Write the answers to what was read as one batch, and yield what a record says of each.

    What is held is that of one answer, and so are the seconds of writing: an equal share of those of the batch.
    """
    first, rows = readings[0].prompt, len(readings)
    settings, device = settings_of(first, task), first.ids_1N.device
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
        tier = {"host_bytes": after.host // rows, "moved_bytes": own.moved + moved} if after.host_planned else {}
        yield {
            **_said(first, _until_end(row, settings)),
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


def _asked_plainly(prompts: Sequence[Prompt], task: Task) -> Iterator[dict[str, Any]]:
    """Read a document into the plain cache of transformers, and yield the answers to its questions, each on a copy."""
    from transformers import DynamicCache

    model, ids_1D = unwrap(prompts[0].setup.model), prompts[0].document.ids_1N
    cache, start = DynamicCache(config=model.config), _now(ids_1D.device)
    model(input_ids=ids_1D, past_key_values=cache, use_cache=True, logits_to_keep=1)
    seconds, held = _now(ids_1D.device) - start, {"kept_units": ids_1D.shape[1], "cache_bytes": bytes_of(cache)}
    for prompt in prompts:
        found = _plain(prompt, settings_of(prompt, task), copy.deepcopy(cache))
        yield {**found, **held, "prefill_seconds": found["prefill_seconds"] + seconds}


def _plain(prompt: Prompt, settings: dict[str, Any], cache: DynamicCache | None = None) -> dict[str, Any]:
    """Answer with transformers alone: its cache, its `generate`, nothing of ours but a look at the cache in between."""
    from transformers import DynamicCache

    ids_1N, model = prompt.ids_1N, unwrap(prompt.setup.model)
    cache = DynamicCache(config=model.config) if cache is None else cache
    if gathering_root(prompt.setup.model) is not None:
        settings = {**settings, "synced_gpus": False}  # `in_step` keeps the processes together
    read: dict[str, Any] = {}

    def look(_ids: Tensor, logits: Tensor) -> Tensor:
        if not read:  # the prompt's last logits: it has been read, and nothing has been written
            read.update(seconds=_now(ids_1N.device), units=cache.get_seq_length(), size=bytes_of(cache))
        check_finite_logits(model, logits)
        return logits

    start = _now(ids_1N.device)
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
        "decode_seconds": _now(ids_1N.device) - read["seconds"],
    }


class _UnitMeter:
    """Follows a read chunk by chunk: a layer attends to a chunk and to all that was kept before it evicts."""

    def __init__(self) -> None:
        self.peak = self._held = self._seen = 0

    def __call__(self, cache: RetentionCache) -> None:
        self.peak = max(self.peak, self._held + cache.seen - self._seen)
        self._held, self._seen = max((layer.fill for layer in cache.governed), default=0), cache.seen


def settings_of(prompt: Prompt, task: Task) -> dict[str, Any]:
    """Return the settings of `generate` for a task's answer."""
    return _settings(prompt, task.max_new_tokens, task.stop, task.min_new_tokens)


def _settings(prompt: Prompt, max_new_tokens: int, stop: Sequence[str], min_new_tokens: int) -> dict[str, Any]:
    """Return settings of greedy decoding; neutral ones too, or the backbone's own sampling would fill them in."""
    tokenizer = prompt.setup.tokenizer
    ends = unwrap(prompt.setup.model).generation_config.eos_token_id  # type: ignore[union-attr]
    ends = tokenizer.eos_token_id if ends is None else ends
    every = ends if isinstance(ends, list) else [ends]
    settings = {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 50,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else every[0],
    }
    if stop:
        settings |= {"stop_strings": list(stop), "tokenizer": tokenizer}
    if stop and min_new_tokens:
        last = [id for text in stop for id in tokenizer(text, add_special_tokens=False)["input_ids"][-1:]]
        settings["begin_suppress_tokens"] = [id for id in (*every, *last) if id is not None]
    return settings


def bytes_of(cache: Any) -> int:
    """Return what the plain cache of transformers holds."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
