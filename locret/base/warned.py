"""Warnings that show the line of whoever called this toolkit, not one of its own."""

from __future__ import annotations

import inspect
import warnings
from traceback import walk_stack


class Note(UserWarning):
    """What was done for a user who did not say otherwise; nothing is wrong."""


def note_user(message: str) -> None:
    """Say what was done, as `warn_user` warns."""
    warn_user(message, Note)


def warn_user(message: str, kind: type[Warning] = UserWarning) -> None:
    """Warn, and name as the place the line outside of this toolkit that led here."""
    rooms = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_stack(inspect.currentframe())]
    warnings.warn(message, kind, stacklevel=len(rooms) - rooms[::-1].index("locret") + 1)
