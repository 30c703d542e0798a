"""A question known or unknown while its text is read: same prompts, one read for many questions, honest errors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_runs import cells, records
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill
from locret.cli.command import run
from locret.data import tasks
from locret.data.tasks.prompts import build_prompt
from locret.data.tasks.published import infinitebench
from locret.infer.evaluation import answering, methods, runner, summary
from locret.infer.evaluation.command import command
from locret.infer.evaluation.methods import Prompt, Setup
from locret.infer.evaluation.records import AGNOSTIC, AWARE
from locret.infer.evaluation.shared_text import SharedText, document_tokens

POLICY = RetentionPolicy(budget=48, chunk_size=64, stabilizers=8, local_len=8)
SMALL = ("--chunk-size", 64, "--stabilizers", 8, "--local-len", 8, "--threads", 1, "--figures", "none")
MULTIKEY = ("--tasks", "multikey", "--lengths", 400, "--samples", 2, "--budget", 48, "--max-new-tokens", 4, *SMALL)


@pytest.fixture(scope="module")
def setup(backbone: Path, heads: Path) -> Setup:
    """Return the random backbone with its untrained heads."""
    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    return Setup(model, AutoTokenizer.from_pretrained(backbone), RetainingHeads.from_pretrained(heads), 0)


@pytest.fixture
def asked(setup: Setup) -> Callable[..., list[Prompt]]:
    """Return a function that makes the prompts of some questions of one text."""

    def make(count: int = 3, tokens: int = 400) -> list[Prompt]:
        task = tasks.get("multikey")
        sample = task.sample(setup.tokenizer, tokens, seed=5)
        text = SharedText(setup, task, sample)
        those = [sample.asking(question) for question in sample.asked[:count]]
        built = [build_prompt(task, one, setup.tokenizer) for one in those]
        return [Prompt(torch.tensor([b.ids]), one, setup, text) for one, b in zip(those, built, strict=True)]

    return make


@pytest.fixture
def evaluate(evaluate_with: Any) -> Any:
    """Return a function that runs the command and gives exit code, output and errors."""
    return evaluate_with()


def test_all_questions_of_a_text_share_a_document_that_holds_none_of_them(
    asked: Callable[..., list[Prompt]], setup: Setup
) -> None:
    prompts = asked(8)
    documents = [prompt.document.ids_1N for prompt in prompts]
    assert all(torch.equal(one, documents[0]) for one in documents)
    read = setup.tokenizer.decode(documents[0][0])
    assert read.endswith(prompts[0].sample.document[-40:])
    for prompt in prompts:
        assert torch.equal(prompt.ids_1N[:, : documents[0].shape[1]], documents[0])
        rest = setup.tokenizer.decode(prompt.ids_1N[0, documents[0].shape[1] :])
        assert rest.startswith(f"\n{prompt.sample.question}")


def test_a_token_that_joins_text_and_question_belongs_to_the_question() -> None:
    from tokenizers import Tokenizer, models

    letters = {letter: number for number, letter in enumerate(map(chr, range(32, 127)))} | {"\n": 95, ".\n": 96}
    inner = Tokenizer(models.BPE(letters, [(".", "\n")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    tokenizer.chat_template = "{{ messages[0].content }}"
    task = tasks.get("multikey")
    sample = replace(
        tasks.task.Sample(content="One fact. Another.\nWhich?", targets=("x",), reply="x"),
        question="Which?",
        span=(0, 18),
    )
    built = build_prompt(task, sample, tokenizer)
    assert 96 in built.ids
    assert document_tokens(tokenizer, task, sample, built) == len("One fact. Another")
    # Where the template trims the turn, its end is still found.
    tokenizer.chat_template = "<{{ messages[0].content | trim }}>"
    spaced = replace(sample, content=sample.content + " \n")
    built = build_prompt(task, spaced, tokenizer)
    assert document_tokens(tokenizer, task, spaced, built) == 1 + len("One fact. Another")


@pytest.mark.parametrize("name", ["full", "locret", "snapkv", "oracle", "oracle_agnostic", "full+8bit", "h2o"])
def test_with_room_for_all_both_protocols_say_the_same(name: str, asked: Callable[..., list[Prompt]]) -> None:
    method, prompts = methods.get(name), asked(2)
    policy = RetentionPolicy(budget=500, chunk_size=512, stabilizers=8, local_len=8)
    known = runner.Run(method, None if method.plain else method.policy(policy))
    task = replace(tasks.get("multikey"), max_new_tokens=6)
    unknown = answering.answers_on_forks([prompts], replace(known, protocol=AGNOSTIC), task)
    for prompt, later in zip(prompts, unknown, strict=True):
        first = answering.answer(prompt, known, 6)
        assert (first["prediction"], first["generated_tokens"]) == (later["prediction"], later["generated_tokens"])
        assert later["kept_units"] == prompt.document.ids_1N.shape[1]


def test_the_agnostic_oracle_knows_what_all_answers_look_at(asked: Callable[..., list[Prompt]], setup: Setup) -> None:
    prompts = asked(8)
    document = prompts[0].document.ids_1N.shape[1]
    wanted = torch.stack([prompt.labels[..., :document] for prompt in prompts]).amax(0)
    torch.testing.assert_close(prompts[0].agnostic_labels[..., :document], wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(prompts[3].agnostic_labels[..., document:], prompts[3].labels[..., document:])
    # What is kept of the document is the same whatever is asked, and differs from what one answer needs.
    method = methods.get("oracle_agnostic")
    kept = []
    for prompt in (prompts[0].document, prompts[5].document):
        cache = RetentionCache(setup.model, methods.make_scorer(method, prompt), POLICY)
        prefill(setup.model, prompt.ids_1N, cache)
        kept.append(cache.kept_positions(0))
    assert torch.equal(kept[0], kept[1])
    own = RetentionCache(setup.model, methods.make_scorer(methods.get("oracle"), prompts[5].document), POLICY)
    prefill(setup.model, prompts[5].document.ids_1N, own)
    assert not torch.equal(own.kept_positions(0), kept[1])


def test_a_document_is_read_once_for_all_questions_but_for_the_oracle(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def counted(*given: Any, **options: Any) -> Any:
        reads.append(given[1].shape[1])
        return prefill(*given, **options)

    monkeypatch.setattr(answering, "prefill", counted)
    task = replace(tasks.get("multikey"), max_new_tokens=2)
    wanted = tasks.task.Wanted(tokenizer=lambda: None, lengths=[400], samples=1)
    places = runner.plan_cases([task.select(wanted)], 0, questions=20)
    places, _ = runner.settled(places, setup.tokenizer)
    assert [case.question for case in places] == list(range(8))
    allotment = runner.Allotment(POLICY.to_dict())
    for name, times in (("random", 1), ("oracle_agnostic", 1), ("oracle", 8)):
        reads.clear()
        runs = runner.plan_runs([methods.get(name)], [allotment], protocols=[AGNOSTIC])
        found = list(runner.evaluate(setup, places, runs, set()))
        assert len(found) == 8
        assert len(reads) == times
        assert {record["document_tokens"] for record in found} == set(reads)
    reads.clear()
    runs = runner.plan_runs([methods.get("random")], [allotment], protocols=[AWARE])
    list(runner.evaluate(setup, places, runs, set()))
    assert len(reads) == 8


def test_protocols_are_on_record_and_in_the_table(evaluate: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = (*MULTIKEY, "--methods", "full,random", "--protocol", "aware,agnostic", "--questions", 3, "--output", out)
    code, table, err = evaluate(*line)
    assert code == 0, err
    found = records(out)
    assert len(found) == 2 * 3 * 4
    order = [(r["index"], r["question"], r["protocol"], r["method"]) for r in found]
    assert order == sorted(order, key=lambda one: (*one[:2], one[2] == "agnostic", one[3] != "full"))
    for question in range(3):
        of_one = [r for r in found if (r["index"], r["question"]) == (0, question)]
        assert len({r["prompt_sha256"] for r in of_one}) == 1
    assert "| full, agnostic | all |" in table
    assert "| random, agnostic | 48 |" in table
    assert [(c["method"], c["protocol"], c["n"], c["questions"]) for c in cells(out)] == [
        (method, protocol, 2, 6) for protocol in ("aware", "agnostic") for method in ("full", "random")
    ]
    assert json.loads((out / "results.json").read_text())["complete"] is True


def test_a_resumed_run_equals_an_uninterrupted_one(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        *MULTIKEY,
        "--methods",
        "random,oracle_agnostic",
        "--protocol",
        "aware,agnostic",
        "--questions",
        2,
        "--lengths",
        300,
    )
    assert evaluate(*line, "--output", tmp_path / "alone")[0] == 0
    append, left = runner.answers_on_forks, [3]

    def interrupted(*given: Any) -> Any:
        for one in append(*given):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(runner, "answers_on_forks", interrupted)
    assert evaluate(*line, "--output", tmp_path / "out")[0] == 130
    monkeypatch.setattr(runner, "answers_on_forks", append)
    assert 0 < len(records(tmp_path / "out")) < 16
    assert evaluate(*line, "--output", tmp_path / "out", "--resume")[0] == 0
    assert records(tmp_path / "out") == records(tmp_path / "alone")
    assert cells(tmp_path / "out") == cells(tmp_path / "alone")


def test_errors_are_over_texts_not_over_questions() -> None:
    record = {
        "task": "multikey",
        "tokens": 500,
        "method": "random",
        "budget": 48,
        "chunk_size": 64,
        "stabilizers": 8,
        **dict.fromkeys(("kept_units", "peak_units", "cache_bytes", "peak_bytes", "prompt_tokens"), 1),
        **dict.fromkeys(("generated_tokens", "prefill_seconds", "decode_seconds"), 1),
    }
    marks = {0: [1, 1, 0, 0], 1: [1], 2: [0, 0]}
    found = [
        {**record, "index": text, "question": question, "score": score}
        for text, scores in marks.items()
        for question, score in enumerate(scores)
    ]
    (cell,) = summary.cells(found)
    assert (cell["n"], cell["questions"], cell["score"]) == (3, 7, 50.0)
    assert cell["standard_error"] == pytest.approx(50 / 3**0.5, abs=1e-4)
    scored = summary.task_score(tasks.get("multikey"), [r | {"prediction": "", "targets": ["1"]} for r in found])
    assert scored == {"score": 50.0, "standard_error": cell["standard_error"]}


def test_no_task_of_infinitebench_that_may_be_asked_later_says_its_question_first() -> None:
    for task in infinitebench.TASKS:
        heads = set()
        for called, sought in (("func_1(2)", "largest"), ("func_2(2)", "smallest")):
            row = {"context": "1 2 3", "input": f"What is {called}? The {sought} number of it.", "options": [*"abcd"]}
            (sample,) = task.read(0, "row", {**row, "answer": ["a"] if task.has_options else ["7"]})
            heads.add(sample.content[: sample.span[0]])
        assert task.asks_first == (len(heads) > 1), task.name
    assert {task.name for task in infinitebench.TASKS if task.asks_first} == {
        "infinitebench/math_find",
        "infinitebench/code_run",
    }


def test_a_template_that_rewrites_questions_is_refused_before_the_oracle_reads(
    backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(backbone, tmp_path / "other")
    template = other / "chat_template.jinja"
    text = template.read_text()
    assert "message['content']" in text
    template.write_text(text.replace("message['content']", "message['content'].replace('?', '.')"))
    line = ["--model", other, "--methods", "oracle_agnostic", "--tasks", "multikey", "--lengths", 400]
    with pytest.raises(SystemExit) as leaving:
        run(command, [str(one) for one in (*line, "--samples", 1, "--output", tmp_path / "out", *SMALL)])
    assert leaving.value.code == 2
    assert "oracle_agnostic: the question of multikey is not found in its prompt" in capsys.readouterr().err


def test_a_suite_leaves_out_what_cannot_be_made_and_says_so(evaluate: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = ("--suite", "niah", "--methods", "full", "--lengths", 150, "--samples", 2, "--max-new-tokens", 2)
    code, table, err = evaluate(*line, "--output", out, *SMALL[-4:])
    assert code == 0, err
    results = json.loads((out / "results.json").read_text())
    assert results["complete"] is True
    assert [one["task"] for one in results["left_out"]] == ["niah/needle"]
    assert set(results["suite"]["missing"]) == {"niah/needle"}
    assert "Left out: sample 0 of niah/needle cannot be made at 150 tokens" in table
    assert "partial: 1 of 2 tasks" in table


def test_tables_of_long_answers_have_their_floor(evaluate: Any, tmp_path: Path) -> None:
    line = (*MULTIKEY, "--max-new-tokens", 24, "--decode-budget", 60, "--decode-interval", 4)
    code, table, err = evaluate(*line, "--methods", "full,random", "--output", tmp_path / "out")
    assert code == 0, err
    assert "| random_answer | 48 |" in table
    assert "random_answer is compared too" in err
    code, _, err = evaluate(*line[:-4], "--methods", "random_answer", "--output", tmp_path / "other")
    assert code == 2
    assert "without --decode-budget none are; give it, or take random" in err
    assert evaluate(*line, "--methods", "full", "--output", tmp_path / "other")[0] == 2  # nothing is evicted
