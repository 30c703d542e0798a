"""`locret-train`: dry run, recipes, adapters, publishing, and what heads say about their training."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from training_cases import refused, token_ids, train, train_arguments, write_backbone, write_rows

from locret import RetainingHeads
from locret.heads.fingerprint import weight_fingerprint
from locret.labels.labels import answer_labels
from locret.loading import load_config, load_model
from locret.loading.options import BackboneSource
from locret.train.command import command
from locret.train.training_options import OptimizerOptions

REPOSITORY = Path(__file__).parents[2]
RECIPES = sorted((REPOSITORY / "recipes" / "train").rglob("*.yaml"))


def load_backbone(folder: Path, adapter: str | None = None, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    source = BackboneSource(model=str(folder), adapter=adapter)
    return load_model(source, load_config(source), torch.device("cpu"), dtype)


def test_a_dry_run_prints_options_and_memory_without_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_backbone(tmp_path / "model", weights=False)
    assert not list(model.glob("*.safetensors"))
    paths = (model, write_rows(tmp_path / "rows.json"))
    before = sorted(tmp_path.rglob("*"))
    assert train(paths, tmp_path / "run", "--dry-run") == 0
    text = capsys.readouterr().out
    shown = yaml.safe_load(text)
    assert (shown["steps"], shown["lr"], shown["alpha"], shown["dtype"]) == (6, 5e-4, 2.5e-3, "float32")
    assert "\n# 6 rows\n# plan: 6 steps on " in text
    assert text.count("gradients") == 1
    assert train(paths, tmp_path / "run", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)["memory_bytes"]
    weights = 2 * 8 * (64 + 2)  # layers * d_R * (features + scores)
    assert (plan["heads"], plan["gradients"], plan["optimizer"]) == (4 * weights, 4 * weights, 8 * weights)
    assert plan["total"] == sum(count for name, count in plan.items() if name != "total")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_memory_plan_counts_the_backbones_bytes(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(paths, tmp_path / "run", "--dry-run", "--json", "--dtype=bfloat16")
    record = json.loads(capsys.readouterr().out)
    model = load_backbone(paths[0], dtype=torch.bfloat16)
    assert record["memory_bytes"]["backbone"] == sum(weight.nbytes for weight in model.parameters())
    assert record["config"]["mixed_precision"] == "bf16"


def test_json_is_the_only_thing_on_standard_output(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(paths, tmp_path / "run", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["rows"], record["stopped"]) == (6, 6, None)
    assert record["output"] == str(tmp_path / "run")


def test_heads_say_how_they_were_trained(paths: tuple[Path, Path], tmp_path: Path) -> None:
    options = ["--label-kind=log_attention", "--include-last-prompt-token", "--policy.budget=64"]
    assert train(paths, tmp_path / "run", *options, "--policy.stabilizers=8") == 0
    config = RetainingHeads.from_pretrained(tmp_path / "run").config
    assert config.label is not None
    assert config.label["kind"] == "log_attention"
    assert config.label["include_last_prompt_token"] is True
    assert config.policy is not None
    assert (config.policy["budget"], config.policy["stabilizers"]) == (64, 8)
    assert config.training is not None
    assert (config.training["dataset"], config.training["backbone"]) == ("rows.json", "model")
    assert str(tmp_path) not in (tmp_path / "run" / "config.json").read_text()
    model = load_backbone(paths[0])
    assert config.base_weights == weight_fingerprint(model)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["label_kind"] == "log_attention"
    assert record["versions"]["torch"] == torch.__version__


def test_heads_trained_to_rank_say_so(paths: tuple[Path, Path], tmp_path: Path) -> None:
    options = ["--objective=ranking", "--temperature=2", "--label-kind=log_attention"]
    assert train(paths, tmp_path / "run", *options) == 0
    training = RetainingHeads.from_pretrained(tmp_path / "run").config.training
    assert training is not None
    assert training["objective"] == "ranking, temperature 2.0"
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert training["final_ranking"] == records[-1]["ranking"]
    assert "regression" not in records[-1]


def test_labels_from_reconstruction_need_no_answers(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is the one on rows that ask for the text and answer with it, written by hand."""
    from locret.data.training.rows import REQUEST

    texts = [row["instruction"] for row in json.loads(paths[1].read_text())]
    (tmp_path / "texts.json").write_text(json.dumps([{"text": text} for text in texts]))
    rows = [{"instruction": f"{text}\n\n{REQUEST}", "output": text} for text in texts]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    assert train((paths[0], tmp_path / "texts.json"), tmp_path / "texts", "--label-source=reconstruction") == 0
    assert train((paths[0], tmp_path / "rows.json"), tmp_path / "rows") == 0
    ours, byhand = (RetainingHeads.from_pretrained(tmp_path / name) for name in ("texts", "rows"))
    assert all(torch.equal(weight, byhand.state_dict()[name]) for name, weight in ours.state_dict().items())
    assert ours.config.label is not None
    assert ours.config.label["source"] == "reconstruction"
    assert "maximum over the tokens of the text's repetition" in (tmp_path / "texts" / "README.md").read_text()
    code, message = refused(
        capsys, train_arguments((paths[0], tmp_path / "texts.json"), tmp_path / "answers", "--skip-bad-rows=false")
    )
    assert (code, "has no answer (text schema, text, for --label-source reconstruction)" in message) == (2, True)


