"""`locret-train`: dry run, recipes, adapters, rows, held-out rows, publishing, what heads say, and refusals."""

from __future__ import annotations

import json
import os
from functools import partialmethod
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from embedded import tiny_tokenizer
from training_cases import equal, records, refused, train, train_arguments, weights, write_backbone, write_rows
from transformers import Phi3Config

from locret import RetainingHeads
from locret.base.files import locked, visible
from locret.data.training.stream import TrainingStream
from locret.heads.config import usual_width
from locret.heads.fingerprint import norm_fingerprint, weight_fingerprint
from locret.loading import load_config, load_model
from locret.loading.options import BackboneSource
from locret.train import run_log
from locret.train.command import command
from locret.train.trainer import Trainer
from locret.train.training_options import PAPER, Loss, OptimizerOptions, parse

REPOSITORY = Path(__file__).parents[2]


def load_backbone(folder: Path) -> torch.nn.Module:
    source = BackboneSource(model=str(folder))
    return load_model(source, load_config(source), torch.device("cpu"), torch.float32)


# -- options and plan ------------------------------------------------------------------------------------------------


def test_dry_run_prints_options_and_memory_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = (write_backbone(tmp_path / "model", weights=False), write_rows(tmp_path / "rows.json"))
    before = sorted(tmp_path.rglob("*"))
    assert train(paths, tmp_path / "run", "--dry-run") == 0
    text = capsys.readouterr().out
    shown = yaml.safe_load(text)
    assert (shown["steps"], shown["lr"], shown["alpha"], shown["dtype"]) == (6, 5e-4, 0.0, "float32")
    assert "\n# 6 rows\n# plan: 6 steps on " in text
    assert train(paths, tmp_path / "run", "--dry-run", "--json", "--dtype=bfloat16") == 0
    record = json.loads(capsys.readouterr().out)
    plan, count = record["memory_bytes"], 2 * 8 * (64 + 2)  # layers * d_R * (features + scores)
    assert (plan["heads"], plan["gradients"], plan["optimizer"]) == (4 * count, 4 * count, 8 * count)
    assert plan["total"] == sum(count for name, count in plan.items() if name != "total")
    assert record["config"]["mixed_precision"] == "bf16"
    assert sorted(tmp_path.rglob("*")) == before
    model = load_backbone(write_backbone(tmp_path / "model"))
    assert plan["backbone"] == sum(weight.nbytes // 2 for weight in model.parameters())


def test_recipes_of_the_paper_change_nothing_of_its_training() -> None:
    for name in ("llama_3.1_8b", "phi_3_mini_128k"):
        given, chosen = parse([f"--config={REPOSITORY / 'recipes' / 'train' / name}.yaml", "--output=somewhere"])
        assert set(chosen) == {"model", "dataset", "policy", "output", "label_kind", "objective", "alpha"}
        loss: Any = next(one for one in given if isinstance(one, Loss))
        assert all(getattr(loss, one) == value for one, value in vars(PAPER).items())
    o = OptimizerOptions()
    assert (o.steps, o.lr, o.betas, o.warmup, o.clip, o.clip_limit) == (3000, 5e-4, (0.9, 0.95), 2000, "value", 0.5)
    assert usual_width(Phi3Config()) == 1024


# -- what is trained and what is said of it --------------------------------------------------------------------------


def test_heads_and_output_say_how_they_were_trained(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--label-kind=log_attention", "--include-last-prompt-token", "--objective=ranking"]
    policy = ["--policy.budget=64", "--policy.stabilizers=8", "--base-model=org/backbone", "--revision=v1", "--json"]
    assert train(paths, tmp_path / "run", *options, *policy) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["step"], shown["rows"], shown["stopped"], shown["output"]) == (6, 6, None, str(tmp_path / "run"))
    config: Any = RetainingHeads.from_pretrained(tmp_path / "run").config
    assert (config.label["kind"], config.label["include_last_prompt_token"]) == ("log_attention", True)
    assert (config.policy["budget"], config.policy["stabilizers"]) == (64, 8)
    assert (config.training["dataset"], config.training["backbone"]) == ("rows.json", "model")
    assert config.training["objective"] == "ranking"
    assert config.training["final_ranking"] == records(tmp_path / "run")[-1]["ranking"]
    assert (config.base_model, config.base_model_revision) == ("org/backbone", "v1")
    assert config.base_weights == norm_fingerprint(load_backbone(paths[0]))
    assert str(tmp_path) not in (tmp_path / "run" / "config.json").read_text()
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["config"]["label_kind"], record["versions"]["torch"]) == ("log_attention", torch.__version__)


