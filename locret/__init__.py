"""Retaining heads and bounded-memory inference for long-context language models."""

from locret import scorers
from locret._version import __version__
from locret.cache import RetentionCache
from locret.generation import generate
from locret.heads import RetainingHead, RetainingHeads
from locret.policy import RetentionPolicy
from locret.prefill import prefill
from locret.storage import load_cache, save_cache

__all__ = [
    "RetainingHead",
    "RetainingHeads",
    "RetentionCache",
    "RetentionPolicy",
    "__version__",
    "generate",
    "load_cache",
    "prefill",
    "save_cache",
    "scorers",
]
