"""`locret-train` refuses what cannot work with one clear sentence, before anything is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from training_cases import refused, train, train_arguments, write_backbone

from locret.base.files import locked, visible

OPTIONS = [
    (["--skip-bad-rows=false"], 'option "--skip-bad-rows" was retired; release 0.1.0'),
    (["--label-kind=kvzip_plus"], 'label kind "kvzip_plus" was retired; release 0.1.0'),
    (["--steps=0"], "--steps 0 is too small; it must be more than 0"),
    (["--warmup-steps=6"], "--warmup-steps 6 is not below --steps 6, so the learning rate would never reach"),
    (["--hidden-dim=100000000000"], "--hidden-dim makes heads of"),
    (["--eval-every=2"], "--eval-every 2 evaluates on held-out rows, and there are none; give --eval-rows 8"),
    (["--eval-rows=6"], "--eval-rows 6 leaves nothing to train on"),
    (["--label-kind=softmax"], 'label kind "softmax" is unknown; did you mean logit or log_attention?'),
    (["--model=no/such/model"], "--model no/such/model: there is no such folder; give"),
    (["--init-from=no/such/heads"], "there is no folder 'no/such/heads'; give a folder of retaining heads"),
    (["--report-to=tensorbord"], "--report-to tensorbord is not one of tensorboard, wandb"),
]


@pytest.mark.parametrize(("more", "expected"), OPTIONS, ids=[" ".join(more) for more, _ in OPTIONS])
def test_a_bad_option_is_one_sentence_and_leaves_nothing(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], expected: str
) -> None:
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", *more))
    assert (code, expected in message) == (2, True), message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2"}, "adds its positions to the hidden states"),
        (None, "cannot be loaded"),
        ({"hidden_size": 2**17, "intermediate_size": 2**19, "num_hidden_layers": 400}, "choose a smaller backbone or"),
    ],
    ids=["gpt2", "no weights", "too large"],
)
def test_a_backbone_that_cannot_be_trained_on_is_refused_from_its_config(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Any, expected: str
) -> None:
    model = write_backbone(tmp_path / "model", weights=False)
    found = json.loads((model / "config.json").read_text()) if "hidden_size" in (config or {}) else {}
    if config is not None:
        (model / "config.json").write_text(json.dumps({**found, **config}))
    code, message = refused(capsys, train_arguments((model, paths[1]), tmp_path / "run"))
    assert (code, expected in message) == (2, True), message
    assert not (tmp_path / "run").exists()


# -- the output folder -----------------------------------------------------------------------------------------------


def test_an_earlier_run_is_not_overwritten_unasked(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(paths, tmp_path / "run") == 0
    (tmp_path / "run" / "notes.txt").write_text("mine")
    # A model that cannot be loaded shows that the folder is looked at first.
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--model=no/such/model"))
    assert (code, "holds an earlier run; choose another folder, go on with --resume " in message) == (2, True)
    assert train(paths, tmp_path / "run", "--overwrite", "--steps=2", "--warmup-steps=0") == 0
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 2
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("more", [[], ["--resume=auto"], ["--overwrite"]])
def test_a_folder_with_something_else_or_of_another_run_is_never_touched(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", *more))
    assert (code, "holds something else than a training run (config.json); choose a new" in message) == (2, True)
    assert (tmp_path / "run" / "config.json").read_text() == "{}"
    with locked(tmp_path / "busy", "--output"):
        if more:
            (tmp_path / "busy" / "run.json").write_text('{"config": {}}')
        code, message = refused(capsys, train_arguments(paths, tmp_path / "busy", *more))
        assert (code, f"is being written by process {os.getpid()} on" in message) == (2, True)
        assert visible(tmp_path / "busy") == (["run.json"] if more else [])
