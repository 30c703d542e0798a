"""What a merger is: options, and one method that folds the units an eviction drops into those that stay."""

# B batch, K KV heads, S units held, C kept ones, G those that go, D head dim

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from locret.base.registry import Chosen


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


class Merger(Chosen):
    """Folds evicted units into kept ones. Holds options, never anything of a model or of a sequence.

    Subclasses are frozen dataclasses.
    """

    kind: ClassVar[str] = "merge"

    def prepare(self, model: nn.Module) -> Any:
        """Return what `fold` needs of a backbone; nothing by default.

        Raises:
            ValueError: If the merger does not fit the backbone.
        """
        return None

    def slots(self, prepared: Any) -> int:
        """Return how many units of a layer and KV head it makes anew, out of those that stay and are not pinned."""
        return 0

    @abstractmethod
    def fold(self, units: Units, prepared: Any) -> Merged:
        """Return the kept units with the others folded in."""


def take(states: Tensor, ranks: Tensor) -> Tensor:
    """Return (B, K, C) or (B, K, C, D): the units of the given ranks."""
    if states.ndim == 3:
        return states.gather(2, ranks)
    return states.gather(2, ranks[..., None].expand(*ranks.shape, states.shape[-1]))
