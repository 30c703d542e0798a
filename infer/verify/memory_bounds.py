"""Is memory what was planned, and does it stay that however long the text is?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetentionCache
from locret.backbone.adapters import compute_dtype
from locret.backbone.rotary import Rotary
from locret.cache.limits import planned_bytes, planned_host_bytes
from locret.infer.verify.findings import Finding, NotHere, exact
from locret.infer.verify.subject import NEW_TOKENS, Subject, kept_by_head
from locret.policy.schedule import lookahead

_HOLDERS = ("locret.cache", "locret.lookups", "transformers.cache_utils")
"""Modules whose objects may hold tensors of a cache."""


def planned_bytes_are_counted(subject: Subject) -> Iterator[Finding]:
    """Plan, read, and count the tensors of the cache."""
    read = subject.read(new_tokens=NEW_TOKENS)
    memory, policy = read.cache.memory(), subject.policy
    size = compute_dtype(subject.model).itemsize
    sizes = (subject.backbone, subject.rates, policy, size, subject.tokens, NEW_TOKENS)
    planned = planned_bytes(*sizes)
    counted = counted_bytes(read.cache)
    said, host = memory.actual + memory.host, memory.host
    # Heads that hold different numbers of units have counters beside them.
    counters = 0 if policy.head_budgets == "uniform" else 16 * subject.backbone.num_kv_heads * len(read.cache.governed)
    yield exact(
        "bytes of all tensors of the cache, and what it says",
        said <= counted <= said + counters,
        f"{counted:,}",
        f"{said:,}" + (f" and at most {counters:,} of counters" if counters else ""),
        "exact",
    )
    grows = policy.when == "prompt_end"
    loose = grows or not subject.backbone.uniform  # a layer with a window plans for one token more than it holds
    yield exact(
        "bytes planned before reading, and counted",
        memory.actual <= planned if loose else memory.actual == planned,
        f"{memory.actual:,}",
        f"at most {planned:,}" if loose else f"{planned:,}",
        "exact: it is what --dry-run prints",
    )
    yield exact(
        "peak of the cache's bytes", memory.peak <= planned, f"{memory.peak:,}", f"at most {planned:,}", "exact"
    )
    if policy.has_host:
        most = planned_host_bytes(*sizes)
        yield exact("bytes of the second tier", host <= most, f"{host:,}", f"at most {most:,}", "exact")
    if grows or least_tokens(subject) >= subject.tokens:
        return
    short = subject.read(ids=subject.ids[:, : least_tokens(subject)], new_tokens=NEW_TOKENS).cache.memory().peak
    yield exact(
        f"peak for {least_tokens(subject):,} and for {subject.tokens:,} tokens",
        short == memory.peak,
        f"{memory.peak:,}",
        f"{short:,}",
        "exact: it must not grow with the text",
    )


def decode_budget(subject: Subject) -> Iterator[Finding]:
    """Answer within a bound."""
    interval, scorer = 4, subject.rates
    if not scorer.rates_answers:
        raise NotHere(f"scorer {scorer.name} is not defined for generated tokens")
    plain = subject.plain_policy
    if plain.recalls_blocks:
        raise NotHere(f"recall_by={plain.recall_by} bounds an answer by a rule of its own")
    most = max(plain.decode_budget or 0, plain.budget + plain.local_len + interval)
    policy = replace(plain, decode_budget=most, decode_interval=interval)
    cache = subject.read(policy, new_tokens=3 * interval).cache
    ids, _ = subject.answers(cache, 3 * interval)
    kept = kept_by_head(cache)
    held = max(sum(map(len, heads)) / len(heads) for heads in kept)
    if policy.layer_budgets != "uniform":  # which layer holds how much is the pyramid's matter
        held = sum(sum(map(len, heads)) / len(heads) for heads in kept) / len(kept)
    yield exact(
        f"units per KV head after {ids.shape[1]} answer tokens, and decode_budget",
        held <= most,
        f"{held:,.0f}",
        f"at most {most:,}",
        "exact",
    )
    newest = range(cache.seen - policy.local_len, cache.seen)
    lost = sum(position not in set(head.tolist()) for heads in kept for head in heads for position in newest)
    yield exact(f"newest {policy.local_len} units of the answer", not lost, f"{lost:,} lost", "0 lost", "exact")
    memory = cache.memory()
    yield exact(
        "peak of the cache's bytes", memory.peak <= memory.planned, f"{memory.peak:,}", f"{memory.planned:,}", "exact"
    )


def least_tokens(subject: Subject) -> int:
    """Return the shortest text that fills the cache."""
    policy = subject.policy
    return max(policy.budget + policy.chunk_size + policy.local_len, lookahead(policy))


def counted_bytes(cache: RetentionCache) -> int:
    """Return the bytes of all memory that the tensors of a cache lie in, found by looking at all its objects."""
    found: dict[tuple[torch.device, int], int] = {}
    seen: set[int] = set()

    def walk(thing: Any) -> None:
        if id(thing) in seen or isinstance(thing, nn.Module | Rotary | type):
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            memory = thing.untyped_storage()
            if memory.nbytes() and thing.ndim:  # a number is a counter
                found[thing.device, memory.data_ptr()] = memory.nbytes()
        elif isinstance(thing, Mapping):
            for part in thing.values():
                walk(part)
        elif isinstance(thing, list | tuple):
            for part in thing:
                walk(part)
        elif type(thing).__module__.startswith(_HOLDERS) and hasattr(thing, "__dict__"):
            walk(vars(thing))

    walk(cache.layers)
    walk(cache.carriers)
    walk(cache._workspace)
    return sum(found.values())
