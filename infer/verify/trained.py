"""Are retaining heads the ones that were trained on this backbone, each on its own layer?"""

# L layers, K KV heads, N tokens

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from locret import RetainingHeads, RetentionCache
from locret.backbone.chunk import Attended
from locret.infer.verify.findings import Finding, NotHere
from locret.infer.verify.noise import FACTOR
from locret.infer.verify.subject import Subject
from locret.labels import kinds
from locret.labels.labels import layer_labels, observe


def training_scores(subject: Subject) -> Iterator[Finding]:
    """Score a text in the pass that trains heads, and while it is read into a cache."""
    heads = _heads(subject)
    training: dict[int, Tensor] = {}
    inference: dict[int, Tensor] = {}
    noise: dict[int, Tensor] = {}

    def learn(chunk: Attended) -> None:
        features = chunk.features()[0]
        with torch.enable_grad():  # the arithmetic of training
            training[chunk.layer_idx] = heads[chunk.layer_idx](features).detach().T.float().cpu()
        drawn = torch.rand(features.shape, generator=torch.Generator().manual_seed(subject.seed)) - 0.5
        moved = features.float() * (1 + 2 * _spread(subject) * drawn.to(features.device))
        with torch.no_grad():
            noise[chunk.layer_idx] = heads[chunk.layer_idx](moved.to(features.dtype)).T.float().cpu()

    observe(subject.model, subject.on_device(subject.ids), learn)
    cache = RetentionCache(subject.model, heads, subject.roomy())
    subject.read(cache=cache)
    for index in subject.backbone.layers:
        inference[index] = cache.kept_scores(index)[0].float().cpu()
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
    if subject.heads is None or isinstance(subject.heads, str):
        raise NotHere(f"no retaining heads were given; scorer {subject.rates.name} decides")
    return subject.heads
