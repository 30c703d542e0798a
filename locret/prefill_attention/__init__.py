"""How queries attend while a prompt is read. To add a strategy: one file next to these, one line in `_STRATEGIES`.

"dense" is plain attention, and what local tokens and answers use in any case.
"""

from __future__ import annotations

from locret.base import registry
from locret.prefill_attention.base import PrefillAttention
from locret.prefill_attention.minference import AShape, BlockSparse, MInference, VerticalSlash
from locret.prefill_attention.xattention import XAttention

__all__ = ["AShape", "BlockSparse", "MInference", "PrefillAttention", "VerticalSlash", "XAttention", "get", "names"]

DENSE = "dense"
_STRATEGIES: tuple[type[PrefillAttention], ...] = (AShape, BlockSparse, MInference, VerticalSlash, XAttention)


def names() -> list[str]:
    """Return the names that `get` knows, sorted."""
    return sorted([DENSE, *(strategy.name for strategy in _STRATEGIES)])


def get(spec: str) -> PrefillAttention | None:
    """Return the strategy that a text means, `NAME` or `NAME:OPTION=VALUE,...`; None for plain attention.

    Raises:
        ValueError: If there is no such strategy (the message lists the nearest names), it has no such option, or an
            option has a value that it cannot have.

    Examples:
        >>> prefill_attention.get("xattention:threshold=0.95").threshold
        0.95
    """
    if spec.strip() == DENSE:
        return None
    if spec.partition(":")[0].strip() == DENSE:
        raise ValueError(f'prefill_attention "{spec}": {DENSE} has no options; write {DENSE}')
    return registry.get("prefill_attention", _STRATEGIES, spec)
