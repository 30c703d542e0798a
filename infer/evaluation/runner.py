"""One engine for all methods: the same prompt, the same budget, greedy decoding, and everything counted."""
# N prompt tokens

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby, product
from typing import Any

import torch

from locret.backbone.adapters import input_device, ranks_of
from locret.base import method_spec
from locret.data.tasks import Sample, Task
from locret.data.tasks.prompts import BuiltPrompt, build_prompt
from locret.data.tasks.task import SampleSet, Selection
from locret.infer.evaluation.allotment import Allotment
from locret.infer.evaluation.answering import answer, answers, answers_on_forks
from locret.infer.evaluation.methods import ORACLE, Prompt, Setup
from locret.infer.evaluation.records import AGNOSTIC, AWARE, key
from locret.infer.evaluation.sessions import answer_conversation, answer_turns, until
from locret.infer.evaluation.shared_text import SharedText
from locret.infer.methods import Method
from locret.policy.policy import RetentionPolicy

_ALWAYS = ("budget", "chunk_size", "stabilizers", "local_len")
# What options and modifiers may change besides; recorded where it is not the default.
_USUAL = {f.name: f.default for f in fields(RetentionPolicy) if f.name not in _ALWAYS}


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
    """Whether the question stands in the prompt while that is read, one of `protocols.PROTOCOLS`."""

    def policy_of(self, tokens: int) -> RetentionPolicy | None:
        """Return the policy of a prompt of so many tokens."""
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
        # What lies at the depth that was chosen answers the first question.
        depth = None if self.question else self.task.depth(self.index, len(self.samples.chosen))
        return {
            "task": self.task.name,
            "version": self.task.version,
            "tokens": self.tokens,
            "index": self.index,
            **({} if self.question is None else {"question": self.question}),
            **({} if depth is None else {"depth": depth}),
            "seed": self.seed,
        }

    def sample(self, tokenizer: Any) -> Sample:
        """Return the sample, asking the case's question."""
        sample = self.samples.sample(self.number, tokenizer)
        return sample if self.question is None or not sample.asked else sample.asking(sample.asked[self.question])

    def built(self, tokenizer: Any, sample: Sample) -> BuiltPrompt:
        """Return the sample's prompt, truncated and framed as the task's protocol says.

        Raises:
            ValueError: If the tokenizer has no chat template, or the prompt cannot be cut.
        """
        return build_prompt(self.task, sample, tokenizer, template=self.template)


def plan_runs(
    methods: Sequence[Method],
    allotments: Sequence[Allotment],
    tokens: int = 1,
    chosen: Collection[str] = (),
    protocols: Sequence[str] = (AWARE,),
) -> list[Run]:
    """Return the runs of every sample; what keeps every unit is run once per protocol, whatever the budgets.

    Args:
        methods: The methods.
        allotments: How much of a prompt stays.
        tokens: Of the longest prompt; matters for shares alone.
        chosen: Names of the numbers that the user set.
        protocols: What is known of the question while a text is read.
    """
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
    """Return all samples, task by task and length by length; texts that are made here are always chat turns.

    Args:
        selections: What is asked of each task.
        seed: Of the samples.
        template: How other chat turns become text.
        questions: Most questions of each text, else what the task says; how many it has is known when it is made, see
            `settled`.
    """
    return [
        Case(samples, one.task, number, index, tokens, seed, "chat" if one.task.pictured else template, question)
        for one in selections
        for several in (one.task.questions if questions is None else questions,)
        for tokens, samples in one.samples.items()
        for index, number in enumerate(samples.chosen)
        for question in ([None] if several is None else range(several))
    ]


def texts_of(cases: Iterable[Case]) -> list[list[Case]]:
    """Return the cases of each text, which stand side by side."""
    return [list(group) for _, group in groupby(cases, key=lambda case: case.text)]


def settled(cases: Iterable[Case], tokenizer: Any) -> tuple[list[Case], list[Unmade]]:
    """Make all texts that an evaluation needs, before it begins; rows of a file are left for it to read.

    Returns:
        The cases that can be asked, and what could not be made, a task and length each.

    Raises:
        ValueError: If a row of a file, or the tokenizer, is unfit.
    """
    found, unmade = list[Case](), dict[tuple[str, int], Unmade]()
    for group in texts_of(cases):
        first = group[0]
        if first.text[:2] in unmade or not (first.samples.made or first.question is not None):
            found += [] if first.text[:2] in unmade else group
            continue
        try:
            sample = first.sample(tokenizer)
            first.built(tokenizer, sample)
        except ValueError as error:
            if not first.samples.made:
                raise
            unmade[first.text[:2]] = Unmade(first.task.name, first.tokens, first.index, str(error))
            found = [case for case in found if case.text[:2] not in unmade]
            continue
        found += [case for case in group if not case.question or case.question < len(sample.asked)]
    return found, list(unmade.values())


