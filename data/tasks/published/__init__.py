"""The published benchmarks: real rows, official prompts, official metrics. To add a family: one line in `_FAMILIES`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from locret.data.tasks.published.base import BadRow, Item, PublishedTask
from locret.nearest import nearest

__all__ = ["BadRow", "Item", "PublishedTask", "families", "get", "names"]

# Family -> the module whose `TASKS` are its tasks, in the order of tables.
_FAMILIES = {
    "infinitebench": "locret.data.tasks.published.infinitebench",
    "leval": "locret.data.tasks.published.leval",
    "longbench": "locret.data.tasks.published.longbench",
    "infinitebench_generated": "locret.data.tasks.published.infinitebench_generated",
    "ruler": "locret.data.tasks.ruler",
    "niah": "locret.data.tasks.published.niah",
    "twostage": "locret.data.tasks.published.two_stage",
    "sirllm": "locret.data.tasks.published.sirllm",
}


def families() -> list[str]:
    """Return the names of the benchmarks."""
    return list(_FAMILIES)


def names(family: str | None = None) -> list[str]:
    """Return the names that `get` knows, in the order of tables; of one benchmark if it is given.

    Raises:
        ValueError: If there is no such benchmark.
    """
    if family is not None and family not in _FAMILIES:
        raise ValueError(f'benchmark "{family}" is unknown; known are {", ".join(_FAMILIES)}')
    return [task.name for name in _FAMILIES if family in (None, name) for task in _tasks(name)]


def get(name: str, **options: Any) -> PublishedTask:
    """Return the task called `name`, such as "longbench/qasper", with its options.

    Raises:
        ValueError: If there is no such task (the message lists the nearest names), it has no such option, or an
            option has a value it cannot have.
    """
    for task in _tasks(name.split("/")[0]):
        if task.name == name:
            _check_options(task, options)
            return replace(task, **options)
    near = nearest(name, names()) or families()
    raise ValueError(f'task "{name}" is unknown; did you mean {" or ".join(near)}?')


def _tasks(family: str) -> Sequence[PublishedTask]:
    return import_module(_FAMILIES[family]).TASKS if family in _FAMILIES else ()


def _check_options(task: PublishedTask, options: dict[str, Any]) -> None:
    for option, value in options.items():
        if option not in task.settable:
            close = get_close_matches(option, task.settable, n=1) or list(task.settable)
            raise ValueError(f'task {task.name}: it has no option "{option}"; did you mean {" or ".join(close)}?')
        default = getattr(task, option)
        if isinstance(default, bool) and not isinstance(value, bool):
            raise ValueError(f"task {task.name}: {option}={value!r} must be true or false")
