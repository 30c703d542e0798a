"""Does what is kept, and where, follow from the policy and the scores; and is it what the backbone computed?"""

# K KV heads, N tokens, S units, D head dim

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from locret import RetentionCache
from locret.cache.limits import Limits
from locret.infer.verify.findings import Finding, NotHere, exact
from locret.infer.verify.rotation import Turn
from locret.infer.verify.subject import Read, Subject, kept_by_head, positions_held, scores_by_head
from locret.infer.verify.watching import Said, WatchedCache, watched

_HALF_PLACE = 2.0**-24
"""Relative rounding error of an angle, which rotary embeddings compute in float32 whatever the dtype."""


def budget(subject: Subject) -> Iterator[Finding]:
    """Count what every layer holds after every chunk."""
    read, policy = subject.read(), subject.policy
    plan = Limits(policy, subject.rates, len(subject.backbone.layers)).plan(subject.tokens)
    wrong, most = [], 0.0
    for step, planned in zip(read.steps, plan.steps, strict=True):
        means = [sum(map(len, heads)) / len(heads) for heads in step.kept]
        most = max(most, sum(means) / len(means)) if policy.when == "chunk" else most
        if not plan.shared and means != list(planned.kept):
            wrong.append(f"{means[0]:g} instead of {planned.kept[0]:,} after {step.seen:,} tokens")
    yield exact(
        f"units per KV head and layer after each of {len(read.steps)} chunks, and the plan",
        not wrong,
        wrong[0] if wrong else "as planned",
        "as planned",
        "exact",
    )
    yield exact(
        "most units per KV head after a chunk, and the budget",
        most <= policy.budget,
        f"{most:,.0f}",
        f"at most {policy.budget:,}",
        "exact",
    )
    gone = evicted(read, subject)
    yield exact(
        f"units evicted of {subject.tokens:,} per KV head",
        gone > 0,
        f"{gone:,.0f}",
        "more than 0",
        "a text longer than the budget must lose units",
    )


def evicted(read: Read, subject: Subject) -> float:
    """Return how many units of the text are not held any more, per governed layer and KV head."""
    held = [len(head) for heads in kept_by_head(read.cache) for head in heads]
    return subject.tokens - sum(held) / len(held)


