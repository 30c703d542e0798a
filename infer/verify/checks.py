"""What is checked, and how."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import all_gather_object
from transformers import DynamicCache

from locret import RetainingHeads, RetentionCache, load_cache, prefill, save_cache, scorers
from locret.backbone.adapters import compute_dtype, sharers_of
from locret.backbone.chunk import Attended, Chunk
from locret.backbone.rotary import Rotary
from locret.cache.limits import Limits, planned_bytes, planned_host_bytes
from locret.infer.verify import Finding, NotHere, exact
from locret.infer.verify.replay import Block, Turn, recorded, replay, run_backbone
from locret.infer.verify.subject import (
    FACTOR,
    NEW_TOKENS,
    Difference,
    Read,
    Subject,
    apart,
    kept_by_head,
    one_more_rounding,
    positions_held,
    relative,
    scores_by_head,
    turns_by_distance,
)
from locret.labels import kinds
from locret.labels.labels import layer_labels, observe
from locret.policy.policy import EVERYTHING, RetentionPolicy
from locret.policy.schedule import lookahead
from locret.scorers import Rated, RetainingHeadScorer, Scorer, TokenPass, TokenScorer


def refusal(subject: Subject, policy: RetentionPolicy, error: ValueError) -> Finding:
    """Say whether the engine refuses a position mode with good reason."""
    cannot = policy.positions == "compact" and not turns_by_distance(subject)
    return Finding(
        compared=f"positions {policy.positions}",
        ok=cannot,
        refused=cannot,
        why=f"refused: {error}",
        means=f"positions {policy.positions} are refused although this backbone's rotation allows them; use the other "
        "mode, and report it with this table",
    )


def because(found: Difference) -> str:
    """Return why a difference may be as large as its tolerance."""
    return f"{FACTOR:.0f} times what rounding alone changes in this backbone ({found.noise:.1e})"


def close(compared: str, found: Difference, means: str = "") -> Finding:
    """Return the finding of a comparison in which rounding may differ."""
    return Finding(
        compared=compared,
        ok=found.ok,
        measured=found.relative,
        tolerance=found.tolerance,
        why=because(found),
        means=means,
    )


def backbone(subject: Subject) -> Iterator[Finding]:
    """Compute the text by the backbone alone, more than once."""
    finite = bool(torch.isfinite(subject.expected).all())
    yield exact("its hidden states are numbers", finite, "finite" if finite else "NaN or infinite", "finite", "exact")
    typical = subject.noise.typical
    limit = 0.3
    yield Finding(
        compared="equal runs of its own: more rounding, its own cache in pieces",
        ok=typical <= limit,
        measured=typical,
        tolerance=limit,
        why="the noise that tolerances below are multiples of; above this nothing could be told from rounding",
        means="rounding alone changes most of what this backbone computes, so nothing can be compared; load it in "
        "another --dtype, such as float32",
    )


def full_budget(subject: Subject) -> Iterator[Finding]:
    """Read with room for everything."""
    for positions in ("compact", "original"):
        policy = subject.roomy(positions=positions)
        try:
            read = subject.read(policy)
        except ValueError as error:
            yield refusal(subject, policy, error)
            continue
        yield close(
            f"hidden states of {subject.tokens:,} tokens, positions {positions}",
            subject.noise.of(read.states, subject.expected),
        )


def answer(subject: Subject) -> Iterator[Finding]:
    """Answer with room for everything."""
    ours, logits = subject.answer(subject.read(subject.roomy(), new_tokens=NEW_TOKENS).cache)
    own, expected = _own_answer(subject)
    yield same_answer(f"{NEW_TOKENS} greedy tokens", ours, own, logits, expected, subject)


def _own_answer(subject: Subject) -> tuple[Tensor, Tensor]:
    """Return the (tokens,) greedy answer of the backbone's own generate, and its logits."""
    model: Any = subject.model
    ids = subject.on_device(subject.ids)
    with subject.alone():
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            return_dict_in_generate=True,
            output_logits=True,
            **subject.answer_options(),
        )
    return found.sequences[0, ids.shape[1] :].cpu(), torch.stack([step[0].float().cpu() for step in found.logits])


