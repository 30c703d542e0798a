"""Retaining heads: the small trained networks, and how they are saved, published and loaded."""

from locret.heads.head import RetainingHead
from locret.heads.heads import RetainingHeads

__all__ = ["RetainingHead", "RetainingHeads"]
