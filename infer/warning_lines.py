"""Warnings of a command: one line each on standard error, or none."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_as_lines(prog: str, *, quiet: bool) -> Iterator[None]:
    """Show each warning as one line on standard error, or none; hide transformers' bars where nobody watches."""
    from transformers.utils import logging

    def show(message: Warning | str, *_: object, **__: object) -> None:
        sys.stderr.write(f"{prog}: warning: {message}\n")

    if quiet or not sys.stderr.isatty():
        logging.disable_progress_bar()
    if quiet:
        logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        warnings.simplefilter("ignore" if quiet else "default")
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        yield
