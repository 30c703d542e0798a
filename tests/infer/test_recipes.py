"""Every recipe in the repository parses against its command's real options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from locret.cli.command import parse_options

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def option_classes(job: str) -> tuple[type, ...]:
    """Return the options of the command that reads a recipe."""
    if job == "eval":
        from locret.infer.evaluation.eval_options import OPTION_CLASSES as EVAL

        return EVAL
    if job == "bench":
        from locret.infer.speed.bench_options import OPTION_CLASSES as BENCH

        return BENCH
    if job == "infer":
        from locret.infer.command import OPTION_CLASSES

        return OPTION_CLASSES
    assert job == "train", f"recipes/{job} belongs to no command that this test knows"
    from locret.train.training_options import OPTION_CLASSES as TRAIN

    return TRAIN


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_parses_and_says_how_to_run_it(path: Path) -> None:
    job, name = path.relative_to(ROOT / "recipes").parts[0], str(path.relative_to(ROOT))
    # What a recipe leaves to the command line because only the user knows it.
    missing = {"infer": {"heads": "HEADS"}, "train": {"output": "OUTPUT"}}.get(job, {})
    content = yaml.safe_load(path.read_text())
    extra = [part for key, value in missing.items() if key not in content for part in (f"--{key}", value)]
    _, chosen = parse_options("test", "", option_classes(job), ["--config", str(path), *extra])
    assert set(content) <= chosen
    assert name in path.read_text(), "its header holds the command, ready to paste"


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("phi_3_mini_128k", (6000, 3072, 2500, 100)), ("llama_3.1_8b", (16384, 1024, 2500, 100))],
)
def test_recipes_have_the_papers_numbers(name: str, numbers: tuple[int, ...]) -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / "infer" / f"{name}.yaml").read_text())
    assert tuple(recipe[key] for key in ("budget", "chunk_size", "stabilizers", "local_len")) == numbers


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "eval").glob("*.yaml")), ids=lambda path: path.stem)
def test_evaluation_recipes_name_tasks_methods_and_policies_that_exist(path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    heads = [] if "heads" in content else ["--heads", "HEADS"]
    (_, evaluation, budgets, _), chosen = parse_options(
        "test", "", option_classes("eval"), ["--config", str(path), *heads]
    )
    assert evaluation.chosen_methods()
    assert evaluation.chosen_tasks()
    assert evaluation.token_lengths()
    assert [one.policy(1) for one in budgets.allotments(chosen, {})]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "bench").glob("*.yaml")), ids=lambda path: path.stem)
def test_benchmark_recipes_plan_what_they_say(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from locret.infer.speed.command import command

    content = yaml.safe_load(path.read_text())
    assert command(["--config", str(path), "--dry-run", "--quiet"]) == 0
    record = json.loads(capsys.readouterr().out)
    config = record["config"]
    assert config["shape"] == content["shape"]
    assert config["policy"]["budget"] == content["budget"]
    assert config["dtype"] == content["dtype"]
    assert config["policy"]["chunk_size"] == content["chunk_size"]
    header = path.read_text().partition("shape:")[0]
    assert all(f"{tokens // 1024}K" in header for tokens in config["lengths"])
    for row in record["plan"]:
        # What a run may take beside what is planned, so that it fits.
        assert "24 GB" not in header or sum(row["planned_bytes"].values()) + 1.5 * 2**30 <= 24e9
