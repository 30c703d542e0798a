"""Every recipe in the repository parses against its command's real options."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from locret.cli.command import parse_options

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


OPTIONS = {
    "eval": "locret.infer.evaluation.eval_options",
    "bench": "locret.infer.speed.bench_options",
    "infer": "locret.infer.command",
    "train": "locret.train.training_options",
}
"""Where the options are of the command that reads the recipes of a folder."""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_parses_says_how_to_run_it_and_names_what_exists(path: Path) -> None:
    job, name = path.relative_to(ROOT / "recipes").parts[0], str(path.relative_to(ROOT))
    # What a recipe leaves to the command line because only the user knows it.
    missing = {"infer": {"heads": "HEADS"}, "train": {"output": "OUTPUT"}, "eval": {"heads": "HEADS"}}.get(job, {})
    content = yaml.safe_load(path.read_text())
    extra = {key: value for key, value in missing.items() if key not in content}
    line = ["--config", str(path), *(part for key, value in extra.items() for part in (f"--{key}", value))]
    options, chosen = parse_options("test", "", import_module(OPTIONS[job]).OPTION_CLASSES, line)
    assert set(content) <= chosen
    assert name in path.read_text(), "its header holds the command, ready to paste"
    if job == "eval":
        _, evaluation, budgets, _ = options
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
    assert all(config["policy"][name] == content[name] for name in ("budget", "chunk_size"))
    header = path.read_text().partition("shape:")[0]
    assert all(f"{tokens // 1024}K" in header for tokens in config["lengths"])
    for row in record["plan"]:
        # What a run may take beside what is planned, so that it fits.
        assert "24 GB" not in header or sum(row["planned_bytes"].values()) + 1.5 * 2**30 <= 24e9
