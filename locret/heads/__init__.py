"""Retaining heads: the small trained networks, and how they are saved, published and loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locret.base.plugins import on_demand

if TYPE_CHECKING:
    from locret.heads.head import RetainingHead
    from locret.heads.heads import RetainingHeads

__all__ = ["RetainingHead", "RetainingHeads"]

__getattr__ = on_demand(__name__, {"RetainingHead": "locret.heads.head", "RetainingHeads": "locret.heads.heads"})
