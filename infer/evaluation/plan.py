"""What an evaluation asks and how it reads: samples, ways of reading, and how much of a prompt stays in each."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, product
from typing import TYPE_CHECKING, Any

from locret.data.tasks import Sample, Task
from locret.data.tasks.prompts import BuiltPrompt, build_prompt
from locret.data.tasks.task import SampleSet, Selection
from locret.infer.evaluation.records import AWARE
from locret.policy.planned_bytes import units_of_share
from locret.policy.policy import RetentionPolicy
from locret.policy.resolve import resolve
from locret.policy.sizes import EVERY_UNIT

if TYPE_CHECKING:
    from locret.infer.methods import Method

_ALWAYS = ("budget", "chunk_size", "stabilizers", "local_len")
# What options and modifiers may change besides; recorded where it is not the default.
_USUAL = {f.name: f.default for f in fields(RetentionPolicy) if f.name not in _ALWAYS}


@dataclass(frozen=True)
class Allotment:
    """A policy as far as it is known without the prompt."""

    own: Mapping[str, Any]
    """Numbers that the user gave."""
    recommended: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of the heads."""
    share: float | None = None
    """Of a prompt's tokens that the budget is; None where `own` or `recommended` have the budget."""

    def policy(self, tokens: int) -> RetentionPolicy:
        own, wanted = dict(self.own), dict[str, tuple[int, int]]()
        if self.share is not None:
            own["budget"] = units_of_share(self.share, tokens)
            if (given := own.pop("stabilizers", None)) is not None:
                # Nobody knows the shortest prompt: its budget may be smaller than what is to be protected.
                wanted["stabilizers"] = given, EVERY_UNIT
        return resolve(own, self.recommended, wanted)

    def record(self) -> dict[str, Any]:
        """Return what was asked, as it stands in results.json."""
        if self.share is None:
            return self.policy(1).to_dict()
        following = {"budget": None, "stabilizers": self.own.get("stabilizers"), "local_len": self.own.get("local_len")}
        following |= {"chunk_size": self.own.get("chunk_size")}
        return {"budget_share": self.share, **self.policy(1).to_dict(), **following}


@dataclass(frozen=True)
class Run:
    """One method with one policy; the plain cache has none."""

    method: Method
    policy: RetentionPolicy | None
    """Of the longest prompt, where the budget is a share of each."""
    allotment: Allotment | None = field(default=None, compare=False)
    """Where the budget is a share."""
    chosen: Collection[str] = field(default=(), compare=False)
    """Names of the numbers that the user set."""
    asked: RetentionPolicy | None = field(default=None, compare=False)
    """The policy as it was before the method made its own of it, where that is not the same."""
    protocol: str = AWARE
    """Whether the question stands in the prompt while that is read."""

    def policy_of(self, tokens: int) -> RetentionPolicy | None:
        if self.allotment is None:
            return self.policy
        return self.method.policy(self.allotment.policy(tokens), self.chosen)

    @property
    def axes(self) -> dict[str, Any]:
        """The method and the numbers that vary, as they stand in a record; what follows the prompt is None."""
        policy, shared, asked = self.policy, self.allotment, self.asked or self.policy
        numbers: dict[str, Any] = {
            name: shared.own.get(name) if shared else asked and int(getattr(asked, name))
            for name in ("budget", "chunk_size", "stabilizers")
        }
        if self.method.keeps_all:
            numbers |= {"budget": None, "stabilizers": None}
        return {
            "method": self.method.name,
            "protocol": self.protocol,
            **numbers,
            **({"budget_share": shared.share} if shared else {}),
            **{name: getattr(policy, name) for name in _USUAL if policy and getattr(policy, name) != _USUAL[name]},
        }

    def resolved(self, tokens: int) -> dict[str, Any]:
        """Return what a record says besides of the policy of a prompt of so many tokens."""
        policy = self.policy_of(tokens)
        if self.allotment is None or policy is None:
            return {}
        return {"resolved": {name: int(getattr(policy, name)) for name in _ALWAYS}}


