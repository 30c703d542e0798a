"""`locret-train` refuses what cannot work with one clear sentence, before anything is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from training_cases import refused, train, train_arguments, write_backbone

from locret.base.files import locked, visible
from locret.train import checkpointing

BAD_OPTIONS = [
    (["--alpha=-1"], "--alpha -1.0 is negative; use 0 to leave out the smoothness term"),
    (["--temperature=2"], "--temperature 2.0 changes nothing here; add --objective ranking"),
    (["--temperature=0", "--objective=ranking"], "--temperature 0.0 is too small; it must be more than 0"),
    (["--label-floor=0"], 'option "--label-floor" was retired; release 0.1.0'),
    (["--policy.refit=true"], 'option "--refit" was retired; release 0.1.0'),
    (["--sp-size=2"], 'option "--sp-size" was retired; release 0.1.0'),
    (["--devices=8x80GB", "--dry-run"], 'option "--devices" was retired; release 0.1.0'),
    (["--evict-while-training"], 'option "--evict-while-training" was retired; release 0.1.0'),
    (["--steps=0"], "--steps 0 is too small; it must be more than 0"),
    (["--warmup-steps=-1"], "--warmup-steps -1 is negative; it must be 0 or more"),
    (["--betas=[0.9,1.5]"], "--betas [0.9, 1.5]: a decay rate is outside 0 to 1; use such as [0.9, 0.95]"),
    (["--policy.stabilizers=7000"], "stabilizers=7000 leaves no room for scored units in budget=6000"),
    (["--policy.budget=0"], "budget=0 is too small; it must be 1 or more"),
    (
        ["--policy.budget=64", "--policy.layer_budgets=shares"],
        "--policy.layer-budgets shares needs a share of each layer; give --policy.layer-shares, or use",
    ),
    (
        ["--policy.budget=64", "--policy.layer_budgets=shares", "--policy.layer_shares=[1, 1, 1]"],
        "layer_shares has 3 numbers for 2 layers with full attention; give one for each",
    ),
    (["--eval-every=2"], "--eval-every 2 evaluates on held-out rows, and there are none; give --eval-rows 8"),
    (["--resume", "--overwrite"], "--resume and --overwrite contradict each other; drop one of them"),
    (["--label-kind=softmax"], 'label kind "softmax" is unknown; did you mean logit or log_attention or kvzip_plus?'),
    (["--learning-rat=1"], "--learning-rat is unknown"),
    (["--dataset=LongAlpcaa"], "did you mean LongAlpaca"),
    (["--dataset=nowhere/rows.json"], "--dataset nowhere/rows.json: no such file or folder; check the path"),
    (["--data-dir=nowhere"], "--data-dir nowhere is not a folder"),
    (["--model=no/such/model"], "--model no/such/model: there is no such folder; give"),
    (["--max-tokens=10"], "no row can be trained on (6 longer than --max-tokens 10); choose another data set"),
    (["--min-tokens=100"], "no row can be trained on (6 shorter than --min-tokens 100); choose another data set"),
    (["--min-tokens=10", "--max-tokens=9"], "--min-tokens 10 is above --max-tokens 9; no row fits"),
    (["--answers=each", "--label-source=reconstruction"], "--answers each changes nothing with --label-source"),
    (["--streaming"], "was retired; release"),
    (["--adapter=no/such/adapter"], "--adapter no/such/adapter cannot be put on --model"),
    (["--init-from=no/such/heads"], "there is no folder 'no/such/heads'; give a folder of retaining heads"),
    (["--resume=no/such/checkpoint"], "--resume no/such/checkpoint is not a checkpoint or a run"),
]


@pytest.mark.parametrize(("more", "expected"), BAD_OPTIONS, ids=[" ".join(more) for more, _ in BAD_OPTIONS])
def test_a_bad_option_is_one_sentence_and_leaves_nothing(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", *more))
    assert expected in message
    assert code == 2
    assert not (tmp_path / "run").exists()


BAD_ROWS = [
    ("[]", "is empty; it needs at least one row"),
    ('[{"body": "a"}]', "columns 'body' fit no known schema"),
    ('[{"instruction": "a", "output": ""}]', "rows.json: row 0 (counted from 0) has no answer"),
    ('[{"instruction": "", "output": "a"}]', "rows.json: row 0 (counted from 0) has an empty prompt"),
    (json.dumps([{"instruction": "a", "output": "the house " * 1500}]), "longer than the context of 2048 tokens"),
]


@pytest.mark.parametrize(("text", "expected"), BAD_ROWS, ids=["empty", "schema", "no answer", "no prompt", "too long"])
def test_a_bad_data_set_is_one_sentence(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, expected: str
) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(text)
    code, message = refused(capsys, train_arguments((paths[0], rows), tmp_path / "run", "--skip-bad-rows=false"))
    assert (code, expected in message) == (2, True), message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay", "clip_limit", "alpha", "temperature"])
@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_a_number_of_a_recipe_that_is_not_finite_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: a\ndataset: b\noutput: {tmp_path / 'run'}\n{key}: {value}\n")
    code, message = refused(capsys, [f"--config={recipe}"])
    assert code == 2
    assert f"{key}: {value.replace('.', '')} in {recipe} is not a finite number" in message
    assert not (tmp_path / "run").exists()


def test_an_unknown_key_in_a_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: a\ndataset: b\noutput: c\nlearning_rat: 1.0e-3\n")
    code, message = refused(capsys, [f"--config={recipe}"])
    assert (code, "learning_rat in" in message) == (2, True), message


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mamba"}, "no layer of mamba has softmax attention"),
        ({"model_type": "longcat_flash"}, "attends 2 times"),
        ({"model_type": "gpt2"}, "adds its positions to the hidden states"),
        ({"model_type": "never-heard-of"}, "never-heard-of"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_an_unsupported_architecture_is_refused_from_its_config(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Any, expected: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    code, message = refused(capsys, train_arguments((tmp_path / "model", paths[1]), tmp_path / "run"))
    assert (code, expected in message) == (2, True), message
    assert not (tmp_path / "run").exists()


def test_a_folder_without_weights_is_one_sentence(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_backbone(tmp_path / "model", weights=False)
    code, message = refused(capsys, train_arguments((model, paths[1]), tmp_path / "run"))
    assert (code, "cannot be loaded" in message) == (2, True), message
    assert not (tmp_path / "run").exists()


# -- the output folder -----------------------------------------------------------------------------------------------


def test_an_earlier_run_is_not_overwritten_unasked(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(paths, tmp_path / "run") == 0
    (tmp_path / "run" / "notes.txt").write_text("mine")
    # A model that cannot be loaded shows that the folder is looked at first.
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--model=no/such/model"))
    assert (code, "holds an earlier run; choose another folder, go on with --resume, or" in message) == (2, True)
    assert train(paths, tmp_path / "run", "--overwrite", "--steps=2", "--warmup-steps=0") == 0
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 2
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("more", [[], ["--resume"], ["--overwrite"]])
def test_a_folder_with_something_else_is_never_touched(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", *more))
    assert (code, "holds something else than a training run (config.json); choose a new" in message) == (2, True)
    assert (tmp_path / "run" / "config.json").read_text() == "{}"


def test_a_file_in_the_way_is_refused(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("")
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run"))
    assert (code, message.endswith("is a file; choose a folder")) == (2, True)
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run" / "below"))
    assert (code, "cannot be written: no permission for" in message) == (1, True)


def test_no_permission_for_the_output_folder_is_found_before_the_model_is_loaded(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tests may run as root, whom no permission stops.
    monkeypatch.setattr("locret.train.run_folder.os.access", lambda path, mode: path != tmp_path)
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--model=no/such/model"))
    assert (code, f"no permission for {tmp_path}; choose another folder" in message) == (1, True)


def test_a_full_disk_is_found_before_the_model_is_loaded(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**20)
    monkeypatch.setattr("locret.train.run_folder.shutil.disk_usage", lambda path: usage)
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--hidden-dim=4096"))
    assert code == 1
    assert "needs about 14 MiB" in message
    assert "has 1 MiB free; make room or choose another folder" in message
    assert not (tmp_path / "run").exists()


def test_a_bad_last_row_is_refused_before_anything_is_written(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(paths[1].read_text())
    rows[-1]["output"] = ""
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    code, message = refused(
        capsys,
        train_arguments((paths[0], tmp_path / "rows.json"), tmp_path / "run", "--steps=1", "--skip-bad-rows=false"),
    )
    assert code == 2
    assert "rows.json: row 5 (counted from 0) has no answer" in message
    assert "--skip-bad-rows" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("more", [[], ["--resume"], ["--overwrite"]])
def test_a_folder_that_another_run_is_writing_is_refused(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    with locked(tmp_path / "run", "--output"):
        if more:
            (tmp_path / "run" / "run.json").write_text('{"config": {}}')
        code, message = refused(capsys, train_arguments(paths, tmp_path / "run", *more))
        assert (code, f"is being written by process {os.getpid()} on" in message) == (2, True)
        assert visible(tmp_path / "run") == (["run.json"] if more else [])


@pytest.mark.slow
def test_of_two_runs_in_one_folder_the_second_is_refused_until_the_first_is_gone(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, steps = tmp_path / "run", ("--steps=100000", "--save-every=5")
    first = subprocess.Popen(
        [sys.executable, "-m", "locret.train.command", *train_arguments(paths, run, *steps)], stderr=subprocess.DEVNULL
    )
    try:
        while not checkpointing.complete(run):
            assert first.poll() is None
            time.sleep(0.1)
        for more in ("--resume", "--overwrite"):
            code, message = refused(capsys, train_arguments(paths, run, *steps, more))
            assert (code, f"is being written by process {first.pid} on" in message) == (2, True)
    finally:
        first.kill()
        first.wait()
    logged = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]
    assert logged == list(range(1, len(logged) + 1))
    code, message = refused(capsys, train_arguments(paths, run, *steps))
    assert (code, "holds an earlier run" in message) == (2, True)
    assert train(paths, run, "--overwrite") == 0
