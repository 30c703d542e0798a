"""Warnings that show the line of whoever called this toolkit, not one of its own."""

from __future__ import annotations

import inspect
import warnings
from traceback import walk_stack


def warn_user(message: str) -> None:
    """Warn, and name as the place the line outside of this toolkit that led here."""
    rooms = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_stack(inspect.currentframe())]
    warnings.warn(message, stacklevel=len(rooms) - rooms[::-1].index("locret") + 1)
