"""Suites: every task in order, averages with errors, what is missing, and the rows that papers print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from eval_runs import records, results
from published_cases import published

from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.task import MadeSamples
from locret.infer.evaluation import report

pytest.importorskip("rouge_score", reason="ROUGE needs locret[eval]")
QUICK = ("--max-new-tokens", 4, "--budget", 64, "--chunk-size", 128, "--stabilizers", 16, "--local-len", 8)
QUICK = (*QUICK, "--figures", "none", "--threads", 1)


@pytest.fixture
def evaluate(evaluate_with: Any) -> Any:
    """Return a function that runs the command and gives exit code, output and errors."""
    return evaluate_with(*QUICK)


def test_a_suite_shows_missing_tasks_a_partial_average_and_published_rows(evaluate: Any, tmp_path: Path) -> None:
    data, out = published(tmp_path / "data"), tmp_path / "out"
    line = ("--suite", "leval-locret", "--published", "--methods", "random,full", "--data-dir", data, "--output", out)
    code, table, err = evaluate(*line)
    assert code == 0, err
    titles = "| method | budget | codeU | natural_question (2 of 104) | legal_contract_qa | narrative_qa | meeting_summ"
    assert table.splitlines()[2].startswith(titles)
    row = next(line for line in table.splitlines() if line.startswith("| full | all | missing |"))
    assert row.endswith("(partial) |")
    assert row.count("missing") == 4
    assert "| published: full, Phi-3-mini-128K [1] |  | 8.89 | 59.14 | 30.34 | 17.59 | 16.05 | 14.51 | 24.42 |" in table
    assert "[1] As printed in Locret, arXiv 2410.01805, Table 3, not measured here. Differs: model Phi-3-mini" in table
    assert "precision not stated, their software and hardware; ours is" in table
    assert "backbone in float32" in table
    assert "Missing: leval/codeU (no rows found)." in table
    assert "Answers are shorter than the protocol allows (--max-new-tokens)." in table
    assert "A partial average" in table
    found = results(out)["suite"]
    assert set(found["missing"]) == set(found["tasks"]) - {"leval/natural_question", "leval/meeting_summ"}
    for one in found["rows"]:
        known = [score for score in one["scores"].values() if score is not None]
        assert one["average"] == pytest.approx(sum(known) / 2)
    assert (out / "results.md").read_text() == table


def test_generated_benchmarks_have_a_row_per_length_and_leave_out_what_cannot_be_made(
    evaluate: Any, tmp_path: Path
) -> None:
    line = ("--suite", "niah", "--methods", "full,streaming", "--samples", 2)
    code, table, err = evaluate(*line, "--lengths", "400,500", "--output", tmp_path / "out")
    assert code == 0, err
    assert [(row["method"], row["tokens"]) for row in results(tmp_path / "out")["suite"]["rows"]] == [
        *(("full", 400), ("streaming", 400), ("full", 500), ("streaming", 500))
    ]
    assert "| full, 400 tokens | all |" in table
    assert "| niah/needle (filler) @ 400 | niah/needle (filler) @ 500 |" in table
    assert "Rows are generated here, by our own writing of the benchmark's generator, from texts of filler." in table
    assert {record["depth"] for record in records(tmp_path / "out")} == {0.1, 0.9}
    code, table, err = evaluate(*line, "--lengths", 150, "--output", tmp_path / "short")
    assert code == 0, err
    whole = results(tmp_path / "short")
    assert (whole["complete"], set(whole["suite"]["missing"])) == (True, {"niah/needle"})
    assert "Left out: niah/needle cannot be made at 150 tokens" in table


USUAL = {
    **{"tokens": 100, "method": "full", "budget": None, "chunk_size": None, "stabilizers": None, "item": "0"},
    **dict.fromkeys(("prompt_tokens", "prefill_seconds", "generated_tokens", "decode_seconds"), 1),
    **dict.fromkeys(("kept_units", "peak_units", "cache_bytes", "peak_bytes", "tokens_before", "tokens_after"), 1),
}


def cell(name: str, *found: dict[str, Any], of: int | None = None) -> dict[str, Any]:
    samples = MadeSamples(tasks.get(name), 0, 4, 0, made=False)
    samples.of = of
    whole = [{**USUAL, "task": name, "index": index, "prediction": "", **one} for index, one in enumerate(found)]
    (only,) = report.cells(whole, {(name, 100): samples})
    return only


def test_errors_are_over_texts_not_over_questions() -> None:
    marks = {0: [1, 1, 0, 0], 1: [1], 2: [0, 0]}
    found = [
        {"index": text, "question": question, "score": score, "targets": ["1"]}
        for text, scores in marks.items()
        for question, score in enumerate(scores)
    ]
    own = cell("longbench/qasper", *found)
    assert (own["n"], own["questions"], own["score"], own["task"]) == (3, 7, 50.0, "longbench/qasper (3 rows)")
    assert own["standard_error"] == pytest.approx(50 / 3**0.5, abs=1e-4)


def test_rouge_of_a_task_is_the_geometric_mean_of_three_means() -> None:
    task = tasks.get("leval/meeting_summ")
    found = [
        {
            "prediction": said,
            "targets": [right],
            "score": task.score(said, Sample(content="", targets=(right,), reply=right)),
        }
        for said, right in [("the sky is blue", "the sky is red"), ("a house", "a door")]
    ]
    own = cell(task.name, *found, of=156)
    # ROUGE-1: 3/4 and 1/2; ROUGE-2: 2/3 and 0; ROUGE-L: 3/4 and 1/2.
    assert own["score"] == pytest.approx(100 * ((5 / 8) * (1 / 3) * (5 / 8)) ** (1 / 3), abs=1e-3)
    assert own["task"] == "leval/meeting_summ (2 of 156)"
    assert own["standard_error"] is None
