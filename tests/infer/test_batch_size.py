"""Answers written side by side: those of one by one, whoever waits for whom, whatever was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eval_runs import cells, records

from locret import shipped
from locret.cli.command import run
from locret.infer.evaluation import runner
from locret.infer.evaluation.command import command

BACKBONE, HEADS = shipped.find("checkpoints/tiny"), shipped.find("checkpoints/tiny-heads")
SMALL = (
    *("--model", BACKBONE, "--heads", HEADS, "--tasks", "multikey,passkey", "--lengths", "300"),
    *("--samples", "2", "--questions", "3", "--protocol", "aware,agnostic", "--chunk-size", "64"),
    *("--stabilizers", "8", "--local-len", "8", "--figures", "none", "--quiet"),
)
# A batch holds room for the longest of its answers, and a tier's index counts what all rows move.
LOOSE = ("peak_bytes", "peak_units", "moved_bytes", "host_bytes")
METHODS = "full,locret,oracle,oracle_agnostic,h2o,infllm,quest,locret+recall:host_budget=64,locret+adaptive_heads"


def asked(output: Path, *more: object) -> list[dict[str, Any]]:
    """Run an evaluation, and return its records without times."""
    command([*map(str, SMALL), "--output", str(output), *map(str, more)])
    return records(output)


def exact(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name not in LOOSE} for one in found]


@pytest.mark.slow
def test_answers_side_by_side_are_those_of_one_by_one(tmp_path: Path) -> None:
    line = ("--tasks", "multikey", "--methods", METHODS, "--budget", "48")
    alone, beside = asked(tmp_path / "1", *line), asked(tmp_path / "4", *line, "--batch-size", 4)
    assert exact(alone) == exact(beside)
    for one, other in zip(alone, beside, strict=True):
        assert other["peak_bytes"] == pytest.approx(one["peak_bytes"], rel=0.05)
    written = [json.loads(line) for line in (tmp_path / "4" / "samples.jsonl").read_text().splitlines()]
    shares = {(one["task"], one["protocol"], one["decode_seconds"]) for one in written if one["method"] == "locret"}
    assert len(shares) < sum(one["method"] == "locret" for one in written), "answers of a batch share its seconds"


def test_a_run_that_goes_on_writes_the_same_answers_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("--methods", "random,locret", "--budget", "48", "--questions", "2", "--batch-size", "4")
    whole = asked(tmp_path / "whole", *line)
    samples = tmp_path / "cut" / "samples.jsonl"
    asked(tmp_path / "cut", *line)
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[::3]))  # of most batches some are there and some are not
    sizes: list[int] = []
    beside = runner.answers_on_forks

    def noted(texts: Any, *given: Any) -> Any:
        sizes.append(sum(map(len, texts)))
        return beside(texts, *given)

    monkeypatch.setattr(runner, "answers_on_forks", noted)
    assert asked(tmp_path / "cut", *line, "--resume") == whole
    assert cells(tmp_path / "cut") == cells(tmp_path / "whole")
    assert set(sizes) == {
        len({(one["index"], one["question"]) for one in whole if one["task"] == name})
        for name in ("multikey", "passkey")
    }
    code = refused(*SMALL, "--output", tmp_path / "cut", *line[:-1], "3", "--resume")
    assert code == 2, "another number is another evaluation"


def test_shares_of_prompts_and_turns_without_room_are_not_joined(tmp_path: Path) -> None:
    few = ("--tasks", "multikey", "--questions", 2, "--methods", "random")
    shares = (*few, "--budget-share", "0.2,0.3")
    assert exact(asked(tmp_path / "1", *shares)) == exact(asked(tmp_path / "4", *shares, "--batch-size", 4))
    # A question is longer than a chunk of six tokens, so that each is read with evictions of its own.
    short = (*few, "--protocol", "agnostic", "--budget", "48", "--chunk-size", "6", "--stabilizers", "2")
    assert exact(asked(tmp_path / "6", *short)) == exact(asked(tmp_path / "64", *short, "--batch-size", 64))


def test_blocks_are_whole_texts_of_one_task_and_length() -> None:
    def case(task: str, tokens: int, number: int, question: int) -> Any:
        class _Case:
            text = (task, tokens, number)

        one: Any = _Case()
        one.question = question
        return one

    cases = [
        *(case("a", 8, number, question) for number in range(3) for question in range(2)),
        *(case("a", 16, 0, question) for question in range(2)),
        *(case("b", 16, 0, question) for question in range(5)),
    ]
    assert [len(block) for block in runner.blocks_of(cases, 1)] == [2, 2, 2, 2, 5]
    assert [len(block) for block in runner.blocks_of(cases, 3)] == [4, 2, 2, 5]
    assert [len(block) for block in runner.blocks_of(cases, 99)] == [6, 2, 5]


def refused(*line: object) -> int:
    with pytest.raises(SystemExit) as ended:
        run(command, list(map(str, line)))
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--batch-size", 0), "--batch-size 0 answers nothing; give 1 or more"),
        (
            ("--batch-size", 2, "--methods", "full"),
            "--batch-size 2 changes nothing, for full write one answer at a time",
        ),
        (
            ("--batch-size", 2, "--decode-budget", 200),
            "changes nothing, for --decode-budget 200 evicts for each answer",
        ),
        (
            ("--batch-size", 10**9, "--samples", 500_000),
            "--batch-size 1000000000 of random with --lengths 300: what it holds takes at least",
        ),
    ],
)
def test_a_number_that_changes_nothing_or_does_not_fit_is_refused(
    changed: tuple[object, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ("--methods", "random", "--budget", "48", "--output", tmp_path / "out", *changed)
    assert refused(*SMALL, *line) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_more_is_counted_than_there_are_answers() -> None:
    assert (
        command([*map(str, SMALL), "--methods", "random", "--budget", "48", "--batch-size", "1000000000", "--dry-run"])
        == 0
    )
