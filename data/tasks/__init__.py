"""The tasks of `locret-eval`. To add one: one file beside these, one line in `_TASKS`."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from locret.data.tasks.generated.base import Draw, Planted, Question, Sample, Task
from locret.data.tasks.generated.multikey import MultiKey
from locret.data.tasks.generated.multivalue import MultiValue
from locret.data.tasks.generated.number import Number
from locret.data.tasks.generated.passkey import PassKey
from locret.data.tasks.generated.two_stage import TwoStage
from locret.data.tasks.generated.variable_tracking import VariableTracking
from locret.nearest import nearest

__all__ = ["Draw", "Planted", "Question", "Sample", "Task", "get", "names"]

_TASKS: tuple[type[Task], ...] = (PassKey, Number, MultiKey, MultiValue, VariableTracking, TwoStage)


def names() -> list[str]:
    """Return the names that `get` knows, in the order of tables."""
    return [task.name for task in _TASKS]


def get(name: str, **options: Any) -> Task:
    """Return the task called `name` with its options.

    Raises:
        ValueError: If there is no such task (the message lists the nearest names), it has no such option, or an
            option is not a whole number in range.

    Examples:
        >>> tasks.get("multikey", keys=4).keys
        4
    """
    for task in _TASKS:
        if task.name == name:
            known = [option.name for option in fields(task)]
            for option in options:
                if option not in known:
                    close = get_close_matches(str(option), known, n=1) or known
                    raise ValueError(f'task {name}: it has no option "{option}"; did you mean {" or ".join(close)}?')
            return task(**options)
    near = nearest(name, names()) or names()
    raise ValueError(f'task "{name}" is unknown; did you mean {" or ".join(near)}?')
