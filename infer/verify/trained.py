"""Are retaining heads the ones that were trained on this backbone, each on its own layer?"""

# L layers, K KV heads, N tokens

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from locret import RetainingHeads, RetentionCache
from locret.backbone.chunk import Attended
from locret.infer.verify.findings import Finding, NotHere
from locret.infer.verify.noise import FACTOR
from locret.infer.verify.subject import Subject, scores_by_head
from locret.labels import kinds
from locret.labels.labels import layer_labels, observe
from locret.scorers import RetainingHeadScorer

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
