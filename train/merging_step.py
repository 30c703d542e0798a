"""One training step of LoCoCo's kernels: what queries lose by an eviction, layer by layer, while a text is read.

The kernels merge what an eviction drops (`locret.mergers.loco`). What that is worth is seen one chunk later: the
queries of the next chunk attend to the merged units and to themselves, and should read what they would have read had
nothing been evicted. The loss is the squared error of these attention outputs, relative to that of eviction alone, so 1
is no gain and 0 is no loss. It touches its own layer only, like the loss of retaining heads: nothing flows back through
the backbone, which is frozen, and a step costs one reading of the text and three attentions of a layer at a time.

LoCoCo itself trains on the language-model loss of the next chunk through the whole backbone, with norms and embeddings.
"""
# B batch, K KV heads, L new tokens, S units before an eviction, C kept ones, D head dim

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from locret.backbone.adapters import input_device
from locret.backbone.attention import MaskMemo, View, attend
from locret.backbone.chunk import Chunk
from locret.backbone.rotary import Rotary, rotate
from locret.cache.cache import RetentionCache
from locret.cache.merging import Folding
from locret.chunked_prefill import prefill
from locret.heads.heads import RetainingHeads
from locret.labels.labels import token_row
from locret.mergers.kernels import MergingKernels
from locret.mergers.loco import LoCoMerger, Merged, Units, fold, take
from locret.policy.policy import RetentionPolicy
from locret.scorers import RetainingHeadScorer


def merging_step(
    model: nn.Module,
    heads: RetainingHeads,
    kernels: MergingKernels,
    prompt_ids: Tensor,
    policy: RetentionPolicy,
) -> Tensor:
    """Add the gradient of one text's loss to the kernels' gradients.

    Returns:
        Of every eviction that a later chunk has looked at, in all layers, the error that is left, relative to eviction
        alone; detached.
    """
    lesson = _Lesson(kernels=kernels)
    cache = RetentionCache(model, _Watching(heads=heads, lesson=lesson), policy)
    rotary = cache.governed[0].store.rotary
    if rotary.adjacent or cache.rotary.still:
        raise ValueError(
            f"{cache.backbone.model_type} does not rotate the halves of its keys against each other in every layer, "
            "which the training of merge kernels needs; use another backbone, or a merge that is not trained"
        )
    object.__setattr__(lesson, "rotary", rotary)
    for index, layer in zip(cache.backbone.layers, cache.governed, strict=True):
        layer.folding = Folding(lesson, None, index)
    ids = token_row(prompt_ids, "prompt_ids").to(input_device(model))
    prefill(model, ids, cache)
    if not lesson.losses:
        raise ValueError(
            f"a text of {ids.shape[1]} tokens has no chunk behind its first eviction with budget={policy.budget} and "
            f"chunk_size={policy.chunk_size}; use longer texts, or lower them"
        )
    return torch.stack(lesson.losses)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Lesson(LoCoMerger):
    """Merges with the kernels as they are, and remembers what it has merged until the next chunk has looked at it."""

    name: ClassVar[str] = "lesson"

    kernels: MergingKernels  # type: ignore[assignment]
    rotary: Rotary | None = None
    waiting: dict[int, Units] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    masks: MaskMemo = field(default_factory=MaskMemo)

    def __post_init__(self) -> None:
        """Check nothing: no user has written this."""

    def fold(self, units: Units, prepared: Any) -> Merged:
        copies: dict[str, Any] = {n: one.clone() for n, one in vars(units).items() if isinstance(one, Tensor)}
        self.waiting[units.layer_idx] = replace(units, **copies)
        return fold(units, self.kernels[units.layer_idx])

    def look(self, chunk: Chunk) -> None:
        """Learn from what a chunk reads of the units that were merged before it."""
        if (units := self.waiting.pop(chunk.layer_idx, None)) is None:
            return
        new = chunk.new_tokens
        new_keys, new_values = chunk.key[:, :, -new:], chunk.value[:, :, -new:]
        base = chunk.next_position - new

        def read(keys: Tensor, values: Tensor) -> Tensor:
            assert self.rotary is not None
            slots = torch.arange(base - keys.shape[2], base, device=keys.device)
            turned = _rotated(keys, *self.rotary.at(slots, keys))
            view = View(
                torch.cat([turned.to(new_keys.dtype), new_keys], dim=2),
                torch.cat([values.to(new_values.dtype), new_values], dim=2),
            )
            return attend(
                chunk.query,
                view,
                scaling=chunk.scaling,
                softcap=chunk.softcap,
                sinks=chunk.learned_sinks,
                memo=self.masks,
            )

        wanted = read(units.keys, units.values).float()
        evicted = read(take(units.keys, units.kept), take(units.values, units.kept)).float()
        with torch.enable_grad():
            merged = fold(units, self.kernels[chunk.layer_idx])
            error = (read(merged.keys, merged.values).float() - wanted).square().sum()
            loss = error / (evicted - wanted).square().sum().clamp_min(torch.finfo(torch.float32).tiny)
            loss.backward()
        self.losses.append(loss.detach())


def _rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what `rotate` returns, which writes into memory and so has no gradient."""
    if not keys.requires_grad:
        return rotate(keys, cos, sin)
    rotated, half = cos.shape[-1], cos.shape[-1] // 2
    first, second = keys[..., :half], keys[..., half:rotated]
    turned = (
        first * cos[..., :half] - second * sin[..., :half],
        second * cos[..., half:] + first * sin[..., half:],
        keys[..., rotated:],
    )
    return torch.cat(turned, dim=-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Watching(RetainingHeadScorer):
    """Scores with the heads, and shows each chunk to the lesson."""

    name: ClassVar[str] = "watching"

    lesson: _Lesson

    def __post_init__(self) -> None:
        """Check nothing: no user has written this."""

    def score(self, chunk: Chunk) -> Tensor:
        self.lesson.look(chunk)
        return super().score(chunk)
