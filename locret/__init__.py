"""Retaining heads and bounded-memory inference for long-context language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locret import shipped
from locret._version import __version__
from locret.base.plugins import on_demand

if TYPE_CHECKING:
    from locret import scorers
    from locret.cache.cache import RetentionCache
    from locret.cache.cache_file import load_cache, read_notes, save_cache
    from locret.chunked_prefill import prefill
    from locret.conversation.chat import Chat
    from locret.conversation.compose import compose
    from locret.conversation.context import Context
    from locret.conversation.evidence import Answered
    from locret.conversation.head_shares import head_shares
    from locret.conversation.model import LongContextModel
    from locret.generation import generate
    from locret.heads.heads import RetainingHead, RetainingHeads
    from locret.policy.policy import RetentionPolicy
    from locret.policy.protection import Span

__all__ = [
    "Answered",
    "Chat",
    "Context",
    "LongContextModel",
    "RetainingHead",
    "RetainingHeads",
    "RetentionCache",
    "RetentionPolicy",
    "Span",
    "__version__",
    "compose",
    "generate",
    "head_shares",
    "load_cache",
    "prefill",
    "read_notes",
    "save_cache",
    "scorers",
]

shipped.import_from_checkout()

# Loaded when first asked for, so that `--help` and a refused option do not wait for torch and transformers.
__getattr__ = on_demand(
    __name__,
    {
        "Answered": "locret.conversation.evidence",
        "Chat": "locret.conversation.chat",
        "Context": "locret.conversation.context",
        "LongContextModel": "locret.conversation.model",
        "RetainingHead": "locret.heads.heads",
        "RetainingHeads": "locret.heads.heads",
        "RetentionCache": "locret.cache.cache",
        "RetentionPolicy": "locret.policy.policy",
        "Span": "locret.policy.protection",
        "compose": "locret.conversation.compose",
        "generate": "locret.generation",
        "head_shares": "locret.conversation.head_shares",
        "load_cache": "locret.cache.cache_file",
        "prefill": "locret.chunked_prefill",
        "read_notes": "locret.cache.cache_file",
        "save_cache": "locret.cache.cache_file",
        "scorers": "locret.scorers",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
