"""How queries attend while a prompt is read. To add a strategy: one file next to these, one line in `_STRATEGIES`.

"dense" is plain attention, and what local tokens and answers use in any case.
"""

from __future__ import annotations

from dataclasses import fields

from locret import method_spec
from locret.nearest import nearest
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
    parsed = method_spec.parse(spec, "prefill_attention")
    if parsed.modifiers:
        raise ValueError(f'prefill_attention "{spec}": +{parsed.modifiers[0]} is for a method; drop it')
    found = {strategy.name: strategy for strategy in _STRATEGIES}.get(parsed.name)
    if found is None and parsed.name != DENSE:
        near = nearest(parsed.name, names()) or names()
        raise ValueError(f'prefill_attention "{parsed.name}" is unknown; did you mean {" or ".join(near)}?')
    known = [] if found is None else [field.name for field in fields(found)]  # type: ignore[arg-type]
    for option in parsed.options:
        if option not in known:
            hint = f"did you mean {' or '.join(nearest(option, known) or known)}?" if known else "there are none"
            raise ValueError(f'prefill_attention {parsed.name}: it has no option "{option}"; {hint}')
    return None if found is None else found(**parsed.options)
