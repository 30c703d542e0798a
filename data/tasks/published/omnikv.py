"""OmniKV's tasks: 2StageRetr (add two numbers, then look the sum up in a dictionary of colours), and multi-step asking.

Paper:     OmniKV (ICLR 2025), Section 5 and Table 6.
Source:    antgroup/OmniKV: tiny_runs/make_2_stage_questions.py (sizes, prompt and the 23 colours),
           benchmark/long_bench/cot_pred.py, configs/template_for_chat.py; rows of LongBench, and of 2StageRetr.
Fields:    prompt, answers (one colour); of questions those of LongBench.
Metric:    an answer counts if it contains a reference, in any case; not LongBench's F1.
Deviates:  own random streams. The prompt limit belongs to the model: `limit`, none by default.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from locret.data.tasks.metrics.retrieval import any_contained
from locret.data.tasks.published.base import Making, PublishedTask, RowMaker, over, prompts_of
from locret.data.tasks.published.longbench import SOURCE, rows_of
from locret.data.tasks.rows import Row
from locret.data.tasks.task import Sample

SIZES = (40, 50, 60, 70, 80, 90, 100, 140, 180, 200)
"""Entries of the published rows, in turn."""
_COLORS = (
    "red green blue yellow orange purple pink brown black white gray cyan magenta lime maroon navy olive teal violet "
    "indigo gold silver beige"
)
COLORS = _COLORS.split()
_PROMPTS: dict[str, Any] = prompts_of("omnikv")
_YI_TOKENS = 50
"""The longest answer to 2StageRetr that Yi may give."""


@dataclass(frozen=True, kw_only=True)
class TwoStageTask(RowMaker):
    """The one task of 2StageRetr; guessing scores 1/23."""

    def system_turn(self) -> str:
        """Return the system turn that a prompt begins with; empty if it has none."""
        return ""

    def maker(self, of: Making) -> Callable[[int], dict[str, Any]]:
        """Return what makes row `index`; without a length sizes are the published ones. No source texts are needed."""
        if of.tokens is None:
            return lambda index: _row(self.stream(of, index), index, SIZES[index % len(SIZES)])
        return self.filled(of, _row, guess=SIZES[0], system=self.system_turn())

    def read(self, row: Row) -> list[Sample]:
        """Return the sample of a row."""
        return [self.sample_of(row, row.text("prompt"), "", "", row.texts("answers"), span=(0, 0))]


def _row(rng: random.Random, index: int, size: int) -> dict[str, Any]:
    colors = dict(enumerate(rng.choices(COLORS, k=size)))
    total = rng.randrange(size)
    first = rng.randint(0, total)
    return {
        "prompt": _PROMPTS["two_stage"].format(entries=colors, first=first, second=total - first),
        "answers": [colors[total]],
    }


@dataclass(frozen=True, kw_only=True)
class Steps(PublishedTask):
    """A question of LongBench over several passages that is answered step by step."""

    settable: ClassVar[tuple[str, ...]] = (*PublishedTask.settable, "cot", "style")

    cot: bool = True
    """Whether the model is led into steps; else it answers at once."""
    style: Literal["chat", "yi"] = "chat"
    """chat: the backbone's chat template, as for Llama; yi: the text that Yi-9B was given to complete, whose answers to
    2StageRetr have 50 tokens."""

    def __post_init__(self) -> None:
        if self.style == "yi":
            object.__setattr__(self, "chat", False)

    def system_turn(self) -> str:
        """Return the system turn that a prompt begins with; Yi has none."""
        return "" if self.style == "yi" else _PROMPTS["system"] if self.cot else _PROMPTS["system"].rstrip()

    def put(self, sample: Sample, lead: str, yi: str) -> Sample:
        """Return a sample with its system turn, or Yi's words before it, and what is put into the model's mouth."""
        if self.style == "chat":
            return replace(sample, system=self.system_turn(), lead=lead)
        head = yi if self.cot else _PROMPTS["yi_at_once"]
        start, end = (len(head) + edge if sample.document else 0 for edge in sample.span)
        return replace(sample, content=head + sample.content, lead=lead, span=(start, end))

    def read(self, row: Row) -> list[Sample]:
        """Return the sample of a row."""
        own, (before, after) = _PROMPTS, _PROMPTS["question"]
        after = after.format(input=row.text("input"))
        sample = self.sample_of(row, before, row.text("context"), after, row.texts("answers"))
        return [self.put(sample, own["leads"][self.style] if self.cot else "", own["yi"] + own["yi_short"])]


@dataclass(frozen=True, kw_only=True)
class TwoStageSteps(Steps, TwoStageTask):
    """2StageRetr, with its lead, or asked for the colour at once without steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style == "yi":
            object.__setattr__(self, "max_new_tokens", min(self.max_new_tokens, _YI_TOKENS))

    def read(self, row: Row) -> list[Sample]:
        """Return the sample of a row."""
        (sample,) = TwoStageTask.read(self, row)
        own, content = _PROMPTS, sample.content
        if not self.cot:
            content = content.replace(own["steps"], own["no_steps"])
        lead = own["two_stage_leads"][self.style] if self.cot else own["direct"]
        return [self.put(replace(sample, content=content), lead, own["yi"])]


_SCORED: dict[str, Any] = {"metric": "string match, any", "max_new_tokens": 200, "scored": over(any_contained)}
_TWO_STAGE: dict[str, Any] = {"source": "2StageRetr (OmniKV, ICLR 2025), antgroup/OmniKV", "file": "2stage.jsonl"}
TASKS: tuple[PublishedTask, ...] = (
    TwoStageTask(name="twostage/2stage", **_TWO_STAGE, **_SCORED),
    *(
        Steps(name=f"multistep/{name}", source=f"{SOURCE}, as OmniKV asks it step by step", **rows_of(name), **_SCORED)
        for name in ("2wikimqa", "hotpotqa")
    ),
    TwoStageSteps(name="multistep/2stage", **_TWO_STAGE, **_SCORED),
)