def protected(subject: Subject) -> Iterator[Finding]:
    """Look for the units that stay whatever their score."""
    read, policy, scorer = subject.read(), subject.policy, subject.rates
    if policy.when == "prompt_end":
        raise NotHere("with --when prompt_end nothing is evicted before the end, so there are no stabilizers")
    if policy.recalls_blocks:
        raise NotHere(f"recall_by={policy.recall_by} keeps tokens by a rule of its own")
    fixed = policy.memory == "fixed"
    lost_recent = lost_first = recent = first = 0
    for number, step in enumerate(read.steps):
        final = number == len(read.steps) - 1
        for nth, heads in enumerate(step.kept):
            budget = sum(map(len, heads)) // len(heads)
            asked = 0 if final else policy.stabilizers if fixed else min(policy.stabilizers, budget // 2)
            newest = min(max(asked, min(budget, scorer.recent(policy.budget))), step.seen)
            sinks = min(scorer.sink_tokens(budget, newest), step.seen)
            for head in heads:
                there = set(head.tolist())
                lost_recent += sum(position not in there for position in range(step.seen - newest, step.seen))
                lost_first += sum(position not in there for position in range(sinks))
            recent, first = max(recent, newest), max(first, sinks)
            del nth
    yield exact(
        f"newest units after a chunk, up to {recent:,} stabilizers",
        not lost_recent,
        f"{lost_recent:,} lost",
        "0 lost",
        "exact",
    )
    if first:
        yield exact(
            f"first {first} tokens of the text, which {scorer.name} keeps",
            not lost_first,
            f"{lost_first:,} lost",
            "0 lost",
            "exact",
        )
    local = read.cache.seen - read.steps[-1].seen if read.steps else 0
    missing = sum(
        position not in set(head.tolist())
        for heads in kept_by_head(read.cache)
        for head in heads
        for position in range(subject.tokens - local, subject.tokens)
    )
    yield exact(f"{local} local tokens at the end", not missing, f"{missing:,} lost", "0 lost", "exact")


def units(subject: Subject) -> Iterator[Finding]:
    """Compare the kept units with what the backbone's attention handed to the cache."""
    policy = subject.plain_policy
    if policy.recalls_blocks:
        raise NotHere("blocks hold far units at one position")
    cache = WatchedCache(subject.model, subject.scorer, policy)
    subject.read(cache=cache)
    compact = policy.positions == "compact"
    wrong, turned, count, finite, reach = 0, 0.0, 0, True, 0
    for nth, index in enumerate(subject.backbone.layers):
        keys, values, where = cache.handed(index)
        layout = subject.layouts[index][0]
        if index in cache.latents and layout.adjacent:  # which are held in two halves
            keys, layout = torch.cat([keys[..., ::2], keys[..., 1::2]], dim=-1), layout._replace(adjacent=False)
        turn = Turn(subject.decoder, layout) if compact else None
        for head, (kept, own_keys, own_values, now) in enumerate(held_units(cache, nth)):
            count += len(kept)
            wrong += int((own_values != values[head, kept]).any(-1).sum())
            finite = finite and bool(torch.isfinite(own_keys).all() and torch.isfinite(own_values).all())
            expected = keys[head, kept].float()
            if turn is not None:
                reach = max(reach, int(where.max()), cache.next_position)
                with subject.alone():
                    expected = turn(expected, now - where[kept])
            turned = max(turned, _apart(own_keys.float(), expected))
    dtype = next(subject.model.parameters()).dtype
    yield exact(
        f"values of {count:,} kept units, and those the backbone computed for their tokens and heads",
        not wrong,
        f"{wrong:,} differ",
        "0 differ",
        "exact: values are moved, never changed",
    )
    epsilon = torch.finfo(cache.governed[0].store.keys.dtype if cache.governed[0].store.keys is not None else dtype).eps
    limit = 8 * epsilon + 4 * reach * _HALF_PLACE if compact else 0.0
    yield Finding(
        compared="their keys, and those of the backbone, "
        + ("turned to their ranks by its own frequencies" if compact else "as they came"),
        ok=turned <= limit,
        measured=turned,
        tolerance=limit,
        why="exact: keys are moved, never changed"
        if not compact
        else f"8 units in the last place ({epsilon:.1e}), and rounded angles of up to {reach:,} rad",
        means="kept keys are rotated wrongly, so everything that is not recent is misplaced; use --positions original, "
        "and report it with this table",
    )
    yield exact("keys and values are numbers", finite, "finite" if finite else "NaN or infinite", "finite", "exact")


def _apart(keys: Tensor, expected: Tensor) -> float:
    """Return the largest relative difference of keys (S, D)."""
    if not len(keys):
        return 0.0
    return float(((keys - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def held_units(cache: RetentionCache, nth: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield what every KV head of a layer holds of the first row, on the CPU.

    Yields:
        (S,) original positions, (S, D) keys as queries meet them, (S, D) values, and (S,) rotary positions of those
        keys with compact positions.
    """
    layer: Any = cache.governed[nth]
    positions = positions_held(cache, cache.backbone.layers[nth])[0]
    view = layer.store.view(cache.next_position)
    for head in range(len(positions)):
        there = positions[head] >= 0
        kept = positions[head][there]
        if view.segments is not None:
            span = view.segments[0][head]
            keys, values = view.keys[0, 0, span], view.values[0, 0, span]
        else:
            keys, values = view.keys[0, head], view.values[0, head]
        now = cache.next_position - len(kept) + torch.arange(len(kept))
        yield kept, keys.cpu()[-len(kept) :], values.cpu()[-len(kept) :], now


def scores(subject: Subject) -> Iterator[Finding]:
    """Compare scores that are held with what the scorer said, and what stays with what would be best."""
    policy, scorer = subject.plain_policy, subject.rates
    if policy.recalls_blocks:
        raise NotHere(f"recall_by={policy.recall_by} keeps tokens by a rule of its own")
    backbone = subject.backbone
    said = Said({index: backbone.shape(index).num_kv_heads for index in backbone.layers}, subject.tokens)
    cache = RetentionCache(subject.model, watched(scorer, said), policy)
    judge = _Judge(subject, said)
    subject.read(cache=cache, on_chunk=judge.look)
    if not said.whole:
        raise NotHere(f"scorer {scorer.name} rates one KV head after another here")
    if scorer.causal:
        yield exact(
            f"scores of {judge.count:,} units held after a chunk, and what {scorer.name} said of them",
            not judge.stale,
            f"{judge.stale:,} differ",
            "0 differ",
            "exact: a unit is rated once",
        )
    if policy.when == "chunk":
        yield exact(
            "units that went although their head kept one with a lower score",
            not judge.worse,
            f"{judge.worse:,}",
            "0",
            "exact: the best by score stay, besides those that are protected",
        )


class _Judge:
    """Looks at a cache after every chunk."""

    def __init__(self, subject: Subject, said: Said) -> None:
        self.subject, self.said = subject, said
        self.stale = self.worse = self.count = 0
        self.seen = 0
        self.before: list[list[Tensor]] = []

    def look(self, cache: RetentionCache) -> None:
        """Compare what is held with what was said."""
        kept, scores = kept_by_head(cache), scores_by_head(cache)
        new = torch.arange(self.seen, cache.seen)
        for nth, index in enumerate(cache.backbone.layers):
            table = self.said.scores.get(index)
            if table is None:
                continue
            for head, (positions, held) in enumerate(zip(kept[nth], scores[nth], strict=True)):
                self.count += len(positions)
                self.stale += int((table[head, positions] != held).sum())
                old = self.before[nth][head] if self.before else new[:0]
                self._rank(torch.cat([old, new]), positions, table[head])
        self.before, self.seen = kept, cache.seen

    def _rank(self, candidates: Tensor, kept: Tensor, scores: Tensor) -> None:
        """Count the units that went although a unit that nothing protects stayed with a lower score."""
        gone = candidates[~torch.isin(candidates, kept)]
        if not len(gone):
            return
        policy, scorer = self.subject.policy, self.subject.rates
        # What may be protected; a unit that is not, and stayed, must have earned it.
        recent = max(policy.stabilizers, min(len(kept), scorer.recent(policy.budget)))
        sinks = scorer.sink_tokens(len(kept), recent)
        free = (kept >= sinks) & (kept < candidates[-1] + 1 - recent)
        if free.any():
            self.worse += int((scores[gone] > scores[kept[free]].min()).sum())
