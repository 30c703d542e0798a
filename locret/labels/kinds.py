"""The kinds of label there are, by name."""

from __future__ import annotations

from locret.base.nearest import check_retired, nearest
from locret.labels.base import LabelKind
from locret.labels.log_attention import LOG_ATTENTION
from locret.labels.logit import LOGIT

KINDS: dict[str, LabelKind] = {kind.name: kind for kind in (LOGIT, LOG_ATTENTION)}


def names() -> list[str]:
    """Return the names that `get` knows."""
    return list(KINDS)


def get(kind: str | LabelKind) -> LabelKind:
    """Return the kind of label with this name; one that is given as such comes back.

    Raises:
        ValueError: If there is none; the message lists the nearest names.
    """
    if isinstance(kind, LabelKind):
        return kind
    if kind not in KINDS:
        check_retired("label kind", kind)
        near = nearest(kind, KINDS) or names()
        raise ValueError(f'label kind "{kind}" is unknown; did you mean {" or ".join(near)}?')
    return KINDS[kind]
