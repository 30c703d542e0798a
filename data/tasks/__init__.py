"""The tasks of `locret-eval`. To add one: one file, and one line in `_FAMILIES` or in the file of its family.

A task of another package or of a file comes in as `package.module:TASK` or `file.py:TASK`. The object is a task.

A task is a frozen dataclass whose options are fields; see `task.Task` for what each has to answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from importlib import import_module
from typing import Any

from locret.base import plugins
from locret.base.fields import WrongType, read, types_of
from locret.base.nearest import check_retired, nearest
from locret.data.tasks.task import Sample, Task

__all__ = ["Sample", "Task", "get", "names"]

# Family -> the module whose `TASKS` has its tasks, in the order of tables.
_FAMILIES = {
    **{
        name: f"locret.data.tasks.published.{name.removesuffix('_v2')}"
        for name in ("infinitebench", "leval", "longbench", "longbench_v2", "scbench")
    },
    "infinitebench_generated": "locret.data.tasks.published.infinitebench",
    "ruler": "locret.data.tasks.published.ruler",
    "niah": "locret.data.tasks.published.niah",
    "twostage": "locret.data.tasks.published.omnikv",
    "sirllm": "locret.data.tasks.published.sirllm",
}
_SHORT = {
    "passkey": "niah/passkey",
    "number": "infinitebench_generated/number_string",
    "multikey": "ruler/niah_multikey_1",
}
"""Short names of tasks that need no data."""


def names(family: str | None = None) -> list[str]:
    """Return the names of a family's tasks in the order of tables; of all tasks for None."""
    if family is not None and family not in _FAMILIES:
        raise ValueError(f'benchmark "{family}" is unknown; known are {", ".join(_FAMILIES)}')
    return [task.name for name in _FAMILIES if family in (None, name) for task in _tasks(name)]


def get(name: str, **options: Any) -> Task:
    """Return the task called `name`, such as "passkey" or "longbench/qasper", with its options.

    Examples:
        >>> tasks.get("leval/codeU", limit=4096).limit
        4096
    """
    name = _SHORT.get(name, name)
    found = next((task for task in _tasks(name.partition("/")[0]) if task.name == name), None) or _of_others(name)
    if found is None:
        check_retired("task", name)
        near = nearest(name, [*_SHORT, *names()]) or list(_FAMILIES if "/" in name else _SHORT)
        raise ValueError(f'task "{name}" is unknown; did you mean {" or ".join(near)}?')
    for option, value in options.items():
        _check_option(found, str(option), value)
    return replace(found, **options)


def _of_others(name: str) -> Task | None:
    """Return the task of another package or a file; None where the name is not of one."""
    if not plugins.is_reference(name):  # ours have been looked through
        return None
    found = plugins.load(name, "task")
    if not isinstance(found, Task):
        raise ValueError(f'task "{name}" is no locret.data.tasks.Task; derive it from that, and name an instance')
    if not (is_dataclass(found) and type(found).__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ValueError(f'task "{name}" is not a frozen dataclass; put @dataclass(frozen=True, kw_only=True) above it')
    return replace(found, name=name)  # results and --task-options speak of it as it was asked for


def _tasks(family: str) -> Sequence[Task]:
    if family not in _FAMILIES:
        return ()
    return [task for task in import_module(_FAMILIES[family]).TASKS if task.family == family]


def _check_option(task: Task, option: str, value: Any) -> None:
    """Refuse an option that a task does not have, or a value that its field cannot hold."""
    if option not in task.settable:
        check_retired("task option", option)
        check_retired(f"{task.family} option", option)
        close = nearest(option, task.settable) or list(task.settable)
        raise ValueError(f'task {task.name}: it has no option "{option}"; did you mean {" or ".join(close)}?')
    where = f"task {task.name}: {option}={value!r}"
    try:
        read(value, types_of(type(task))[option])
    except WrongType as error:
        raise ValueError(f"{where} is not {error}; give such a value") from None
    if type(value) is int and value < 1:
        raise ValueError(f"{where} is too small; give 1 or more")
