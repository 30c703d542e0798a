"""Everything that can find the units of the second tier that a query attends to.

To add a lookup: one file next to these, and one line in `_LOOKUPS`.
"""

from __future__ import annotations

from locret import registry
from locret.lookups.base import Ask, Lookup
from locret.lookups.exact import ExactLookup
from locret.lookups.omnikv import OmniKVLookup
from locret.lookups.quest import QuestLookup

__all__ = ["Ask", "ExactLookup", "Lookup", "OmniKVLookup", "QuestLookup", "get", "names"]

_LOOKUPS: tuple[type[Lookup], ...] = (ExactLookup, OmniKVLookup, QuestLookup)


def names() -> list[str]:
    """Return the names that `get` knows, sorted."""
    return sorted(lookup.name for lookup in _LOOKUPS)


def get(spec: str) -> Lookup:
    """Return the lookup that a spec names, such as "exact" or "pages:page=16".

    Raises:
        ValueError: If there is none (the message lists the nearest names), or an option is unfit.

    Examples:
        >>> lookups.get("exact").name
        'exact'
    """
    return registry.get("lookup", _LOOKUPS, spec)
