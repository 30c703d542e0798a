"""Libraries that only some metrics need: imported when first used, with a clear message where one is missing."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def library(name: str, metric: str) -> ModuleType:
    """Return an optional library, imported.

    Args:
        name: The module's dotted name, such as "rouge_score.rouge_scorer".
        metric: What needs it, for the message.

    Raises:
        ValueError: If it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0]
        if error.name != package:
            raise
        wanted = package.replace("_", "-")
        raise ValueError(
            f"{metric} needs the library {wanted}; install it with `pip install 'locret[eval]'`"
        ) from error