def same_answer(
    compared: str, ours: Tensor, own: Tensor, logits: Tensor, expected: Tensor, subject: Subject
) -> Finding:
    """Compare two greedy answers up to where the backbone itself is undecided between two tokens.

    Args:
        compared: What with what.
        ours: (tokens,).
        own: (tokens,).
        logits: (tokens, vocabulary) of ours.
        expected: (tokens, vocabulary) of its own.
        subject: For its noise.
    """
    apart = (ours != own).nonzero()
    first = int(apart[0]) if len(apart) else len(own)
    if first == len(own):
        return exact(compared, True, "equal", "equal", "greedy tokens are exact where no two are tied")
    margin = float(expected[first, own[first]] - expected[first, ours[first]])
    spread = float((expected[first] - expected[first].mean()).norm() / expected.shape[1] ** 0.5)
    tolerance = FACTOR * subject.noise.typical * spread * 4
    return Finding(
        compared=f"{compared}; apart at token {first + 1} by a margin of logits",
        ok=margin <= tolerance,
        measured=margin,
        tolerance=tolerance,
        why=f"a tie within rounding: {FACTOR:.0f} noises times 4 deviations of the logits",
    )


def chunks(subject: Subject) -> Iterator[Finding]:
    """Cut one text in several ways."""
    for size in chunk_sizes(subject.tokens):
        read = subject.read(subject.roomy(chunk_size=size, local_len=size // 3 + 1))
        yield close(
            f"hidden states in chunks of {size}, and the backbone's own",
            subject.noise.of(read.states, subject.expected),
        )
        yield _all_there(read, subject, size)


def chunk_sizes(tokens: int) -> tuple[int, ...]:
    """Return sizes that cut a text unevenly, and one that does not cut it at all."""
    return max(5, tokens // 11), tokens // 3 + 1, tokens


def _all_there(read: Read, subject: Subject, size: int) -> Finding:
    """Say whether every token is held once, by every KV head."""
    everything = torch.arange(subject.tokens)
    heads = [head for index in subject.backbone.layers for head in positions_held(read.cache, index)[0]]
    wrong = sum(not torch.equal(head, everything) for head in heads)
    return exact(
        f"positions held after chunks of {size}",
        not wrong,
        f"{wrong} of {len(heads)} heads miss or repeat tokens" if wrong else f"0 .. {subject.tokens - 1:,}",
        "every token once",
        "exact: nothing was evicted",
    )


def batch(subject: Subject) -> Iterator[Finding]:
    """Read rows of different length together, and each alone; with room, and with eviction by place."""
    tokens, by_place = subject.tokens, scorers.get("streaming", sinks=2)
    texts = [subject.ids[0], subject.ids[0].roll(tokens // 2)[: tokens - tokens // 5]]
    small = replace(subject.roomy(), budget=subject.policy.budget, stabilizers=subject.policy.stabilizers)
    for what, policy in (("nothing evicted", subject.roomy()), ("first and newest kept", small)):
        together = RetentionCache(subject.model, by_place, policy)
        ids, logits = _answered_rows(subject, together, texts)
        wrong = 0
        for row, text in enumerate(texts):
            alone = RetentionCache(subject.model, by_place, policy)
            own, expected = _answered_rows(subject, alone, [text])
            wrong += sum(
                _filled(positions_held(together, index)[row]) != _filled(positions_held(alone, index)[0])
                for index in subject.backbone.layers
            )
            name = "longest" if row == 0 else "left-padded"
            both = ids[row], own[0], logits[row], expected[0]
            yield _close_logits(subject, f"{what}: logits of the {name} row in a batch, and alone", *both)
        yield exact(
            f"{what}: layers whose rows hold other tokens than alone", not wrong, f"{wrong}", "0", "exact: by place"
        )


def _answered_rows(subject: Subject, cache: RetentionCache, texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Read texts, padded on the left, and answer; return (B, T) ids and (B, T, V) logits."""
    width = max(map(len, texts))
    ids = torch.stack([torch.cat([text[:1].expand(width - len(text)), text]) for text in texts])
    mask = torch.stack([torch.arange(width) >= width - len(text) for text in texts]).long()
    prefill(subject.model, ids, cache, attention_mask=mask if len(texts) > 1 else None, new_tokens=NEW_TOKENS)
    return subject.answers(cache)


def _filled(positions: Tensor) -> list[list[int]]:
    return [head[head >= 0].tolist() for head in positions]


def _close_logits(
    subject: Subject, compared: str, ids: Tensor, own: Tensor, logits: Tensor, expected: Tensor
) -> Finding:
    """Compare (T, V) logits up to the first token (T,) that differs, before which both saw the same."""
    other = (ids != own).nonzero()
    steps = slice(0, int(other[0]) + 1 if len(other) else len(own))
    found = float(apart(logits[steps], expected[steps]).median())
    limit = FACTOR * subject.logit_noise
    return Finding(
        compared=compared,
        ok=found <= limit,
        measured=found,
        tolerance=limit,
        why=f"{FACTOR:.0f} times what rounding alone changes in the logits ({subject.logit_noise:.1e})",
    )


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


class WatchedCache(RetentionCache):
    """A cache that remembers the keys and values that the backbone's attention handed over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Per layer, (K, L, D) keys, rotated by the backbone, and values, of the first row, on the CPU."""
        self.bases: dict[int, list[int]] = {}
        """Rotary position of the first of each."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See `RetentionCache`."""
        self.given.setdefault(layer_idx, []).append((key_states[0].cpu(), value_states[0].cpu()))
        self.bases.setdefault(layer_idx, []).append(self.next_position)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def handed(self, layer_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (K, N, D) keys and values that came for one layer, and (N,) the rotary positions of those keys."""
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*self.given[layer_idx], strict=True))
        if layer_idx in self.latents:  # where transformers has them the other way round
            keys, values = values, keys
        where = [
            base + torch.arange(part[0].shape[1])
            for base, part in zip(self.bases[layer_idx], self.given[layer_idx], strict=True)
        ]
        return keys, values, torch.cat(where)


class Said:
    """What a scorer said of every unit last, in one read of one row."""

    def __init__(self, kv_heads: Mapping[int, int], tokens: int) -> None:
        self.kv_heads, self.tokens = kv_heads, tokens
        self.scores: dict[int, Tensor] = {}
        """Per layer, (K, N) float32 on the CPU; NaN where nothing was said."""
        self.whole = True
        """Whether it always spoke of all heads together."""

    def note(self, layer_idx: int, positions: Tensor, scores: Tensor) -> None:
        """Note (1, K, L) scores of units at (1, 1 or K, L) positions."""
        heads = self.kv_heads[layer_idx]
        if scores.shape[1] != heads:
            self.whole = False
            return
        table = self.scores.setdefault(layer_idx, torch.full((heads, self.tokens), torch.nan))
        where = positions[0].expand(scores.shape[1:]).cpu().long()
        table.scatter_(1, where, scores[0].detach().float().cpu())


def watched(scorer: Scorer, said: Said) -> Scorer:
    """Return the same scorer, which also tells what it says."""
    kind: Any = type(scorer)

    def score(self: Any, chunk: Chunk) -> Tensor | Rated:
        rated: Tensor | Rated = kind.score(self, chunk)
        scores = rated.scores if isinstance(rated, Rated) else rated
        if not scorer.needs_hidden:
            said.note(chunk.layer_idx, chunk.unit_positions[..., -scores.shape[-1] :], scores)
        return rated

    def score_tokens(self: Any, model: Any, tokens: TokenPass) -> Tensor:
        scores: Tensor = kind.score_tokens(self, model, tokens)
        for layer, heads in said.kv_heads.items():
            said.note(layer, tokens.positions_BL[:, None], scores[:, None].expand(-1, heads, -1))
        return scores

    methods: dict[str, Any] = {"score": score}
    if isinstance(scorer, TokenScorer):
        methods["score_tokens"] = score_tokens
    twin = copy.copy(scorer)
    object.__setattr__(twin, "__class__", type(kind.__name__, (kind,), methods))  # its options are frozen
    return twin


@dataclass(frozen=True)
class Answered:
    """A text that was read, and an answer to it."""

    blocks: list[Block]
    """What every token saw."""
    ids: Tensor
    """(1, T) prompt and answer, without the answer's last token, on the CPU."""
    states: Tensor
    """(T, E)."""


def eviction(subject: Subject) -> Iterator[Finding]:
    """Read and answer with eviction in both position modes, and replay it."""
    policy = subject.plain_policy
    if policy.recalls_blocks:
        raise NotHere(f"recall_by={policy.recall_by} recalls blocks while it reads, which is not replayed")
    yield _replayed(subject, policy)
    other = replace(policy, positions="original" if policy.positions == "compact" else "compact")
    try:
        yield _replayed(subject, other)
    except ValueError as error:
        yield refusal(subject, other, error)


def _replayed(subject: Subject, policy: RetentionPolicy, *, everything: bool = False) -> Finding:
    """Compare an answered read with its replay."""
    answered = read_and_answer(subject, policy, everything=everything)
    ids, compact = subject.on_device(answered.ids), policy.positions == "compact"
    turns, detours = (subject.turns(detour) if compact else None for detour in (0, subject.tokens))
    with subject.alone():
        expected = replay(subject.model, ids, answered.blocks, turns).states
        with one_more_rounding(subject.decoder, subject.seed):
            rounded = replay(subject.model, ids, answered.blocks, detours).states
    noise = subject.noise.beside(relative(rounded, expected))
    return close(
        f"hidden states of {answered.ids.shape[1]:,} tokens, each seeing the units kept for it, positions "
        f"{policy.positions}",
        noise.of(answered.states, expected),
    )


def read_and_answer(subject: Subject, policy: RetentionPolicy, *, everything: bool = False) -> Answered:
    """Read the text, answer, and say what every token saw; with `everything` the last ones saw all that came before."""
    read = subject.read(policy, new_tokens=NEW_TOKENS)
    tokens, kept = subject.tokens, kept_by_head(read.cache)
    bounds = [0, *(step.seen for step in read.steps)]
    before = [[[torch.empty(0, dtype=torch.long)] * len(heads) for heads in kept], *(step.kept for step in read.steps)]
    # The prompt's last token is fed again, with the answer.
    before.append([[head[head < tokens - 1] for head in heads] for heads in kept])
    bounds.append(tokens - 1)
    if everything:
        for number in (-2, -1):
            before[number] = [[torch.arange(bounds[number])] * len(heads) for heads in kept]
    with recorded(subject.decoder) as states:
        answer, _ = subject.answer(read.cache)
    ids = torch.cat([subject.ids, answer[None, : NEW_TOKENS - 1]], dim=1)
    ends = [*bounds[1:], ids.shape[1]]
    blocks = [Block(*each) for each in zip(bounds, ends, before, strict=True) if each[0] < each[1]]
    found = torch.cat([read.states[: tokens - 1], *(part[0] for part in states)])
    return Answered(blocks, ids, found)


def second_tier(subject: Subject) -> Iterator[Finding]:
    """Look at what evicted units become, and recall all of them."""
    policy = subject.policy
    if policy.host_budget is None:
        raise NotHere("the policy has no second tier (--host-budget)")
    cache = subject.read().cache
    lost = short = 0
    for index, layer in zip(subject.backbone.layers, cache.governed, strict=True):
        assert layer.host is not None
        near, far = positions_held(cache, index)[0], layer.host.store.held("positions")[0].cpu()
        evicted = subject.tokens - near.shape[1]
        most = evicted if policy.host_budget == EVERYTHING else min(evicted, int(policy.host_budget))
        short += int(far.shape[1] != most)
        for one, other in zip(near, far, strict=True):
            lost += len(one) + len(other) - len(set(one.tolist()) | set(other.tolist()))
    yield exact("layers whose second tier holds other than it should", not short, f"{short}", "0", "exact")
    yield exact("units that both tiers hold", not lost, f"{lost}", "0", "exact")
    whole = replace(subject.plain_policy, host_budget=EVERYTHING, recall=subject.tokens)
    yield _replayed(subject, whole, everything=True)


def prefix(subject: Subject) -> Iterator[Finding]:
    """Let the backbone alone go on from what was kept, as an ordinary prefix."""
    if subject.policy.when == "prompt_end":
        raise NotHere("with --when prompt_end an answer reads the last token again, which a prefix holds as it was")
    read = subject.read(subject.plain_policy, new_tokens=NEW_TOKENS)
    try:
        exported: DynamicCache = read.cache.to_dynamic_cache()
    except ValueError as error:
        raise NotHere(f"what this policy keeps is no ordinary prefix: {error}") from error
    first = read.cache.next_position
    with recorded(subject.decoder) as ours:
        answer, _ = subject.answer(read.cache)
    fed = subject.on_device(answer[None, : NEW_TOKENS - 1])
    with subject.alone(), recorded(subject.decoder) as own:
        # One by one, since some states start anew where they are given several; and numbered, as by generate.
        for number, token in enumerate(fed.split(1, dim=1), start=first):
            where = torch.full_like(token, number)
            run_backbone(subject.model, input_ids=token, past_key_values=exported, use_cache=True, position_ids=where)
    yield close(
        f"hidden states of {fed.shape[1]} answer tokens, and of the backbone alone on a DynamicCache of the kept units",
        subject.noise.of(torch.cat([part[0] for part in ours])[1:], torch.cat([part[0] for part in own])),
    )


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


SHARE = 0.1
"""What part of the units counts as the best."""


def best(scores: Tensor, count: int) -> Tensor:
    """Return a bool mask over the last dimension: the `count` best scores, newer units first among equals."""
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter(-1, scores.shape[-1] - 1 - order[..., :count], True)


def overlap(one: Tensor, other: Tensor, share: float = SHARE) -> float:
    """Return the share of the best units that two scores of the same units agree on, averaged over heads.

    Args:
        one: (L, K, n) scores.
        other: (L, K, n) scores.
        share: What part of the units counts as best.
    """
    count = math.ceil(share * one.shape[-1])
    both = best(one, count) & best(other, count)
    return float(both.sum(-1).double().mean() / count)


def training_scores(subject: Subject) -> Iterator[Finding]:
    """Score a text in the pass that trains heads, and while it is read into a cache."""
    heads = _heads(subject)
    training: dict[int, Tensor] = {}
    inference: dict[int, Tensor] = {}
    noise: dict[int, Tensor] = {}

    def learn(chunk: Attended) -> None:
        features = heads.features(chunk)[0]
        with torch.enable_grad():  # the arithmetic of training
            training[chunk.layer_idx] = heads[chunk.layer_idx](features).detach().T.float().cpu()
        drawn = torch.rand(features.shape, generator=torch.Generator().manual_seed(subject.seed)) - 0.5
        moved = features.float() * (1 + 2 * _spread(subject) * drawn.to(features.device))
        with torch.no_grad():
            noise[chunk.layer_idx] = heads[chunk.layer_idx](moved.to(features.dtype)).T.float().cpu()

    observe(subject.model, subject.on_device(subject.ids), learn)
    cache = RetentionCache(subject.model, subject.scorer, subject.roomy())
    subject.read(cache=cache)
    for nth, index in enumerate(subject.backbone.layers):
        inference[index] = torch.stack(scores_by_head(cache)[nth])
    worst, base = 0.0, 0.0
    for index, scores in training.items():
        spread = scores.std(dim=1, keepdim=True)
        found = float(((inference[index] - scores).abs() / spread).median())
        usual = float(((noise[index] - scores).abs() / spread).median())
        if found / max(usual, 1e-12) > worst / max(base, 1e-12):
            worst, base = found, usual
    yield Finding(
        compared=f"scores of {subject.tokens:,} tokens in the pass of training, and in reading, in deviations",
        ok=worst <= FACTOR * base,
        measured=worst,
        tolerance=FACTOR * base,
        why=f"{FACTOR:.0f} times what noise in the features changes ({base:.1e})",
    )


def _spread(subject: Subject) -> float:
    """Return how far features differ by rounding, relative to themselves."""
    return subject.noise.typical


def _heads(subject: Subject) -> RetainingHeads:
    """Return the heads of this process, each on its layer's device."""
    if not isinstance(subject.rates, RetainingHeadScorer):
        raise NotHere(f"no retaining heads were given; scorer {subject.rates.name} decides")
    return subject.rates.prepare(subject.model)


def layers(subject: Subject) -> Iterator[Finding]:
    """Compare what every head finds important in its own layer with that layer's labels, and heads of other layers."""
    heads = _heads(subject)
    claims = heads.config.training is not None or heads.config.label is not None
    own, others, error = _overlaps(subject, heads)
    mean = float(own.mean())
    if not claims:
        yield Finding(
            compared="best tenth of tokens by heads and by labels; these heads say nothing of a training",
            ok=True,
            measured=mean,
            tolerance=f"none; chance is {SHARE:g}",
            why="untrained: at chance, as far as that can be told" if mean < SHARE + 4 * error else "not asked of them",
        )
        return
    yield Finding(
        compared=f"best {SHARE:.0%} of tokens by trained heads and by labels, mean of {len(own)} layers",
        ok=mean >= SHARE + 4 * error,
        measured=mean,
        tolerance=f"at least {SHARE + 4 * error:.3g}",
        why=f"chance is {SHARE:g}, and 4 of its sampling errors ({error:.2g}) are no chance",
        means="these heads do no better than chance on this backbone, though they were trained: they belong to another "
        "one; load the backbone they name, or train heads for this one",
    )
    for offset, found in sorted(others.items()):
        gain = own - found
        gain = gain[gain.isfinite()]
        if not len(gain):
            continue
        least = 4 * 2**0.5 * error
        yield Finding(
            compared=f"how much better they are on their own layers than the heads of {offset} further on",
            ok=float(gain.mean()) >= least,
            measured=float(gain.mean()),
            tolerance=f"at least {least:.3g}",
            why=f"4 sampling errors of a difference ({2**0.5 * error:.2g})",
            means="the heads are not those of their layers (they may be in another order), so what stays is chosen by "
            "noise; train or convert them again",
        )


def _overlaps(subject: Subject, heads: RetainingHeads) -> tuple[Tensor, dict[int, Tensor], float]:
    """Return (L,) overlaps of heads and labels of their layers, of heads so many layers on, and the error of chance."""
    indices, prompt = heads.layers, subject.tokens - subject.tokens // 4
    label = heads.config.label or {}
    kind, last = kinds.get(str(label.get("kind", "logit"))), bool(label.get("include_last_prompt_token", False))
    count = len(indices)
    offsets = sorted({1, 2, count // 2, count - 2, count - 1} & set(range(1, count)))
    own = torch.full((count,), torch.nan)
    others = {offset: torch.full((count,), torch.nan) for offset in offsets}

    def compare(chunk: Attended) -> None:
        nth = indices.index(chunk.layer_idx)
        labels = layer_labels(chunk, prompt, kind, last)[None].cpu()
        features = heads.features(chunk, prompt)[0]
        for offset, into in [(0, own), *others.items()]:
            head = heads[indices[(nth + offset) % count]]
            weight = next(head.parameters())
            if heads.config.width(indices[(nth + offset) % count]) == features.shape[1]:
                scores = head(features.to(weight.device)).T[None].float().cpu()
                if scores.shape == labels.shape:
                    into[nth] = overlap(scores, labels, SHARE)

    with torch.no_grad():
        observe(subject.model, subject.on_device(subject.ids), compare)
    best = math.ceil(SHARE * prompt)
    return own, others, (SHARE * (1 - SHARE) ** 2 / best / count) ** 0.5