@dataclass(frozen=True)
class Unmade:
    """A task that cannot be made at a length."""

    task: str
    tokens: int
    index: int
    """Of the first sample that cannot be made."""
    reason: str

    def __str__(self) -> str:
        return f"sample {self.index} of {self.task} cannot be made at {self.tokens:,} tokens: {self.reason}"


def blocks_of(cases: Iterable[Case], batch: int = 1) -> list[list[Case]]:
    """Return the cases in blocks of whole texts of one task and length, as few as fill a batch of answers.

    What is answered side by side follows from the plan alone, so that a run that goes on answers like one that was
    not interrupted.
    """
    blocks = list[list[Case]]()
    for text in texts_of(cases):
        last = blocks[-1] if blocks else []
        if last and len(last) < batch and last[0].text[:2] == text[0].text[:2]:
            last += text
        else:
            blocks.append(list(text))
    return blocks


def evaluate(
    setup: Setup, cases: Iterable[Case], runs: Sequence[Run], done: set[Any], batch: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield the record of every run that is not done yet; each sample is written and tokenised once.

    Args:
        setup: The backbone, and what scorers are made from.
        cases: What is asked, in whole blocks (see `blocks_of`).
        runs: How it is read.
        done: Keys of the records that there are.
        batch: Most answers that are written side by side.

    Raises:
        ValueError: If a row of a file, or the tokenizer, is unfit, or a sample cannot be made (see `settled`).
    """
    ranks = ranks_of(setup.model)
    shared = {} if ranks is None else {"kv_ranks": ranks.size}
    for block in blocks_of(cases, batch):
        missing = [(case, [run for run in runs if key(case.axes | run.axes) not in done]) for case in block]
        if any(own for _, own in missing):
            # What is written side by side is written again as a whole.
            again = missing if batch > 1 else [(case, own) for case, own in missing if own]
            for record in _answers_about(setup, again, runs, batch):
                if key(record) not in done:
                    yield {**record, **shared}


Asked = tuple[Case, list[Run], Prompt, dict[str, Any]]
"""A question, the runs that have not answered it, its prompt, and facts of its row."""


def _answers_about(
    setup: Setup, missing: Sequence[tuple[Case, list[Run]]], runs: Sequence[Run], batch: int
) -> Iterator[dict[str, Any]]:
    """Yield the records of a block's questions, each with the runs that are missing, and those answered beside them."""
    texts = list[list[Asked]]()
    for group in (list(group) for _, group in groupby(missing, key=lambda one: one[0].text)):
        text, asked = None, list[Asked]()
        for case, own in group:
            prompt, facts = ask(setup, case, text)
            text = prompt.text
            asked.append((case, own, prompt, facts))
        texts.append(asked)
    every = [one for asked in texts for one in asked]
    for first in range(0, len(every), batch):
        together = every[first : first + batch]
        for run in runs:
            if run.protocol == AWARE:
                yield from _answers_at_once(_wanting(together, run, batch), run, batch)
            elif _knows_the_answer(run):
                yield from _answers_later(setup, [[one] for one in _wanting(together, run, batch)], run, batch)
        for _, _, prompt, _ in together:
            prompt.forget()
    for run in runs:
        if run.protocol == AGNOSTIC and not _knows_the_answer(run):
            whole = _wanting(every, run, batch) is every
            asked_of = [asked if whole else _wanting(asked, run, 1) for asked in texts]
            yield from _answers_later(setup, [asked for asked in asked_of if asked], run, batch)


def _wanting(asked: Sequence[Asked], run: Run, batch: int) -> Sequence[Asked]:
    """Return the questions that a run has not answered, or all where one is answered beside the others."""
    wanting = [one for one in asked if run in one[1]]
    return asked if wanting and batch > 1 else wanting


def _knows_the_answer(run: Run) -> bool:
    """Return whether a method reads a document for one question; the labels of one prompt at a time fit in memory."""
    return method_spec.parse(run.method.name).name == ORACLE


def _answers_at_once(asked: Sequence[Asked], run: Run, batch: int) -> Iterator[dict[str, Any]]:
    """Yield the records of questions that stand in their prompts."""
    if not asked:
        return
    task, prompts = asked[0][0].task, [one[2] for one in asked]
    if batch == 1 or prompts[0].sample.turns:
        found: Iterable[dict[str, Any]] = (_answered(prompt, run, task) for prompt in prompts)
    else:
        found = (
            _finished(prompt, run, task, measured)
            for prompt, measured in zip(prompts, answers(prompts, run, task, batch), strict=True)
        )
    for (case, _, prompt, facts), measured in zip(asked, found, strict=True):
        yield _record(case, run, prompt, facts, measured)


def _answers_later(setup: Setup, texts: Sequence[Sequence[Asked]], run: Run, batch: int) -> Iterator[dict[str, Any]]:
    """Yield the records of questions that come when their text has been read."""
    if not texts:
        return
    task, prompts = texts[0][0][0].task, [[one[2] for one in asked] for asked in texts]
    found = answers_on_forks(prompts, run, task, batch)
    for (case, _, prompt, facts), measured in zip((one for asked in texts for one in asked), found, strict=True):
        facts = {**facts, "document_tokens": _document(prompt)}
        yield _record(case, run, prompt, facts, _finished(prompt, run, task, measured))


def _document(prompt: Prompt) -> int:
    assert prompt.text is not None
    return prompt.text.document


def _record(case: Case, run: Run, prompt: Prompt, facts: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    tokens, compared = prompt.ids_1N.shape[1], case.task.compares
    return {
        **case.axes,
        **run.axes,
        **run.resolved(facts.get("document_tokens", tokens)),
        **facts,
        "prompt_tokens": tokens,
        "prompt_sha256": hashlib.sha256(prompt.ids_1N.cpu().numpy().tobytes()).hexdigest(),
        "targets": list(prompt.sample.targets),
        **({"compared": {name: getattr(prompt.sample, name) for name in compared}} if compared else {}),
        "score": case.task.score(measured["prediction"], prompt.sample),
        **measured,
    }


def ask(setup: Setup, case: Case, text: SharedText | None = None) -> tuple[Prompt, dict[str, Any]]:
    """Return a case's prompt on the backbone's device, and what its record says of the row it comes from.

    Args:
        setup: The backbone and its tokenizer.
        case: What is asked.
        text: What is known of its text from another case.

    Raises:
        ValueError: If a row or the tokenizer is unfit.
    """
    sample = case.sample(setup.tokenizer)
    built = case.built(setup.tokenizer, sample)
    facts: dict[str, Any] = {}
    if sample.id:
        facts = {"item": sample.id, "tokens_before": built.tokens_before, "tokens_after": built.tokens_after}
        facts |= {"depth": sample.depths[0]} if sample.depths else {}
    text = text or SharedText(setup, case.task, sample, case.template)
    return Prompt(torch.tensor([built.ids], device=input_device(setup.model)), sample, setup, text), facts


def _answered(prompt: Prompt, run: Run, task: Task) -> dict[str, Any]:
    if prompt.sample.turns and prompt.sample.choices:
        return answer_turns(prompt, run, task)
    if prompt.sample.turns:
        return answer_conversation(prompt, run, task)
    return _finished(prompt, run, task, _once(prompt, run, task))


def _once(prompt: Prompt, run: Run, task: Task) -> dict[str, Any]:
    return answer(prompt, run, task.max_new_tokens, task.stop, task.min_new_tokens)


def _finished(prompt: Prompt, run: Run, task: Task, measured: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured, with the answer as the task's stop texts leave it, or the one to a second prompt."""
    measured = {**measured, "prediction": until(measured["prediction"], task.stop)}
    second = task.follow_up(prompt.sample, measured["prediction"])
    if second is None:
        return measured
    sample, new_tokens = second
    template = "chat" if prompt.text is None else prompt.text.template
    built = build_prompt(task, sample, prompt.setup.tokenizer, template=template)
    ids_1N = torch.tensor([built.ids], device=input_device(prompt.setup.model))
    then = _once(Prompt(ids_1N, sample, prompt.setup, second=True), run, replace(task, max_new_tokens=new_tokens))
    spent = {name: measured[name] + then[name] for name in ("generated_tokens", "prefill_seconds", "decode_seconds")}
    return {**measured, **spent, "thought": measured["prediction"], "prediction": then["prediction"]}
