"""Suites run end to end: shared by processes, interrupted and resumed, and over extracts of the published data.

The embedded backbone knows some hundred words, so its scores on natural language are near zero: what must hold is that
every row is asked, answered, scored and averaged.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eval_runs import finish, records, start
from published_cases import infinitebench

from locret.data.tasks.published import suites

pytest.importorskip("rouge_score", reason="E.Sum's ROUGE needs locret[eval]")

ROOT = Path(__file__).parents[2]
QUICK = ("--max-new-tokens", 8, "--budget", 64, "--chunk-size", 128, "--stabilizers", 16, "--local-len", 8)
QUICK = (*QUICK, "--figures", "none")
MODEL = ("--model", ROOT / "checkpoints" / "tiny")
EMBEDDED = ("--heads", ROOT / "checkpoints" / "tiny-heads")


def suite(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())["suite"]
    return found


@pytest.fixture
def evaluate(evaluate_with: Any) -> Callable[..., Any]:
    """Return a function that runs the command and gives exit code, output and errors."""

    def call(*arguments: object) -> Any:
        return evaluate_with()(*(*QUICK, "--threads", 1, *arguments), model=ROOT / "checkpoints" / "tiny")

    return call


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """Return the arguments of the nine tasks of Locret's table on the embedded backbone, two rows each."""
    data = infinitebench(tmp_path_factory.mktemp("suites") / "data", rows=3)
    return (*EMBEDDED, *QUICK, "--methods", "full,locret", "--suite", "infinitebench-locret", "--data-dir", data)


@pytest.fixture(scope="module")
def alone(line: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in one process, without interruption."""
    out = tmp_path_factory.mktemp("alone") / "out"
    code, _, err = finish(start(1, *MODEL, *line, "--samples", 2, "--output", out))
    assert code == 0, err
    return out


@pytest.mark.slow
def test_a_suite_asks_every_task_in_order_and_averages_them(alone: Path) -> None:
    found, nine = suite(alone), suites.get("infinitebench-locret")
    assert tuple(dict.fromkeys(record["task"] for record in records(alone))) == nine.tasks
    assert len(records(alone)) == 9 * 2 * 2
    assert [row["method"] for row in found["rows"]] == ["full", "locret"]
    for row in found["rows"]:
        scores = [row["scores"][task] for task in nine.tasks]
        assert row["average"] == pytest.approx(sum(scores) / 9, abs=1e-3)
        assert row["partial"]
    assert found["labels"]["infinitebench/math_find"] == "infinitebench/math_find (2 of 350)"
    assert found["missing"] == {}


@pytest.mark.slow
def test_an_interrupted_suite_shows_what_there_is_and_goes_on(
    evaluate: Any, line: tuple[object, ...], alone: Path, tmp_path: Path, stopped_after: Any
) -> None:
    out = tmp_path / "out"
    with stopped_after(7):
        assert evaluate(*line, "--samples", 2, "--output", out)[0] == 130
    full, locret = suite(out)["rows"]
    assert (full["tasks_measured"], locret["tasks_measured"]) == (2, 2)
    assert "partial: 2 of 9 tasks" in (out / "results.md").read_text()
    # The plain cache has read both rows of the second task, locret one.
    assert "number_string" in suite(out)["labels"]["infinitebench/number_string"]
    assert "[1 of 590]" in (out / "results.md").read_text()
    assert evaluate(*line, "--samples", 2, "--output", out, "--resume")[0] == 0
    assert records(out) == records(alone)
    assert suite(out) == suite(alone)


@pytest.mark.slow
def test_generated_benchmarks_have_a_row_per_length_and_the_same_rows_in_every_process(
    evaluate: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    line = (*EMBEDDED, "--suite", "niah", "--lengths", "600,900", "--methods", "full,locret", "--samples", 2)
    code, table, err = evaluate(*line, "--output", out)
    assert code == 0, err
    assert [(row["method"], row["tokens"]) for row in suite(out)["rows"]] == [
        *(("full", 600), ("locret", 600), ("full", 900), ("locret", 900))
    ]
    assert "| full, 600 tokens | all |" in table
    assert "| niah/needle (filler) @ 600 | niah/needle (filler) @ 900 |" in table
    assert "Rows are generated here" in table
    assert all(0 < record["prompt_tokens"] <= record["tokens"] for record in records(out))
    assert {record["depth"] for record in records(out)} == {0.1, 0.9}
    lines = (out / "samples.jsonl").read_text().splitlines(keepends=True)
    # What another process would have written is asked again: the same row, though it is the first that is made.
    (out / "samples.jsonl").write_text("".join(line for line in lines if json.loads(line)["index"] == 0))
    before = [json.loads(line)["prompt_sha256"] for line in lines]
    assert evaluate(*line, "--output", out, "--resume")[0] == 0
    assert [record["prompt_sha256"] for record in records(out)] == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "folders", "missing"),
    [
        ("infinitebench-locret", ("infinitebench_generated", "derived"), 0),
        ("infinitebench", ("infinitebench_generated", "derived"), 0),
        ("leval-locret", ("leval", "derived/leval"), 0),
        ("longbench", ("longbench",), 13),
        ("ruler-4k", ("ruler", "ruler_generated", "niah"), 2),
        ("twostage", ("twostage",), 0),
    ],
)
def test_suites_run_over_extracts_of_the_published_data(
    name: str, folders: tuple[str, ...], missing: int, evaluate: Any, shared: Path, tmp_path: Path
) -> None:
    pytest.importorskip("rouge", reason="ROUGE needs locret[eval]")
    pytest.importorskip("jieba", reason="Chinese F1 needs locret[eval]")
    data = ",".join(str(shared / "data" / folder) for folder in folders)
    if not all(Path(folder).is_dir() for folder in data.split(",")):
        pytest.skip("the published extracts are not beside the repository")
    out, chosen = tmp_path / "out", suites.get(name)
    line = (*EMBEDDED, "--suite", name, "--methods", "locret", "--data-dir", data, "--samples", 1)
    # Most of RULER's rows are made here, to the suite's length.
    shorter = () if name == "ruler-4k" else ("--max-prompt", 384)
    code, table, err = evaluate(*line, *shorter, "--output", out)
    assert code == 0, err
    found = suite(out)
    assert len(found["missing"]) == missing
    (row,) = found["rows"]
    measured = {task: score for task, score in row["scores"].items() if score is not None}
    assert set(measured) == set(chosen.tasks) - set(found["missing"])
    assert all(0 <= score <= 100 for score in measured.values())
    assert len(records(out)) == len(measured)
    assert table.count("missing") >= missing