def test_a_recipe_is_overridden_by_flags(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {paths[0]}\ndataset: {paths[1]}\nsteps: 7\nlr: 1.0e-3\npolicy: {{budget: 3000}}\n")
    assert command([f"--config={recipe}", f"--output={tmp_path / 'run'}", "--steps=9", "--dry-run", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert (config["steps"], config["lr"], config["policy"]["budget"]) == (9, 1e-3, 3000)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses(recipe: Path) -> None:
    from locret.train.training_options import parse
    from locret.train.training_run import TrainingRun

    given = yaml.safe_load(recipe.read_text())
    missing = [f"--{name}=somewhere" for name in ("dataset", "output") if name not in given]
    training = TrainingRun(*parse([f"--config={recipe}", *missing]))
    assert training.backbone.model == given["model"]
    assert "policy" in training.chosen


def test_paper_recipes_change_nothing_of_the_papers_training() -> None:
    from locret.train.training_options import parse
    from locret.train.training_run import TrainingRun

    for name in ("llama_3.1_8b", "phi_3_mini_128k"):
        recipe = REPOSITORY / "recipes" / "train" / f"{name}.yaml"
        training = TrainingRun(*parse([f"--config={recipe}", "--output=somewhere"]))
        assert training.chosen == {"model", "dataset", "policy", "output"}
        o = training.optimizer
        assert (o.steps, o.lr, o.betas, o.warmup, o.clip, o.clip_limit) == (
            3000,
            5e-4,
            (0.9, 0.95),
            2000,
            "value",
            0.5,
        )
        assert (training.loss.alpha, training.loss.label_kind) == (2.5e-3, "logit")
        assert training.data.max_prompt_tokens == 10240
        if name.startswith("phi"):  # the config of the paper's own backbone is known without the Hub
            training.resolve(torch.device("cpu"))
            assert training.backbone.hidden_dim == 1024


# -- adapters and second stages --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(paths: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a LoRA adapter with random, not zero, weights."""
    from peft import LoraConfig, get_peft_model

    base = load_backbone(paths[0])
    lora = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    folder = tmp_path_factory.mktemp("adapter")
    lora.save_pretrained(folder)
    return folder


def test_a_lora_adapter_changes_labels_and_training(paths: tuple[Path, Path], adapter: Path, tmp_path: Path) -> None:
    plain, adapted = load_backbone(paths[0]), load_backbone(paths[0], adapter=str(adapter))
    assert not any(parameter.requires_grad for parameter in adapted.parameters())
    row = token_ids(20), token_ids(5, seed=1)
    labels = answer_labels(adapted, *row)
    assert (labels - answer_labels(plain, *row)).abs().max() > 0.1
    merged = adapted.merge_and_unload()  # type: ignore[operator]
    torch.testing.assert_close(labels, answer_labels(merged, *row), atol=1e-4, rtol=0)
    assert train(paths, tmp_path / "with", f"--adapter={adapter}", "--steps=2", "--warmup-steps=0") == 0
    assert train(paths, tmp_path / "without", "--steps=2", "--warmup-steps=0") == 0
    one, other = (
        json.loads((tmp_path / name / "log.jsonl").read_text().splitlines()[0]) for name in ("with", "without")
    )
    assert one["total"] != other["total"]
    config = RetainingHeads.from_pretrained(tmp_path / "with").config
    assert config.training is not None
    assert config.training["adapter"] == adapter.name


def test_init_from_goes_on_with_trained_heads(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(paths, tmp_path / "first") == 0
    arguments = [f"--model={paths[0]}", f"--dataset={paths[1]}", f"--init-from={tmp_path / 'first'}", "--steps=1"]
    assert command([*arguments, "--warmup-steps=0", "--lr=1.0e-9", f"--output={tmp_path / 'second'}"]) == 0
    first, second = (RetainingHeads.from_pretrained(tmp_path / name).state_dict() for name in ("first", "second"))
    assert all(torch.allclose(first[name], second[name], atol=1e-7) for name in first)
    before, after = (RetainingHeads.from_pretrained(tmp_path / name).config.training for name in ("first", "second"))
    assert before is not None
    assert after is not None
    assert "went_on_from" not in before
    assert (after["steps"], after["went_on_from"], after["earlier"]) == (1, "first", before)
    card = (tmp_path / "second" / "README.md").read_text()
    assert card.index("| Steps | 1 |") < card.index("### Before that") < card.index(f"| Steps | {before['steps']} |")
    code, message = refused(capsys, [*arguments, "--hidden-dim=9", f"--output={tmp_path / 'third'}"])
    assert code == 2
    assert "--hidden-dim 9 differs from 8 of the heads in --init-from" in message


# -- publishing ------------------------------------------------------------------------------------------------------


def test_trained_heads_are_published_and_load_from_the_hub(paths: tuple[Path, Path], tmp_path: Path, hub: Any) -> None:
    assert train(paths, tmp_path / "run", "--push-to-hub=somebody/tiny-heads") == 0
    published = RetainingHeads.from_pretrained("somebody/tiny-heads").state_dict()
    trained = RetainingHeads.from_pretrained(tmp_path / "run").state_dict()
    assert all(torch.equal(trained[name], published[name]) for name in trained)
    assert set(hub.repos["somebody/tiny-heads"].files()) >= {"config.json", "model.safetensors", "README.md"}


def test_publishing_is_checked_before_training(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--push-to-hub=no-slash"))
    assert (code, "--repo no-slash is not a repository name; use org/name" in message) == (2, True)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--push-to-hub=somebody/heads"))
    assert (code, "cannot push to somebody/heads without a token; set HF_TOKEN" in message) == (1, True)
    assert not (tmp_path / "run").exists()


# -- the rest --------------------------------------------------------------------------------------------------------


def test_a_warm_up_that_never_ends_is_refused_and_the_default_follows_the_steps(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = refused(capsys, train_arguments(paths, tmp_path / "run", "--warmup-steps=6", "--dry-run"))
    assert (code, "--warmup-steps 6 is not below --steps 6, so the learning rate would never reach" in message) == (
        2,
        True,
    )
    for steps, warmup in [(1, 0), (40, 26), (3000, 2000), (9000, 2000)]:
        assert OptimizerOptions(steps=steps).warmup == warmup


def test_help_cites_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        command(["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Steps of linear warm-up; if none, 2,000 (Locret, section 4.1)" in text
    assert "Retention policy to recommend with the heads" in text


@pytest.mark.slow
def test_labels_loss_and_step_need_no_more_than_torch_and_transformers() -> None:
    script = (
        "import sys\n"
        "for name in ('datasets', 'accelerate', 'peft', 'tensorboard'):\n"
        "    sys.modules[name] = None\n"
        "from locret.train import answer_labels, retention_loss, train_step\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_hub_id_of_a_local_backbone_is_recorded_and_other_ids_are_refused(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    assert train(paths, tmp_path / "run", "--base-model", "org/backbone", "--revision", "v1") == 0
    heads = RetainingHeads.from_pretrained(tmp_path / "run")
    assert (heads.config.base_model, heads.config.base_model_revision) == ("org/backbone", "v1")
    assert heads.config.base_weights is None
    assert "org/backbone" in (tmp_path / "run" / "README.md").read_text()
    model = load_backbone(paths[0])
    heads.check_matches(model)
    model.config._name_or_path = "org/another"
    with pytest.raises(ValueError, match="base_model is .*org/another"):
        heads.check_matches(model)
