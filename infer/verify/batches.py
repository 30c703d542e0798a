"""Are the rows of a batch what they are alone?"""

# B rows, T tokens of an answer, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from locret import RetentionCache, prefill, scorers
from locret.infer.verify.findings import Finding, exact
from locret.infer.verify.noise import FACTOR, apart
from locret.infer.verify.subject import NEW_TOKENS, Subject, positions_held


def batch(subject: Subject) -> Iterator[Finding]:
    """Read rows of different length together, and each alone; with room, and with eviction by place."""
    tokens, by_place = subject.tokens, scorers.get("streaming", sinks=2)
    texts = [subject.ids[0], subject.ids[0].roll(tokens // 2)[: tokens - tokens // 5]]
    small = replace(subject.roomy(), budget=subject.policy.budget, stabilizers=subject.policy.stabilizers)
    for what, policy in (("nothing evicted", subject.roomy()), ("first and newest kept", small)):
        together = RetentionCache(subject.model, by_place, policy)
        ids, logits = _answered(subject, together, texts)
        wrong = 0
        for row, text in enumerate(texts):
            alone = RetentionCache(subject.model, by_place, policy)
            own, expected = _answered(subject, alone, [text])
            wrong += sum(
                _filled(positions_held(together, index)[row]) != _filled(positions_held(alone, index)[0])
                for index in subject.backbone.layers
            )
            name = "longest" if row == 0 else "left-padded"
            both = ids[row], own[0], logits[row], expected[0]
            yield _close(subject, f"{what}: logits of the {name} row in a batch, and alone", *both)
        yield exact(
            f"{what}: layers whose rows hold other tokens than alone", not wrong, f"{wrong}", "0", "exact: by place"
        )


def _answered(subject: Subject, cache: RetentionCache, texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Read texts, padded on the left, and answer; return (B, T) ids and (B, T, V) logits."""
    width = max(map(len, texts))
    ids = torch.stack([torch.cat([text[:1].expand(width - len(text)), text]) for text in texts])
    mask = torch.stack([torch.arange(width) >= width - len(text) for text in texts]).long()
    prefill(subject.model, ids, cache, attention_mask=mask if len(texts) > 1 else None, new_tokens=NEW_TOKENS)
    return subject.answers(cache)


def _filled(positions: Tensor) -> list[list[int]]:
    return [head[head >= 0].tolist() for head in positions]


def _close(subject: Subject, compared: str, ids: Tensor, own: Tensor, logits: Tensor, expected: Tensor) -> Finding:
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
