"""What folds evicted units into kept ones."""

from __future__ import annotations

from locret.base import registry
from locret.mergers.loco import LoCoMerger

__all__ = ["LoCoMerger", "get"]


def get(spec: str) -> LoCoMerger:
    """Return the merger that a spec such as "loco:kernels=FOLDER" names."""
    return registry.get("merge", (LoCoMerger,), spec)
