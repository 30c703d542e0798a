"""RULER's thirteen tasks (arXiv 2404.06654), generated for any tokenizer and any length."""

from __future__ import annotations

from typing import Any

from locret.data.tasks.ruler import lists
from locret.data.tasks.ruler.needles import needles
from locret.data.tasks.ruler.questions import questions
from locret.data.tasks.ruler.task import RulerTask

__all__ = ["TASKS", "RulerTask"]

_NIAH: dict[str, Any] = {"max_new_tokens": 128, "unit": 25}
_ESSAY: dict[str, Any] = {**_NIAH, "own": "filler"}
_QA: dict[str, Any] = {"max_new_tokens": 32, "unit": 150, "every": False, "metric": "string match, part"}
# In the order of the report.
_TASKS: dict[str, dict[str, Any]] = {
    "niah_single_1": {**_NIAH, "drafter": needles("noise")},
    "niah_single_2": {**_ESSAY, "drafter": needles("essay")},
    "niah_single_3": {**_ESSAY, "drafter": needles("essay", value="uuid")},
    "niah_multikey_1": {**_ESSAY, "drafter": needles("essay", keys=4)},
    "niah_multikey_2": {**_NIAH, "drafter": needles("needle")},
    "niah_multikey_3": {**_NIAH, "drafter": needles("needle", key="uuid", value="uuid")},
    "niah_multivalue": {**_ESSAY, "drafter": needles("essay", values=4)},
    "niah_multiquery": {**_ESSAY, "drafter": needles("essay", queries=4)},
    "vt": {"max_new_tokens": 30, "unit": 25, "least": lists.HOPS + 2, "drafter": lists.tracking},
    "cwe": {
        **{"max_new_tokens": 120, "unit": 15, "least": lists.LEAST, "drafter": lists.common_words},
        "own": "own words",
    },
    "fwe": {"max_new_tokens": 50, "unit": 5, "least": 60, "drafter": lists.frequent_words},
    "qa_1": {**_QA, "drafter": questions("squad")},
    "qa_2": {**_QA, "drafter": questions("hotpotqa")},
}
TASKS: tuple[RulerTask, ...] = tuple(
    RulerTask(name=f"ruler/{name}", file=f"4096/{name}.jsonl", **{"metric": "string match, all", **facts})
    for name, facts in _TASKS.items()
)
