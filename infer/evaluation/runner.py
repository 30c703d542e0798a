"""One engine for all methods: the same prompt, the same budget, greedy decoding, and everything counted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from locret.backbone.adapters import input_device, ranks_of
from locret.infer.evaluation.answering import answer, answers_on_forks
from locret.infer.evaluation.methods import ORACLE, Prompt, Setup, SharedText, rule
from locret.infer.evaluation.plan import Case, Run, texts_of
from locret.infer.evaluation.records import AWARE, key
from locret.infer.evaluation.sessions import answer_conversation, answer_turns


def evaluate(setup: Setup, cases: Iterable[Case], runs: Sequence[Run], done: set[Any]) -> Iterator[dict[str, Any]]:
    """Yield the record of every run that is not done yet; each sample is written and tokenised once."""
    ranks = ranks_of(setup.model)
    shared = {} if ranks is None else {"kv_ranks": ranks.size}
    for group in texts_of(cases):
        missing = [(case, [run for run in runs if key(case.axes | run.axes) not in done]) for case in group]
        for record in _answers_about(setup, [(case, own) for case, own in missing if own], runs):
            yield {**record, **shared}


def _answers_about(
    setup: Setup, missing: Sequence[tuple[Case, list[Run]]], runs: Sequence[Run]
) -> Iterator[dict[str, Any]]:
    """Yield the records of a text's questions, each with the runs that are missing."""
    text, asked = None, list[tuple[Case, list[Run], Prompt, dict[str, Any]]]()
    for case, own in missing:
        prompt, facts = ask(setup, case, text)
        text = prompt.text
        asked.append((case, own, prompt, facts))
    for case, own, prompt, facts in asked:
        for run in own:
            if run.protocol == AWARE:
                yield _record(case, run, prompt, facts, _answered(prompt, run))
            elif rule(run.method) == ORACLE:  # it reads the document for one question
                yield _later(case, run, prompt, facts, next(answers_on_forks([prompt], run)))
        prompt.forget()
    for run in runs:
        own_of = [(case, prompt, facts) for case, own, prompt, facts in asked if run in own]
        if run.protocol != AWARE and rule(run.method) != ORACLE and own_of:
            found = answers_on_forks([prompt for _, prompt, _ in own_of], run)
            for (case, prompt, facts), measured in zip(own_of, found, strict=True):
                yield _later(case, run, prompt, facts, measured)


def _later(case: Case, run: Run, prompt: Prompt, facts: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    facts = {**facts, "document_tokens": prompt.text.document}
    return _record(case, run, prompt, facts, measured)


def _record(case: Case, run: Run, prompt: Prompt, facts: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    tokens = prompt.ids_1N.shape[1]
    return {
        **case.axes,
        **run.axes,
        **run.resolved(facts.get("document_tokens", tokens)),
        **facts,
        "prompt_tokens": tokens,
        "prompt_sha256": hashlib.sha256(prompt.ids_1N.cpu().numpy().tobytes()).hexdigest(),
        "targets": list(prompt.sample.targets),
        "score": case.task.score(measured["prediction"], prompt.sample),
        **measured,
    }


def ask(setup: Setup, case: Case, text: SharedText | None = None) -> tuple[Prompt, dict[str, Any]]:
    """Return a case's prompt on the backbone's device, and what its record says of the row it comes from."""
    sample = case.sample(setup.tokenizer)
    built = case.built(setup.tokenizer, sample)
    facts = {"item": sample.id, "tokens_before": built.tokens_before, "tokens_after": built.tokens_after}
    facts |= {"depth": sample.depths[0]} if len(sample.depths) == 1 else {}
    ids_1N = torch.tensor([built.ids], device=input_device(setup.model))
    return Prompt(ids_1N, sample, text or SharedText(setup, case.task, sample, case.template)), facts


def _answered(prompt: Prompt, run: Run) -> dict[str, Any]:
    if prompt.sample.turns:
        return (answer_turns if prompt.sample.choices else answer_conversation)(prompt, run)
    return answer(prompt, run)
