"""RULER's thirteen tasks (arXiv 2404.06654), generated for any tokenizer and any length."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from locret.data.tasks.ruler.counting import CommonWords, FrequentWords
from locret.data.tasks.ruler.needles import Needles
from locret.data.tasks.ruler.questions import Questions
from locret.data.tasks.ruler.task import RulerTask
from locret.data.tasks.ruler.tracking import Tracking

__all__ = ["TASKS", "RulerTask"]

# Tokens to generate, and what is asked, in the order of the report.
_TASKS: dict[str, tuple[int, Callable[..., RulerTask]]] = {
    "niah_single_1": (128, partial(Needles, haystack="noise")),
    "niah_single_2": (128, partial(Needles, haystack="essay")),
    "niah_single_3": (128, partial(Needles, haystack="essay", value="uuid")),
    "niah_multikey_1": (128, partial(Needles, haystack="essay", keys=4)),
    "niah_multikey_2": (128, partial(Needles, haystack="needle")),
    "niah_multikey_3": (128, partial(Needles, haystack="needle", key="uuid", value="uuid")),
    "niah_multivalue": (128, partial(Needles, haystack="essay", values=4)),
    "niah_multiquery": (128, partial(Needles, haystack="essay", queries=4)),
    "vt": (30, Tracking),
    "cwe": (120, CommonWords),
    "fwe": (50, FrequentWords),
    "qa_1": (32, partial(Questions, dataset="squad")),
    "qa_2": (32, partial(Questions, dataset="hotpotqa")),
}
TASKS: tuple[RulerTask, ...] = tuple(
    make(name=f"ruler/{name}", max_new_tokens=new, file=f"4096/{name}.jsonl") for name, (new, make) in _TASKS.items()
)
