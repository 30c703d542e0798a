"""Everything that can find the units of the second tier that a query attends to.

To add a lookup: one file next to these, and one line in `_LOOKUPS`.
"""

from __future__ import annotations

from locret import registry
from locret.lookups.base import Ask, Lookup
from locret.lookups.codes import CodesLookup
from locret.lookups.exact import ExactLookup
from locret.lookups.means import MeansLookup
from locret.lookups.omnikv import OmniKVLookup
from locret.lookups.pages import PagesLookup
from locret.lookups.quest import QuestLookup

__all__ = [
    "Ask",
    "CodesLookup",
    "ExactLookup",
    "Lookup",
    "MeansLookup",
    "OmniKVLookup",
    "PagesLookup",
    "QuestLookup",
    "get",
    "names",
]

_LOOKUPS: tuple[type[Lookup], ...] = (
    CodesLookup,
    ExactLookup,
    MeansLookup,
    OmniKVLookup,
    PagesLookup,
    QuestLookup,
)


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