def test_an_adapter_changes_training(paths: tuple[Path, Path], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(load_backbone(paths[0]), lora).save_pretrained(tmp_path / "adapter")
    for name, more in (("with", [f"--adapter={tmp_path / 'adapter'}"]), ("without", [])):
        assert train(paths, tmp_path / name, *more, "--steps=2", "--warmup-steps=0") == 0
    assert records(tmp_path / "with")[0]["total"] != records(tmp_path / "without")[0]["total"]
    config: Any = RetainingHeads.from_pretrained(tmp_path / "with").config
    assert config.training["adapter"] == "adapter"
    assert RetainingHeads.from_pretrained(tmp_path / "without").config.base_weights == weight_fingerprint(
        load_backbone(paths[0])
    )


def test_init_from_goes_on_with_trained_heads(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(paths, tmp_path / "first") == 0
    arguments = [f"--model={paths[0]}", f"--dataset={paths[1]}", f"--init-from={tmp_path / 'first'}", "--steps=1"]
    assert command([*arguments, "--warmup-steps=0", "--lr=1.0e-9", f"--output={tmp_path / 'second'}"]) == 0
    first, second = weights(tmp_path / "first"), weights(tmp_path / "second")
    assert all(torch.allclose(first[name], second[name], atol=1e-7) for name in first)
    before, after = (RetainingHeads.from_pretrained(tmp_path / name).config.training for name in ("first", "second"))
    assert before is not None
    assert after is not None
    assert (after["steps"], after["went_on_from"], after["earlier"]) == (1, "first", before)
    card = (tmp_path / "second" / "README.md").read_text()
    assert card.index("| Steps | 1 |") < card.index("### Before that") < card.index(f"| Steps | {before['steps']} |")
    code, message = refused(capsys, [*arguments, "--hidden-dim=9", f"--output={tmp_path / 'third'}"])
    assert (code, "--hidden-dim 9 differs from 8 of the heads in --init-from" in message) == (2, True), message


DOCUMENT = "The tower has 10 steps. The number of Oslo is 314. The sky is blue."
PAIRS = [("What is the number of Oslo?", "It is 314."), ("How many steps has the tower?", "10 steps.")]
SHARED = {"document": DOCUMENT, "questions": [{"question": q, "answer": a} for q, a in PAIRS]}


def test_a_row_of_questions_is_its_document_and_what_each_adds_and_trains(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizer()
    example = next(TrainingStream([SHARED], tokenizer, seed=0, max_length=None, answers="each"))
    assert tokenizer.decode(example.prompt_ids[0]).endswith("The sky is blue.")
    for (question, answer), (asked, answered) in zip(PAIRS, example.asked, strict=True):
        alone = {"prompt": f"{DOCUMENT}\n{question}", "answer": answer}
        expected = next(TrainingStream([alone], tokenizer, seed=0, max_length=None))
        assert torch.cat([example.prompt_ids, asked], dim=1).equal(expected.prompt_ids)
        assert answered.equal(expected.answer_ids)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(SHARED) + "\n" for _ in range(4)))
    both = (paths[0], tmp_path / "rows.jsonl")
    assert train(both, tmp_path / "run", "--answers=each", "--steps=3", "--eval-rows=2", "--policy.budget=32") == 0
    config: Any = RetainingHeads.from_pretrained(str(tmp_path / "run")).config
    assert "each asked by itself" in config.label["reduction"]
    assert config.policy["head_shares"] is None, "this tokenizer cannot write the passages"
    shares = ["--policy.budget=32", "--policy.head_budgets=shares"]
    code, message = refused(capsys, train_arguments(both, tmp_path / "none", *shares))
    assert (code, "--policy.head-budgets shares needs a share of each KV head, which cannot" in message) == (2, True)


GOOD = b'{"instruction": "The number of Oslo is 314. What is it?", "output": "It is 314."}'
BAD_LINES = {
    "no answer": b'{"instruction": "Who?", "output": ""}',
    "wrong type": b'{"instruction": 7, "output": "Me."}',
    "not JSON": b'{"instruction": "Who?", "outp',
    "invalid UTF-8": b'{"instruction": "Who?", "output": "\xe9"}',
    "longer than the context": b'{"instruction": "' + b"the house " * 2100 + b'", "output": "Me."}',
}


def test_bad_lines_are_left_out_and_reported(
    paths: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(b"\n".join([GOOD, *BAD_LINES.values(), GOOD]))
    assert train((paths[0], rows), tmp_path / "run", "--steps=3") == 0
    report = json.loads((tmp_path / "run" / "dropped_rows.json").read_text())
    assert (report["read"], report["used"], report["rows"]) == (7, 2, 7)
    for row, reason in enumerate(BAD_LINES, start=1):
        found = report["dropped"].pop(reason)
        assert found["count"] == 1
        assert found["first_rows"][0].startswith(f"row {row} (counted from 0) ")
    assert not report["dropped"]
    assert "rows left out of 7 read: " in caplog.text
    config: Any = RetainingHeads.from_pretrained(tmp_path / "run").config
    assert config.training["dropped_rows"] == dict.fromkeys(BAD_LINES, 1)


# -- held-out rows ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(paths: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the backbone and a file of 40 rows."""
    return paths[0], write_rows(tmp_path_factory.mktemp("many") / "rows.json", rows=40)


def test_rows_are_held_out_by_default_and_evaluations_show_what_is_learned(
    many: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name, more in (("default", []), ("none", ["--eval-rows=0"])):
        assert train(many, tmp_path / name, "--steps=12", *more) == 0
    assert equal(weights(tmp_path / "default"), weights(tmp_path / "none"))
    assert [one["step"] for one in records(tmp_path / "default") if "eval_overlap" in one] == [0, 12]
    assert json.loads((tmp_path / "default" / "run.json").read_text())["config"]["eval_rows"] == 8
    capsys.readouterr()
    caplog.clear()
    options = ["--steps=60", "--lr=1.0e-2", "--eval-rows=6", "--eval-every=25", "--log-every=30"]
    assert train(many, tmp_path / "run", *options) == 0
    evaluated = [record for record in records(tmp_path / "run") if "eval_overlap" in record]
    assert [record["step"] for record in evaluated] == [0, 25, 50, 60]
    assert evaluated[-1]["eval_ranking"] < evaluated[0]["eval_ranking"]
    before, after = evaluated[0]["eval_overlap"], evaluated[-1]["eval_overlap"]
    out = capsys.readouterr().out
    assert f"overlap {after:.3f} on 6 rows that were not trained on; untrained heads {before:.3f}, chance" in out
    assert ("learned nothing" in caplog.text) == (after <= before)


def test_the_time_that_is_left_is_that_of_steps_alone(
    many: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks, evaluate = count(), Trainer._evaluate
    slow = partialmethod(lambda trainer: [*islice(ticks, 10**6)] and evaluate(trainer))
    monkeypatch.setattr(run_log, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))
    monkeypatch.setattr(Trainer, "_evaluate", slow)  # takes 1,000 s
    assert train(many, tmp_path / "run", "--steps=4", "--eval-rows=2", "--eval-every=4", "--log-every=1") == 0
    assert capsys.readouterr().err.count(" 00:00 left") == 4


OPTIONS = [
    (["--skip-bad-rows=false"], 'option "--skip-bad-rows" was retired; release 0.1.0'),
    (["--label-kind=kvzip_plus"], 'label kind "kvzip_plus" was retired; release 0.1.0'),
    (["--steps=0"], "--steps 0 is too small; it must be 1 or more"),
    (["--warmup-steps=6"], "--warmup-steps 6 is not below --steps 6, so the learning rate would never reach"),
    (["--hidden-dim=100000000000"], "--hidden-dim makes heads of"),
    (["--eval-every=2"], "--eval-every 2 evaluates on held-out rows, and there are none; give --eval-rows 8"),
    (["--eval-rows=6"], "--eval-rows 6 leaves nothing to train on"),
    (["--label-kind=softmax"], 'label kind "softmax" is unknown; choose one of logit, log_attention'),
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
