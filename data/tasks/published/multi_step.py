"""OmniKV's multi-step tasks: 2WikiMQA, HotpotQA and 2StageRetr, answered step by step.

Paper:     OmniKV (ICLR 2025), Section 5 and Table 6.
Source:    antgroup/OmniKV: benchmark/long_bench/cot_pred.py, configs/template_for_chat.py; rows of LongBench, and of
           2StageRetr.
Metric:    an answer counts if it contains a reference, in any case; not LongBench's F1.
Deviates:  the prompt limit belongs to the model: `limit`, none by default. Rows of 2StageRetr that are made here have
           their own random streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from locret.data.tasks.metrics.retrieval import any_contained
from locret.data.tasks.published.base import PublishedTask
from locret.data.tasks.published.omnikv import TwoStageTask
from locret.data.tasks.task import Sample
from locret.data.training.json_rows import text_of, texts_of

_QUESTION = (
    "Answer the question based on the given passages. \n\nThe following are given passages.\n",
    "\n\nAnswer the question based on the given passages. \n\nQuestion: {input}\n",
)
_SYSTEM = "You are a helpful assistant. "
_YI, _AT_ONCE = "You are helpful assistant who thinks step by step.\n", "You are helpful assistant.\n"
_YI_SHORT = "You will give your final answer in less than 80 words.\n"
_STEPS = "MUST first output the result of the addition, and then answer the corresponding value based on the result."
_NO_STEPS = "Directly answer the corresponding color based on the equation result."
_DIRECT = (
    "The equation result should be used as a key to find the value in the dictionary.\n"
    "Then, i will directly give the color. The corresponding color is"
)
_LEADS = {
    "chat": "Evidence (step by step) then answer: 1.",
    "yi": "\nEvidence (less than 5 steps) then final answer: Step 1:",
}
_TWO_STAGE_LEADS = {
    "chat": (
        "First, for a precise answer, we can break down this multi-hop question into two to four sub-questions, as "
        "follows:"
    ),
    "yi": "\n\nFirst, addition result is",
}
_YI_TOKENS = 50
"""The longest answer to 2StageRetr that Yi may give."""


@dataclass(frozen=True, kw_only=True)
class Steps(PublishedTask):
    """A question that is answered step by step."""

    settable: ClassVar[tuple[str, ...]] = (*PublishedTask.settable, "cot", "style")

    cot: bool = True
    """Whether the model is led into steps; else it answers at once."""
    style: str = "chat"
    """chat: the backbone's chat template, as for Llama; yi: the text that Yi-9B was given to complete, whose answers to
    2StageRetr have 50 tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("style", tuple(_LEADS))
        if self.style == "yi":
            object.__setattr__(self, "chat", False)

    def system_turn(self) -> str:
        """Return the system turn that a prompt begins with; Yi has none."""
        return "" if self.style == "yi" else _SYSTEM if self.cot else _SYSTEM.rstrip()

    def put(self, sample: Sample, lead: str, yi: str) -> Sample:
        """Return a sample with its system turn, or Yi's words before it, and what is put into the model's mouth."""
        if self.style == "chat":
            return replace(sample, system=self.system_turn(), lead=lead)
        head = yi if self.cot else _AT_ONCE
        start, end = (len(head) + edge if sample.document else 0 for edge in sample.span)
        return replace(sample, content=head + sample.content, lead=lead, span=(start, end))

    def score(self, prediction: str, sample: Sample) -> float:
        """Return 1 if a reference is in the answer, in any case."""
        return any_contained(prediction, sample.targets)


@dataclass(frozen=True, kw_only=True)
class QuestionSteps(Steps):
    """A question of LongBench over several passages."""

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row."""
        context, targets = text_of(record, where, "context"), texts_of(record, where, "answers")
        tail = _QUESTION[1].format(input=text_of(record, where, "input"))
        sample = self.sample_of(index, _QUESTION[0], context, tail, targets)
        return [self.put(sample, _LEADS[self.style] if self.cot else "", _YI + _YI_SHORT)]


@dataclass(frozen=True, kw_only=True)
class TwoStageSteps(Steps, TwoStageTask):
    """2StageRetr, asked for the colour at once without steps."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style == "yi":
            object.__setattr__(self, "max_new_tokens", min(self.max_new_tokens, _YI_TOKENS))

    def read(self, index: int, where: str, record: Mapping[str, Any]) -> list[Sample]:
        """Return the sample of a row."""
        (sample,) = TwoStageTask.read(self, index, where, record)
        content = sample.content if self.cot else sample.content.replace(_STEPS, _NO_STEPS)
        lead = _TWO_STAGE_LEADS[self.style] if self.cot else _DIRECT
        return [self.put(replace(sample, content=content), lead, _YI)]


_FACTS: dict[str, Any] = {"metric": "string match, any", "max_new_tokens": 200}
TASKS: tuple[PublishedTask, ...] = (
    *(
        QuestionSteps(
            name=f"multistep/{name}",
            source="LongBench, arXiv 2308.14508, as OmniKV asks it step by step",
            truncation="middle",
            reencode=True,
            file=f"data/{name}.jsonl",
            hub_file=f"data.zip!data/{name}.jsonl",
            repo="zai-org/LongBench",
            revision="5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
            size=200,
            **_FACTS,
        )
        for name in ("2wikimqa", "hotpotqa")
    ),
    TwoStageSteps(
        name="multistep/2stage",
        source="2StageRetr (OmniKV, ICLR 2025), antgroup/OmniKV",
        file="2stage.jsonl",
        **_FACTS,
    ),
)
