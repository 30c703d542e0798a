"""Held-out rows, chance and untrained heads: a run that learns nothing says so, and nothing held out is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import refused, train, train_arguments, write_rows
from transformers import AutoTokenizer

from locret import RetainingHeads
from locret.data.training.stream import TrainingStream, load_rows
from locret.train.loss import chance_overlap, top_overlap
from locret.train.validation import comparison, steps_between


@pytest.fixture(scope="module")
def many(paths: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the backbone and a file of 40 rows."""
    return paths[0], write_rows(tmp_path_factory.mktemp("many") / "rows.json", rows=40)


def stream(paths: tuple[Path, Path]) -> TrainingStream:
    rows = load_rows(str(paths[1]))
    return TrainingStream(rows, AutoTokenizer.from_pretrained(paths[0]), seed=3, max_length=None)


def records(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_chance_is_what_random_scores_get() -> None:
    for tokens in (7, 100, 256):
        scores = torch.rand(1, 20_000, tokens, generator=torch.Generator().manual_seed(0))
        labels = torch.rand(1, 20_000, tokens, generator=torch.Generator().manual_seed(1))
        assert top_overlap(scores, labels).item() == pytest.approx(chance_overlap(tokens), abs=0.01)


def test_held_out_rows_never_come_up_and_the_others_keep_their_order(many: tuple[Path, Path]) -> None:
    plain, ours = stream(many), stream(many)
    held_out = {example.row for example in ours.hold_out(5)[0]}
    assert len(held_out) == 5
    epochs = [next(plain).row for _ in range(80)]
    expected = [row for row in epochs if row not in held_out]
    assert [next(ours).row for _ in range(70)] == expected
    assert held_out == set(epochs[35:40])  # those that the first epoch meets last


def test_a_stream_resumes_only_with_the_same_rows_held_out(many: tuple[Path, Path]) -> None:
    one, other = stream(many), stream(many)
    one.hold_out(3)
    with pytest.raises(ValueError, match="stream was made with held_out="):
        other.restore(one.state())
    with pytest.raises(ValueError, match="stream was made with held_out=None"):
        one.restore(other.state())


def test_rows_held_out_by_default_change_nothing_that_is_trained(many: tuple[Path, Path], tmp_path: Path) -> None:
    assert train(many, tmp_path / "default", "--steps=12") == 0
    assert train(many, tmp_path / "none", "--steps=12", "--eval-rows=0") == 0
    one, other = (RetainingHeads.from_pretrained(tmp_path / name).state_dict() for name in ("default", "none"))
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())
    assert [record["step"] for record in records(tmp_path / "default") if "eval_overlap" in record] == [0, 12]
    assert not any("eval_overlap" in record for record in records(tmp_path / "none"))
    assert json.loads((tmp_path / "default" / "run.json").read_text())["config"]["eval_rows"] == 8
    assert json.loads((tmp_path / "default" / "dropped_rows.json").read_text())["held_out"] == 8


def test_evaluations_come_when_asked_and_show_what_is_learned(
    many: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["--steps=60", "--lr=1.0e-2", "--eval-rows=6", "--eval-every=25", "--log-every=30"]
    assert train(many, tmp_path / "run", *options) == 0
    evaluated = [record for record in records(tmp_path / "run") if "eval_overlap" in record]
    assert [record["step"] for record in evaluated] == [0, 25, 50, 60]
    assert [len(record["eval_overlap_per_row"]) for record in evaluated] == [6] * 4
    assert evaluated[-1]["eval_regression"] < evaluated[0]["eval_regression"]
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    shown = [(event.step, event.value) for event in board.Scalars("eval/overlap")]
    assert shown == [(record["step"], pytest.approx(record["eval_overlap"])) for record in evaluated]
    out = capsys.readouterr().out
    before, after = evaluated[0]["eval_overlap"], evaluated[-1]["eval_overlap"]
    assert f"overlap {after:.3f} on 6 rows that were not trained on; untrained heads {before:.3f}, chance" in out
    assert ("learned nothing" in caplog.text) == (after <= before)
    training = RetainingHeads.from_pretrained(tmp_path / "run").config.training
    assert training is not None
    assert (training["held_out_rows"], training["held_out_overlap"]) == (6, after)


@pytest.mark.parametrize("held_out", [0, 6])
def test_a_run_that_learns_nothing_says_so(
    many: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, held_out: int
) -> None:
    options = ["--steps=2", "--lr=1.0e-12", f"--eval-rows={held_out}", "--max-prompt-tokens=10"]
    assert train(many, tmp_path / "run", *options, "--split=train[:8]") == 0
    record = records(tmp_path / "run")[-1]
    learned = held_out == 0 and record["overlap"] > max(
        record["chance_overlap"], records(tmp_path / "run")[0]["overlap"]
    )
    assert ("the heads have learned nothing that shows" in caplog.text) != learned


def test_the_warning_is_about_what_is_above_chance_and_above_the_start() -> None:
    words, warning = comparison({"overlap": 0.4}, [0.2], 0.1, "untrained heads")
    assert (words, warning) == (
        "overlap 0.400 on the last rows that were trained on; untrained heads 0.200, chance 0.100",
        None,
    )
    for record, before, chance in [
        ({"overlap": 0.15}, [0.158], 0.1),  # below the start
        ({"overlap": 0.09}, [0.05], 0.1),  # below chance
        ({"eval_overlap_per_row": [0.1, 0.3]}, [0.3, 0.0], 0.1),  # above the start on average, by luck
    ]:
        assert "learned nothing that shows" in str(comparison(record, before, chance, "untrained heads")[1])
    assert comparison({"eval_overlap_per_row": [0.3, 0.4]}, [0.2, 0.31], 0.1, "untrained heads")[1] is None


def test_evaluations_cost_a_tenth_at_most_by_default() -> None:
    assert steps_between(None, 3000, 1, 8) == 300
    assert steps_between(None, 40, 1, 8) == 40
    assert steps_between(None, 400, 1, 8) == 80
    assert steps_between(7, 40, 1, 8) == 7


def test_more_rows_held_out_than_there_are_is_refused(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for count in (6, 7):
        code, message = refused(capsys, train_arguments(paths, tmp_path / "run", f"--eval-rows={count}"))
        assert (code, f"--eval-rows {count} leaves nothing to train on" in message) == (2, True), message
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--eval-rows=0", "--eval-every=5"))
    assert (code, "--eval-every 5 changes nothing with --eval-rows 0" in message) == (2, True)
    assert not (tmp_path / "run").exists()
