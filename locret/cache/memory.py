"""Bytes of a cache: what is planned, before and while it is read into, and what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from locret.backbone.shape import Backbone
from locret.cache.layer import RetentionLayer
from locret.cache.limits import Limits


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a cache. What is planned follows from the policy alone; all else is counted from the tensors."""

    planned: int
    actual: int
    peak: int
    units: int
    """Units held per KV head, on average: in the fullest layer, or over all layers where each head has its share."""
    host_planned: int = 0
    """Of the second tier, in host memory; without what `recall_by` makes of its keys to find units faster."""
    host: int = 0
    host_units: int = 0
    """Units of the second tier per KV head, in the fullest layer."""
    moved: int = 0
    """Fetched from the second tier so far."""

    def to_dict(self) -> dict[str, int]:
        """Return the numbers as plain data."""
        return asdict(self)


class Account:
    """What a cache is planned to take: it follows from the slots that its layers have had, or will have."""

    def __init__(self, backbone: Backbone, limits: Limits, element_size: int) -> None:
        self.backbone, self.limits, self.element_size = backbone, limits, element_size
        self.policy = limits.policy
        self.slots = [0] * len(backbone.layers)
        """Most slots that each full-attention layer has had."""
        self.second_slots = [0] * len(backbone.layers)
        """The same of its second tier."""

    def note(self, layers: Sequence[RetentionLayer]) -> None:
        """Take note of the slots that layers have now."""
        self.slots = list(map(max, self.slots, [layer.capacity for layer in layers]))
        second = [0 if layer.tier is None else layer.tier.capacity for layer in layers]
        self.second_slots = list(map(max, self.second_slots, second))

    def first(self, rows: int, begun: bool) -> int:
        """Return the planned bytes of the backbone's memory; `begun` says whether anything was read."""
        slots = self.slots
        if not any(slots) and not self.policy.needs_length:
            slots = list(self.limits.plan(None).peak)
        return self.limits.fast_bytes(self.backbone, slots, self._second(begun), self.element_size, rows)

    def second(self, rows: int, begun: bool) -> int:
        """Return the planned bytes of second tiers that do not lie in the backbone's memory."""
        return self.limits.far_bytes(self.backbone, self._second(begun), self.element_size, rows)

    def _second(self, begun: bool) -> list[int]:
        most = self.policy.host_budget
        if not begun and isinstance(most, int) and not self.policy.needs_length:
            return [most] * len(self.second_slots)
        return self.second_slots