@dataclass(frozen=True)
class Case:
    """One sample that every run answers."""

    samples: SampleSet = field(compare=False, repr=False)
    task: Task
    number: int
    """Of the sample in its set."""
    index: int
    tokens: int
    """Most tokens of a prompt, or of prompt and answer together where rows have a length; 0 where nothing limits it."""
    seed: int
    template: str = "chat"
    question: int | None = None
    """Number of the question among all that the sample knows, where several are asked; None: the sample's own."""

    @property
    def text(self) -> tuple[str, int, int]:
        """What cases of one text have in common."""
        return self.task.name, self.tokens, self.number

    @property
    def axes(self) -> dict[str, Any]:
        """What tells the sample from others, as it stands in a record."""
        return {
            "task": self.task.name,
            "version": self.task.version,
            "tokens": self.tokens,
            "index": self.index,
            **({} if self.question is None else {"question": self.question}),
            "seed": self.seed,
        }

    def sample(self) -> Sample:
        """Return the sample, asking the case's question."""
        sample = self.samples.sample(self.number)
        return sample if self.question is None or not sample.asked else sample.asking(sample.asked[self.question])

    def built(self, tokenizer: Any, sample: Sample) -> BuiltPrompt:
        """Return the sample's prompt, truncated and framed as the task's protocol says."""
        return build_prompt(self.task, sample, tokenizer, template=self.template)


def plan_runs(
    methods: Sequence[Method],
    allotments: Sequence[Allotment],
    tokens: int = 1,
    chosen: Collection[str] = (),
    protocols: Sequence[str] = (AWARE,),
) -> list[Run]:
    """Return the runs of every sample; what keeps every unit is run once per protocol, whatever the budgets."""
    runs: list[Run] = []
    for protocol, method in product(protocols, methods):
        if method.plain:
            runs.append(Run(method, None, protocol=protocol))
            continue
        for one in allotments:
            asked = one.policy(tokens)
            shared = None if one.share is None or method.keeps_all else one
            adapted = None if method.adapt is None else asked
            runs.append(Run(method, method.policy(asked, chosen), shared, tuple(chosen), adapted, protocol))
    return [run for nth, run in enumerate(runs) if not (run.method.keeps_all and run in runs[:nth])]


def plan_cases(
    selections: Iterable[Selection], seed: int, template: str = "chat", questions: int | None = None
) -> list[Case]:
    """Return all samples, task by task and length by length."""
    return [
        Case(samples, one.task, number, index, tokens, seed, template, question)
        for one in selections
        for several in (one.task.questions if questions is None else questions,)
        for tokens, samples in one.samples.items()
        for index, number in enumerate(samples.chosen)
        for question in ([None] if several is None else range(several))
    ]


def texts_of(cases: Iterable[Case]) -> list[list[Case]]:
    """Return the cases of each text, which stand side by side."""
    return [list(group) for _, group in groupby(cases, key=lambda case: case.text)]


def settled(cases: Iterable[Case], tokenizer: Any) -> tuple[list[Case], dict[str, str]]:
    """Make the first text of each task and length, before an evaluation begins, and count the questions of all.

    Returns:
        The cases that can be asked, and what tasks cannot be made, with a sentence.
    """
    found, unmade = list[Case](), dict[str, str]()
    for (task, tokens), texts in groupby(texts_of(cases), key=lambda text: text[0].text[:2]):
        own = list(texts)
        try:
            own[0][0].built(tokenizer, own[0][0].sample())
        except ValueError as error:
            if not own[0][0].samples.made:
                raise
            unmade[task] = f"{task} cannot be made at {tokens:,} tokens: {error}"
            continue
        for text in own:
            asked = 1 if text[0].question is None else len(text[0].sample().asked)
            found += [case for case in text if not case.question or case.question < asked]
    return found, unmade
