"""Warnings that show the line of whoever called this toolkit, not one of its own."""

from __future__ import annotations

import inspect
import warnings


def warn_user(message: str) -> None:
    """Warn, and name as the place the line outside of this toolkit that led here."""
    frame, level, outside = inspect.currentframe(), 0, 0
    while frame is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == "locret":
            outside = level + 1
        frame = frame.f_back
    warnings.warn(message, stacklevel=outside)
