"""RULER's thirteen tasks (arXiv 2404.06654), generated for any tokenizer and any length."""

from __future__ import annotations

from locret.data.tasks.ruler.counting import CommonWords, FrequentWords
from locret.data.tasks.ruler.draft import Kind
from locret.data.tasks.ruler.needles import Needles
from locret.data.tasks.ruler.questions import Questions
from locret.data.tasks.ruler.task import RulerTask
from locret.data.tasks.ruler.tracking import Tracking

__all__ = ["TASKS", "RulerTask"]

_KINDS: dict[str, tuple[int, Kind]] = {
    "niah_single_1": (128, Needles(haystack="noise")),
    "niah_single_2": (128, Needles(haystack="essay")),
    "niah_single_3": (128, Needles(haystack="essay", value="uuid")),
    "niah_multikey_1": (128, Needles(haystack="essay", keys=4)),
    "niah_multikey_2": (128, Needles(haystack="needle")),
    "niah_multikey_3": (128, Needles(haystack="needle", key="uuid", value="uuid")),
    "niah_multivalue": (128, Needles(haystack="essay", values=4)),
    "niah_multiquery": (128, Needles(haystack="essay", queries=4)),
    "vt": (30, Tracking()),
    "cwe": (120, CommonWords()),
    "fwe": (50, FrequentWords()),
    "qa_1": (32, Questions(dataset="squad")),
    "qa_2": (32, Questions(dataset="hotpotqa")),
}
"""Tokens to generate, and what is asked, in the order of the report."""


def _task(name: str, new_tokens: int, kind: Kind) -> RulerTask:
    part = isinstance(kind, Questions)
    return RulerTask(
        name=f"ruler/{name}",
        source="RULER (arXiv 2404.06654), NVIDIA/RULER",
        metric=f"string match, {'part' if part else 'all'}",
        max_new_tokens=new_tokens,
        chat=True,
        file=f"4096/{name}.jsonl",
        kind=kind,
        match="part" if part else "all",
    )


TASKS = tuple(_task(name, *rest) for name, rest in _KINDS.items())
