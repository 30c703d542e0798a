"""Retaining heads and bounded-memory inference for long-context language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locret import shipped
from locret._version import __version__ as __version__
from locret.base.plugins import on_demand

if TYPE_CHECKING:
    from locret import scorers as scorers
    from locret.cache.cache import RetentionCache as RetentionCache
    from locret.cache.cache_file import load_cache as load_cache
    from locret.cache.cache_file import read_notes as read_notes
    from locret.cache.cache_file import save_cache as save_cache
    from locret.chunked_prefill import prefill as prefill
    from locret.conversation.chat import Chat as Chat
    from locret.conversation.compose import compose as compose
    from locret.conversation.context import Context as Context
    from locret.conversation.evidence import Answered as Answered
    from locret.conversation.head_shares import head_shares as head_shares
    from locret.conversation.model import LongContextModel as LongContextModel
    from locret.generation import generate as generate
    from locret.heads.heads import RetainingHead as RetainingHead
    from locret.heads.heads import RetainingHeads as RetainingHeads
    from locret.policy.policy import RetentionPolicy as RetentionPolicy
    from locret.policy.protection import Span as Span

shipped.import_from_checkout()

# Loaded when first asked for, so that `--help` and a refused option do not wait for torch and transformers.
_HOMES = {
    "Answered": "locret.conversation.evidence",
    "Chat": "locret.conversation.chat",
    "Context": "locret.conversation.context",
    "LongContextModel": "locret.conversation.model",
    "RetainingHead": "locret.heads.heads",
    "RetainingHeads": "locret.heads.heads",
    "RetentionCache": "locret.generation",
    "RetentionPolicy": "locret.policy.policy",
    "Span": "locret.policy.protection",
    "compose": "locret.conversation.compose",
    "generate": "locret.generation",
    "head_shares": "locret.conversation.head_shares",
    "load_cache": "locret.generation",
    "prefill": "locret.chunked_prefill",
    "read_notes": "locret.cache.cache_file",
    "save_cache": "locret.cache.cache_file",
    "scorers": "locret.scorers",
}
__getattr__ = on_demand(__name__, _HOMES)
__all__ = sorted([*_HOMES, "__version__"])


def __dir__() -> list[str]:
    return __all__
