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
from locret.infer.evaluation import methods, presses, runner
from locret.infer.evaluation.methods import Prompt, Setup
from locret.infer.evaluation.protocols import AGNOSTIC, AWARE
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


def pressing(asked: list[dict[str, Any]]) -> presses.Presses:
    """Return what notes what kvpress is asked, and answers at once."""

    def answered(_do: str, **request: Any) -> dict[str, Any]:
        asked.append(request)
        read = {"kept_units": {"held": 1.0, "attended": 1.0}, "cache_bytes": 1, "peak_bytes": 1, "prefill_seconds": 0.0}
        return {**read, "answers": [{"ids": [5], "prefill_seconds": 0.0, "decode_seconds": 0.0, "bytes": 1}]}

    side = presses.Presses("python", "backbone", 1, "float32", "cpu")
    side.__dict__ |= {"versions": {"kvpress": "0"}, "_process": SimpleNamespace(ask=answered)}
    return side


@pytest.mark.parametrize("protocol", [AWARE, AGNOSTIC])
def test_a_press_keeps_its_share_of_each_text(protocol: str, setup: Setup) -> None:
    shared = runner.Allotment({"chunk_size": 64, "local_len": 8}, share=0.25)
    (run,) = runner.plan_runs([methods.get("kvpress/knorm")], [shared], 4000, ("local_len",), [protocol])
    asked: list[dict[str, Any]] = []
    prompt = Prompt(torch.arange(5, 405)[None], Sample(content="x", targets=("1",), reply="1"), setup)
    list(pressing(asked).answers([prompt], None if protocol == AWARE else 360, run, tasks.get("multikey")))
    assert asked[0]["keep"] == (100 if protocol == AWARE else 90 + 8)


def test_a_press_is_asked_once_whatever_the_chunks_of_the_others() -> None:
    chunks = [{"budget": budget, "chunk_size": size, "local_len": 8} for budget in (16, 32) for size in (64, 128)]
    named = [methods.get("random"), methods.get("kvpress/knorm")]
    runs = runner.plan_runs(named, [runner.Allotment(one) for one in chunks], 4000, ("local_len",))
    assert [run.method.name for run in runs] == ["random"] * 4 + ["kvpress/knorm"] * 2
    assert [run.axes["budget"] for run in runs[4:]] == [16, 32]


@pytest.mark.parametrize("tokens", [3, 40, 64, 65, 66, 67])
def test_a_press_reads_the_beginning_of_a_text_that_ends_in_what_stays(tokens: int, setup: Setup) -> None:
    allotment = runner.Allotment({"budget": 16, "chunk_size": 64, "local_len": 64})
    (run,) = runner.plan_runs([methods.get("kvpress/snapkv")], [allotment], 4000, ("local_len",), [AWARE])
    asked: list[dict[str, Any]] = []
    ids = torch.arange(5, 5 + tokens)
    prompt = Prompt(ids[None], Sample(content="x", targets=("1",), reply="1"), setup)
    (answer,) = pressing(asked).answers([prompt], None, run, tasks.get("multikey"))
    (request,) = asked
    assert [*request["context"], *request["asked"][0]] == ids.tolist()
    assert len(request["context"]) == max(tokens - 64, 2)
    assert 1 <= request["window"] < len(request["context"])
    assert answer["kept_units"] == 1 + len(request["asked"][0])
