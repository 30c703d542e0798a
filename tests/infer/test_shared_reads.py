"""Questions of one text: they share what is left of it, hold no labels of each other, and lose no setting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret import RetentionPolicy
from locret.data import tasks
from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.task import Sample, Wanted
from locret.infer.evaluation import methods, runner
from locret.infer.evaluation.methods import Prompt, Setup
from locret.infer.evaluation.records import AGNOSTIC, AWARE
from locret.infer.evaluation.shared_text import SharedText, document_tokens

POLICY = RetentionPolicy(budget=48, chunk_size=64, stabilizers=8, local_len=8)
QUESTIONS = ("Which number?", "Which number is in the red vault that was named in the text before?", "Which?")


@pytest.fixture(scope="module")
def setup(backbone: Path) -> Setup:
    """Return the random backbone."""
    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    return Setup(model, AutoTokenizer.from_pretrained(backbone), None, 0)


def long_text(setup: Setup, name: str) -> Sample:
    document = tasks.get("multikey").sample(setup.tokenizer, 600, seed=5).document
    if name.startswith("scbench"):
        turns = [{"input": text, "answer": "1"} for text in QUESTIONS]
        rows: list[dict[str, Any]] = [{"context": document, "multi_turns": turns}]
    else:
        rows = [{"context": document, "question": text, "answer": "1"} for text in QUESTIONS]
    task = tasks.get(name)
    entries = [SimpleNamespace(number=n, where="row", load=lambda row=row: row) for n, row in enumerate(rows)]
    (sample,) = task.items(entries)
    return sample


@pytest.mark.parametrize("name", ["scbench/kv_requests", "loogle/longdep_qa"])
@pytest.mark.parametrize("bound", [None, 301])
def test_all_questions_find_the_same_part_of_a_text_that_is_too_long(
    name: str, bound: int | None, setup: Setup
) -> None:
    sample, task = long_text(setup, name), replace(tasks.get(name), limit=301, bound=bound)
    assert len(sample.asked) == len(QUESTIONS)
    text = SharedText(setup, task, sample)
    built = [build_prompt(task, sample.asking(question), setup.tokenizer) for question in sample.asked]
    assert all(one.truncated for one in built)
    documents = {tuple(one.ids[: text.document]) for one in built}
    assert len(documents) == 1
    assert text.document > 200
    for question, one in zip(sample.asked, built, strict=True):
        rest = setup.tokenizer.decode(one.ids[text.document :], clean_up_tokenization_spaces=False)
        assert question.text.strip() in rest
        assert len(one.ids) <= 301 or bound is None
    assert max(one.tokens_after for one in built) <= 301


@pytest.mark.parametrize("name", ["qa3", "qa5", "qa7", "qa8"])
def test_a_question_that_an_example_asks_as_well_comes_after_its_document(name: str, setup: Setup) -> None:
    asked = {
        "qa3": ("Where was the apple before the kitchen?", "bathroom"),
        "qa5": ("Who gave the football?", "Jeff"),
        "qa7": ("How many objects is Daniel carrying?", "one"),
        "qa8": ("What is Mary carrying?", "milk"),
    }
    question, target = asked[name]
    task = tasks.get(f"babilong/{name}")
    (sample,) = task.read(0, "row", {"input": "Mary went away.", "question": question, "target": target})
    assert question in sample.content[: sample.span[0]]
    built = build_prompt(task, sample, setup.tokenizer)
    assert 0 < document_tokens(setup.tokenizer, task, sample, built) < len(built.ids)


@pytest.mark.parametrize("name", ["oracle", "oracle_agnostic"])
def test_no_more_than_one_question_holds_its_labels(name: str, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Prompt] = []
    ask = runner.ask

    def noted(*given: Any) -> Any:
        prompt, facts = ask(*given)
        made.append(prompt)
        return prompt, facts

    monkeypatch.setattr(runner, "ask", noted)
    task = replace(tasks.get("multikey"), max_new_tokens=1)
    places = runner.plan_cases([task.select(Wanted(tokenizer=lambda: None, lengths=[400], samples=1))], 0, questions=4)
    places, _ = runner.settled(places, setup.tokenizer)
    runs = runner.plan_runs([methods.get(name)], [runner.Allotment(POLICY.to_dict())], protocols=[AWARE, AGNOSTIC])
    held = [sum(one._labels is not None for one in made) for _ in runner.evaluate(setup, places, runs, set())]
    assert len(held) == 8
    assert max(held) == 1
