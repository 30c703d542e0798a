"""Everything that can find the units of the second tier that a query attends to.

To add a lookup: one file next to these, and one line in `_LOOKUPS`.
"""

from __future__ import annotations

from locret.base import registry
from locret.lookups.base import Ask, Lookup
from locret.lookups.exact import ExactLookup
from locret.lookups.infllm import InfLLM
from locret.lookups.omnikv import OmniKVLookup
from locret.lookups.quest import QuestLookup

__all__ = ["Ask", "ExactLookup", "InfLLM", "Lookup", "get", "in_blocks", "names"]

_LOOKUPS: tuple[type[Lookup], ...] = (ExactLookup, OmniKVLookup, QuestLookup)


def names() -> list[str]:
    """Return the names that `recall_by` may begin with, sorted."""
    return sorted([InfLLM.name, *(lookup.name for lookup in _LOOKUPS)])


def get(spec: str) -> Lookup:
    """Return the lookup that a spec names, such as "exact" or "quest:page=8".

    Raises:
        ValueError: If there is none (the message lists the nearest names), or an option is unfit.

    Examples:
        >>> lookups.get("exact").name
        'exact'
    """
    known: tuple[type[Lookup | InfLLM], ...] = (*_LOOKUPS, InfLLM)
    found = registry.get("lookup", known, spec)
    if isinstance(found, InfLLM):
        raise ValueError(f'lookup "{spec}" recalls blocks from a tier of its own; give it as recall_by of a policy')
    return found


def in_blocks(spec: str) -> InfLLM:
    """Return the lookup of blocks that a spec names."""
    return registry.get("lookup", (InfLLM,), spec)
