"""Everything that can fold evicted units into kept ones.

To add a merger: one file next to these, and one line in `_MERGERS`.
"""

from __future__ import annotations

from locret import registry
from locret.mergers.base import Merged, Merger, Units
from locret.mergers.d2o import D2OMerger
from locret.mergers.kvmerger import KVMerger
from locret.mergers.loco import LoCoMerger

__all__ = ["D2OMerger", "KVMerger", "LoCoMerger", "Merged", "Merger", "Units", "get", "names"]

_MERGERS: tuple[type[Merger], ...] = (D2OMerger, KVMerger, LoCoMerger)


def names() -> list[str]:
    """Return the names that `get` knows, sorted."""
    return sorted(merger.name for merger in _MERGERS)


def get(spec: str) -> Merger:
    """Return the merger that a spec such as "d2o" or "d2o:threshold=0.5" names.

    Raises:
        ValueError: If there is none (the message lists the nearest names), or an option is unfit.
    """
    return registry.get("merge", _MERGERS, spec)
