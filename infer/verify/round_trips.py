"""Is what was read the same after it was saved, copied, asked, or read again?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_gather_object

from locret import RetentionCache, load_cache, prefill, save_cache
from locret.backbone.adapters import sharers_of
from locret.infer.verify.findings import Finding, NotHere, exact
from locret.infer.verify.keeping import held_units
from locret.infer.verify.noise import relative
from locret.infer.verify.subject import NEW_TOKENS, Subject

_COUNTERS = ("seen", "next_position", "text_end", "held_back", "fed_again", "rows")


def save(subject: Subject) -> Iterator[Finding]:
    """Write a file, load it, and go on from both."""
    if subject.policy.recalls_blocks:
        raise NotHere(f"recall_by={subject.policy.recall_by} holds blocks, which no file has a place for")
    cache = subject.read().cache
    before = contents(cache)
    with _shared_folder(subject) as folder:
        path = Path(folder) / "verify.ctx"
        save_cache(cache, path)
        loaded = load_cache(path, subject.model, subject.scorer)
    yield _equal("units, columns and counters of the file, and of the cache", before, contents(loaded))
    yield _equal("the cache before and after it was saved", before, contents(cache))
    yield from _go_on_alike(subject, cache, loaded, "the loaded one")


@contextmanager
def _shared_folder(subject: Subject) -> Iterator[str]:
    """Give a folder for the block; processes that share a backbone get one that the first of them has made."""
    sharers = sharers_of(subject.model)
    with TemporaryDirectory() as own:
        if sharers is None:
            yield own
            return
        folders: list[Any] = [None] * sharers.size
        all_gather_object(folders, own, group=sharers.group)
        yield folders[0]
        all_gather_object(folders, own, group=sharers.group)  # until all have read


def _go_on_alike(subject: Subject, one: RetentionCache, other: RetentionCache, what: str) -> Iterator[Finding]:
    """Answer from two caches, and read on with both."""
    answers = [subject.answer(cache.copy()) for cache in (one, other)]
    yield exact(
        f"{NEW_TOKENS} answer tokens and their logits from the cache, and from {what}",
        all(torch.equal(a, b) for a, b in zip(*answers, strict=True)),
        _shown_answer(answers),
        "bit-equal",
        "exact: the same bytes in the same kernels",
    )
    more = subject.ids[:, : max(8, subject.policy.chunk_size + subject.policy.local_len)]
    both = [cache.copy() for cache in (one, other)]
    logits = [prefill(subject.model, more, cache).float().cpu() for cache in both]
    same = torch.equal(*logits) and not different(contents(both[0]), contents(both[1]))
    yield exact(
        f"{more.shape[1]} further tokens read into the cache, and into {what}",
        same,
        "bit-equal" if same else f"logits differ by {float((logits[0] - logits[1]).abs().max()):.2g}",
        "bit-equal",
        "exact: counters and scores decide what goes next",
    )


def _shown_answer(answers: list[tuple[Tensor, Tensor]]) -> str:
    (ours, logits), (theirs, others) = answers
    if not torch.equal(ours, theirs):
        return "other tokens"
    return "bit-equal" if torch.equal(logits, others) else f"logits by {float((logits - others).abs().max()):.2g}"


def _equal(compared: str, one: dict[str, Any], other: dict[str, Any]) -> Finding:
    found = different(one, other)
    return exact(compared, not found, f"{found[0]} differs" if found else "bit-equal", "bit-equal", "exact")


def contents(cache: RetentionCache) -> dict[str, Any]:
    """Return what a cache holds by name, as copies: counters, columns, units of every layer."""
    found: dict[str, Any] = {name: getattr(cache, name) for name in _COUNTERS}
    tensors, numbers = cache.state()
    found |= {f"state {name}": value for name, value in numbers.items()}
    found |= {f"tensor {name}": tensor.clone() for name, tensor in tensors.items()}
    for nth, index in enumerate(cache.backbone.layers):
        layer: Any = cache.layers[index]
        found[f"scores of layer {index}"] = layer.store.held("scores").clone()
        found[f"columns of layer {index}"] = sorted(layer.store.columns)
        for head, (positions, keys, values, now) in enumerate(held_units(cache, nth)):
            where = f"of head {head} of layer {index}"
            found[f"positions {where}"], found[f"rotary positions {where}"] = positions, now
            found[f"keys {where}"], found[f"values {where}"] = keys.clone(), values.clone()
    return found


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names under which two caches differ, bit for bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not _same(one[name], other[name])
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool(((one == other) | (one != one)).all())
    return bool(one == other)


def fork(subject: Subject) -> Iterator[Finding]:
    """Ask copies, and look at the original."""
    cache = subject.read().cache
    before = contents(cache)
    asked = cache.copy()
    first = subject.answer(asked)
    prefill(subject.model, subject.ids[:, : subject.policy.chunk_size], cache.copy())
    yield _equal("the context before and after its copies were asked and read on", before, contents(cache))
    again = subject.answer(cache.copy())
    same = all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    yield exact("the same question to two copies", same, _shown_answer([first, again]), "bit-equal", "exact")


def determinism(subject: Subject) -> Iterator[Finding]:
    """Do everything twice."""
    first, second = (subject.read() for _ in range(2))
    own = subject.own_states(subject.ids)
    if torch.equal(own, subject.expected):
        same = torch.equal(first.states, second.states)
        shown = "bit-equal" if same else f"{float(relative(second.states, first.states).max()):.2g}"
        yield exact("hidden states of two reads", same, shown, "bit-equal", "exact: the backbone's own runs are")
        answers = [subject.answer(read.cache) for read in (first, second)]
        same = all(torch.equal(a, b) for a, b in zip(*answers, strict=True))
        yield exact(f"two greedy answers of {NEW_TOKENS} tokens", same, _shown_answer(answers), "bit-equal", "exact")
        return
    apart = float(relative(second.states, first.states).median())
    usual = float(relative(own, subject.expected).median())
    limit = 8 * max(usual, subject.noise.typical)
    yield Finding(
        compared="hidden states of two reads",
        ok=apart <= limit,
        measured=apart,
        tolerance=limit,
        why="two runs of the backbone alone differ too; 8 times the noise",
    )
