"""LoCoCo: a few slots that hold convolutions of everything that is not kept as it is.

Paper:     LoCoCo, arXiv 2406.05317; with scores of retaining heads in Locret, appendix "LoCoCo".
Formula:   of a budget of b units the b - M best stay as they are. Over the others (the next best M and those that go)
           W_c = softmax(relu(conv([K; V]))) along the sequence, W_r selects the next best M, and
           W = (1 - a) W_r + a W_c makes M merged keys W K and values W V; a is learnt per layer.
           Merged slots get the worst score, so that the next eviction merges them again.
Deviates:  keys are merged before rotation, and a merged slot goes to the place of a unit it is made of, the one nearest
           to their weighted mean position, so that slots stay in the order of the text and a compact context an
           ordinary prefix. Papers merge rotated keys, which mixes phases, and put merged slots last.
           Pinned units stay as they are. The kernels alone are trained, not the norms of the backbone.
Cost:      one convolution over the units that are not kept as they are, per eviction and layer.
"""

# B batch, K KV heads, S units held, C kept ones, G those that go, M merged slots, U units that are merged, D head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from locret.backbone.adapters import attention_modules, device_of
from locret.base.registry import Chosen
from locret.mergers.kernels import WHAT, MergingKernel, MergingKernels

WORST = torch.finfo(torch.float32).min
"""Score of a merged slot."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """What a layer holds when it evicts: the units of all heads, or of one head of one row."""

    layer_idx: int
    keys: Tensor
    """(B, K, S, D) float32, before rotation, so that keys of different places can be added."""
    values: Tensor
    """(B, K, S, D) float32."""
    scores: Tensor
    """(B, K, S) float32."""
    positions: Tensor
    """(B, K, S) original positions, ascending; -1 in empty slots."""
    pinned: Tensor
    """(B, K, S) bool: units that stay whatever their score."""
    kept: Tensor
    """(B, K, C) int64 ranks of the units that stay, ascending."""
    gone: Tensor
    """(B, K, G) int64 ranks of those that go, ascending."""
    free: int
    """How many of those that stay are not pinned, at least."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The units that stay, after others were folded into them."""

    keys: Tensor
    """(B, K, C, D) float32, before rotation."""
    values: Tensor
    """(B, K, C, D) float32."""
    scores: Tensor
    """(B, K, C) float32."""
    positions: Tensor
    """(B, K, C) original positions, strictly ascending but for empty slots in front."""
    source: Tensor
    """(B, K, C) int64 rank of the unit that each takes its other columns from."""


@dataclass(frozen=True, kw_only=True)
class LoCoMerger(Chosen):
    """Merge all that is not among the best into a few slots, by trained convolutions."""

    kind: ClassVar[str] = "merge"
    name: ClassVar[str] = "loco"
    over_ranks: ClassVar[bool] = True

    kernels: str
    """Folder or Hub repository of trained merging kernels (locret kernels trains them)."""

    def check_file(self) -> None:
        self._load()

    def prepare(self, model: nn.Module) -> MergingKernels:
        """Load the kernels, each onto its layer's device."""
        kernels = self._load()
        kernels.check_matches(model)
        for index, module in enumerate(attention_modules(model)):
            if index in kernels.config.layers:
                kernels[index].to(device_of(module))
        return kernels.requires_grad_(False)

    def _load(self) -> MergingKernels:
        try:
            return MergingKernels.from_pretrained(self.kernels)
        except ValueError as error:
            about = str(error).replace("retaining heads", WHAT).replace("locret-train", "locret kernels")
            raise ValueError(f"merge {self.name}: {about}") from None

    def slots(self, prepared: Any) -> int:
        """Return how many units of a layer and KV head it makes anew, out of those that stay and are not pinned."""
        return int(prepared.config.slots)

    def fold(self, units: Units, prepared: Any) -> Merged:
        """Return the kept units with the others folded in."""
        return fold(units, prepared[units.layer_idx])


def fold(units: Units, kernel: MergingKernel) -> Merged:
    """Return the kept units, the worst of them replaced by merged ones; differentiable in the kernel."""
    slots = min(kernel.slots, units.free)
    scores, pinned = take(units.scores, units.kept), take(units.pinned, units.kept)
    order = scores.masked_fill(pinned, torch.inf).argsort(dim=-1, stable=True)  # of equal scores the older is worse
    replaced, whole = (part.sort(-1).values for part in (order[..., :slots], order[..., slots:]))
    targets = take(units.kept, replaced)
    source = torch.cat([targets, units.gone], dim=-1).sort(-1).values
    positions = take(units.positions, source)
    weights = _weights(units, kernel, source, targets, slots)
    means = (weights.detach().double() @ positions.double()[..., None])[..., 0]
    order = means.argsort(dim=-1, stable=True)
    place = _places(take(means, order), positions)
    weights = take(weights, order)
    ranks = take(units.kept, whole)
    merged = {
        "keys": torch.cat([take(units.keys, ranks), weights @ take(units.keys, source)], dim=2),
        "values": torch.cat([take(units.values, ranks), weights @ take(units.values, source)], dim=2),
        "scores": torch.cat([take(units.scores, ranks), torch.full_like(means, WORST, dtype=scores.dtype)], dim=2),
        "positions": torch.cat([take(units.positions, ranks), take(positions, place)], dim=2),
        "source": torch.cat([ranks, take(targets, order)], dim=2),
    }
    in_text = merged["positions"].argsort(dim=-1, stable=True)
    return Merged(**{name: take(states, in_text) for name, states in merged.items()})


def _weights(units: Units, kernel: MergingKernel, source: Tensor, targets: Tensor, slots: int) -> Tensor:
    """Return (B, K, M, U): with what weight each unit goes into each merged slot."""
    empty = take(units.positions, source) < 0
    states = (take(part, source).flatten(0, 1) for part in (units.keys, units.values))
    convolved = kernel(*states, empty.flatten(0, 1))[:, :slots].unflatten(0, empty.shape[:2])
    own = (source[:, :, None] == targets[..., None]).to(convolved.dtype)
    return (1 - kernel.alpha) * own + kernel.alpha * convolved  # type: ignore[no-any-return]


def _places(means_BKM: Tensor, positions_BKU: Tensor) -> Tensor:
    """Return (B, K, M), strictly ascending: the unit whose place each merged slot takes; `means` are ascending."""
    slots, units = means_BKM.shape[-1], positions_BKU.shape[-1]
    above = torch.searchsorted(positions_BKU.double().contiguous(), means_BKM).clamp_max(units - 1)
    below = (above - 1).clamp_min(0)
    nearer = (means_BKM - take(positions_BKU, below)) <= (take(positions_BKU, above) - means_BKM)
    nearest = torch.where(nearer, below, above)
    steps = torch.arange(slots, device=means_BKM.device)
    risen = (nearest - steps).cummax(-1).values.clamp(0, units - slots)  # no two slots on one place
    return risen + steps


def take(states: Tensor, ranks: Tensor) -> Tensor:
    """Return (B, K, C) or (B, K, C, D): the units of the given ranks."""
    if states.ndim == 3:
        return states.gather(2, ranks)
    return states.gather(2, ranks[..., None].expand(*ranks.shape, states.shape[-1]))
