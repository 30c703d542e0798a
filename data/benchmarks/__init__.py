"""The published benchmarks: real rows, official prompts, official metrics."""

from __future__ import annotations

from locret.data.benchmarks.base import BadRow, Item, PublishedTask

__all__ = ["BadRow", "Item", "PublishedTask"]
