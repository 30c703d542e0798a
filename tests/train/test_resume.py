"""`--resume`: from the run's folder alone, towards more steps, and refusals: nothing there, other runs, damage."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import mutations
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import equal, records, refused, train, train_again, weights, write_rows

from locret import RetainingHeads
from locret.train import checkpointing, resumed
from locret.train.run_log import records_until
from locret.train.training_options import OPTION_CLASSES


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 24 rows, enough to hold some out."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.json", rows=24)


@pytest.fixture(scope="module")
def straight(paths: tuple[Path, Path], rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return six steps with options of their own, validation included, and checkpoints after three and six."""
    output = tmp_path_factory.mktemp("straight") / "run"
    options = ["--lr=1.0e-3", "--save-every=3", "--eval-every=2", "--policy.budget=64", "--policy.stabilizers=8"]
    assert train((paths[0], rows), output, *options) == 0
    return output


def broken_off(straight: Path, folder: Path) -> Path:
    """Return a copy that ended after the checkpoint of step three."""
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "checkpoint-6")
    (folder / "model.safetensors").unlink()
    (folder / ".checkpoint-6.0a1b.partial").mkdir()  # what a killed process was about to write
    return folder


def log(folder: Path) -> list[dict[str, Any]]:
    timed = ("tokens_per_second", "memory_bytes")
    return [{name: value for name, value in record.items() if name not in timed} for record in records(folder)]


def test_a_run_is_resumed_from_its_folder_alone(straight: Path, tmp_path: Path) -> None:
    """Options, log (evaluations included) and heads are those of the run that was never interrupted."""
    run = broken_off(straight, tmp_path / "run")
    assert train_again(["--resume", str(run), "--lr=1e-3"]) == 0
    assert equal(weights(straight), weights(run))
    assert log(run) == log(straight)
    assert not list(run.glob(".*"))
    states = [checkpointing.read(folder / "checkpoint-6") for folder in (straight, run)]
    for ours, theirs in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
        assert torch.equal(ours["exp_avg_sq"], theirs["exp_avg_sq"])
    assert states[0]["stream"] == states[1]["stream"]
    before, after = (json.loads((folder / "run.json").read_text()) for folder in (straight, run))
    ours = {name: value for name, value in after["config"].items() if name not in ("output", "resume")}
    assert ours == {name: before["config"][name] for name in ours}
    assert after["chosen"] == before["chosen"]
    policies = [RetainingHeads.from_pretrained(folder).config.policy for folder in (straight, run)]
    assert policies[0] == policies[1] is not None


def test_a_run_goes_on_towards_more_steps_on_the_schedule_of_all_of_them(
    paths: tuple[Path, Path], rows: Path, straight: Path, tmp_path: Path
) -> None:
    longer = shutil.copytree(straight, tmp_path / "run")
    assert train_again([f"--resume={longer}", "--steps=9"]) == 0
    rates = {record["step"]: record["learning_rate"] for record in log(longer) if record["step"]}
    assert list(rates) == list(range(1, 10))
    schedule = {step: 1e-3 * (9 - (step - 1)) / (9 - 2) for step in (7, 8, 9)}  # the rate of step s is that of s - 1
    assert {step: rates[step] for step in schedule} == pytest.approx(schedule)
    assert [path.name for path in checkpointing.complete(longer)] == ["checkpoint-6", "checkpoint-9"]
    assert json.loads((longer / "run.json").read_text())["config"]["steps"] == 9


def test_other_options_than_the_runs_are_refused(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = broken_off(straight, tmp_path / "run")
    for more, expected in [
        (["--steps=5"], "--steps was 6 and is now 5; use the options of that run"),
        (["--lr=0.5"], "--lr was 0.001 and is now 0.5; use the options of that run"),
        (["--eval-rows=2"], "--eval-rows was 8 and is now 2; use the options of that run"),
        (["--overwrite"], "--resume and --overwrite contradict each other"),
        (["--gradient-accumulation=2"], "rows per step (processes times --gradient-accumulation) was 1 and is now 2"),
    ]:
        code, message = refused(capsys, [f"--resume={run}", *more])
        assert (code, expected in message) == (2, True), message


def test_resume_where_there_is_nothing_is_refused_and_auto_starts(
    paths: tuple[Path, Path], straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (tmp_path / "empty").mkdir()
    code, message = refused(capsys, [f"--resume={tmp_path / 'empty'}"])
    assert (code, "is not a run (it has no run.json); give the folder that" in message) == (2, True)
    assert not run.exists()
    assert train(paths, run, "--resume=auto", "--steps=2") == 0
    for checkpoint in checkpointing.complete(run):
        shutil.rmtree(checkpoint)
    code, message = refused(capsys, [f"--resume={run}"])
    assert (code, "holds no checkpoint such as checkpoint-50; start anew with --overwrite" in message) == (2, True)


def test_runs_are_not_mixed(
    paths: tuple[Path, Path], straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(paths, tmp_path / "other", "--steps=1") == 0
    kept = log(tmp_path / "other")
    code, message = refused(capsys, [f"--resume={straight}", f"--output={tmp_path / 'other'}"])
    assert (code, f"is another run than --resume {straight}; leave it out" in message) == (2, True)
    assert log(tmp_path / "other") == kept


@settings(max_examples=40)
@given(data=st.data())
def test_damaged_states_records_and_logs_are_refused_or_read(
    straight: Path, tmp_path_factory: Any, data: st.DataObject
) -> None:
    name, read = data.draw(st.sampled_from(READERS))
    content = mutations.bytes_of(data.draw, (straight / name).read_bytes())
    path = mutations.put(tmp_path_factory.getbasetemp() / "damaged" / Path(name).parent, Path(name).name, content)
    mutations.loaded_or_refused(lambda: read(path))


KNOWN = {field.name for cls in OPTION_CLASSES for field in fields(cls)}
READERS = [
    ("checkpoint-3/state.pt", lambda path: checkpointing.read(path.parent)),
    ("run.json", lambda path: resumed.read_record(path.parent, KNOWN)),
    ("log.jsonl", lambda path: records_until(path, 3)),
]


def test_a_damaged_record_is_one_sentence_with_a_way_out_that_works(
    paths: tuple[Path, Path], rows: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = broken_off(straight, tmp_path / "run")
    (run / "run.json").write_text('{"config": {"stepz": 1}}')
    code, message = refused(capsys, [f"--resume={run}"])
    assert (code, "has an unknown option 'stepz'; give all" in message) == (2, True), message
    assert message.endswith(f"options of that run with --output {run} --resume auto")
    options = ["--lr=1.0e-3", "--save-every=3", "--eval-every=2", "--resume=auto"]
    assert train((paths[0], rows), run, *options) == 0
    assert equal(weights(straight), weights(run))


def test_a_run_of_an_earlier_version_goes_on_without_retired_options(tmp_path: Path) -> None:
    config = {"steps": 3, "label_floor": None, "evict_while_training": False, "policy": {"budget": 8, "refit": False}}
    (tmp_path / "run.json").write_text(json.dumps({"config": config, "chosen": ["steps"]}))
    found = resumed.read_record(tmp_path, {"steps", "policy"})
    assert found["config"] == {"eval_rows": 0, "steps": 3, "policy": {"budget": 8}}
    (tmp_path / "run.json").write_text(json.dumps({"config": {**config, "label_floor": -8}, "chosen": []}))
    with pytest.raises(ValueError, match='option "--label-floor" was retired; release 0.1.0'):
        resumed.read_record(tmp_path, {"steps", "policy"})
