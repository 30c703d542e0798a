"""What `locret-eval --list` says: the tasks, suites, methods and modifiers there are."""

from __future__ import annotations

from typing import Any

from locret.base.method_spec import MODIFIERS
from locret.data import tasks
from locret.data.tasks.published import suites
from locret.infer.evaluation import methods


def as_record() -> dict[str, Any]:
    """Return everything by name, for --json."""
    about = ("version", "metric", "source", "max_new_tokens", "size")
    known = {name: tasks.get(name) for name in tasks.names()}
    return {
        "tasks": {n: {one: getattr(t, one) for one in about} | {"options": t.options()} for n, t in known.items()},
        "suites": {n: {"title": suites.get(n).title, "tasks": suites.get(n).tasks} for n in suites.names()},
        "methods": {name: _about(name) for name in methods.names()},
        "modifiers": {name: {"changes": one.fields, "options": one.options} for name, one in MODIFIERS.items()},
    }


def _about(method: str) -> str:
    try:
        return methods.get(method).description
    except ValueError as error:  # gates of others need to be told where they are
        return str(error)


def as_text() -> str:
    """Return a line for each, for people."""
    known = as_record()
    lines = ["tasks (name, version, metric, source)"]
    lines += [f"  {n:<36} {t['version']}  {t['metric']:<20} {t['source']}" for n, t in known["tasks"].items()]
    lines.append("suites of published tasks (--suite NAME)")
    lines += [f"  {name:<36} {suite['title']}" for name, suite in known["suites"].items()]
    lines.append("methods")
    lines += [f"  {name:<20} {description}" for name, description in known["methods"].items()]
    lines.append("modifiers of a method, as in locret+pyramid (what they change)")
    for name, one in known["modifiers"].items():
        options = f"; options: {', '.join(one['options'])}" if one["options"] else ""
        lines.append(f"  +{name:<19} {', '.join(f'{key}={value}' for key, value in one['changes'].items())}{options}")
    return "\n".join(lines) + "\n"
