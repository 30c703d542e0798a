"""Everything that can fold evicted units into kept ones.

To add a merger: one file next to these, and one line in `_MERGERS`.
"""

from __future__ import annotations

from locret.base import registry
from locret.mergers.base import Merged, Merger, Units
from locret.mergers.loco import LoCoMerger

__all__ = ["LoCoMerger", "Merged", "Merger", "Units", "get"]

_MERGERS: tuple[type[Merger], ...] = (LoCoMerger,)


def get(spec: str) -> Merger:
    """Return the merger that a spec such as "loco:kernels=FOLDER" names."""
    return registry.get("merge", _MERGERS, spec)
