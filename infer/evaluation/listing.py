"""What `locret-eval --list` says: the tasks, methods and modifiers there are."""

from __future__ import annotations

from typing import Any

from locret.data import tasks
from locret.infer.evaluation import methods


def as_record() -> dict[str, Any]:
    """Return everything by name, for --json."""
    known = {name: tasks.get(name) for name in tasks.names()}
    facts = {
        name: {"version": t.version, "metric": t.metric, "source": t.source, "options": t.options()}
        for name, t in known.items()
    }
    described = {name: methods.get(name).description for name in methods.names()}
    return {"tasks": facts, "methods": described, "modifiers": methods.MODIFIERS}


def as_text() -> str:
    """Return a line for each, for people."""
    known = as_record()
    lines = ["tasks (name, version, metric, source)"]
    lines += [f"  {name:<20} {t['version']}  {t['metric']:<20} {t['source']}" for name, t in known["tasks"].items()]
    lines.append("methods")
    lines += [f"  {name:<20} {description}" for name, description in known["methods"].items()]
    lines.append("modifiers of a method, as in locret+pyramid (what they change)")
    for name, changes in known["modifiers"].items():
        lines.append(f"  +{name:<19} {', '.join(f'{key}={value}' for key, value in changes.items())}")
    return "\n".join(lines) + "\n"
