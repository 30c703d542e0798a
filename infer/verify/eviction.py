"""Is what is computed from a bounded cache what the kept units, and nothing else, give?"""

# T tokens of prompt and answer, E hidden size

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache

from locret.infer.verify.equality import close
from locret.infer.verify.findings import Finding, NotHere, exact
from locret.infer.verify.noise import one_more_rounding, recorded, relative, run_backbone
from locret.infer.verify.position_modes import refusal
from locret.infer.verify.replay import Block, replay
from locret.infer.verify.subject import NEW_TOKENS, Subject, kept_by_head, positions_held
from locret.policy.policy import EVERYTHING, RetentionPolicy


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
