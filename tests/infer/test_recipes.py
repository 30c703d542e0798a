"""Every recipe in the repository parses against its command's real options, and those with the papers' own settings of
their methods keep what the papers print.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from locret import lookups, scorers
from locret.cli.command import parse_options
from locret.infer.evaluation.methods import Method
from locret.policy.budget import units_of_share
from locret.scorers import Scorer

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


OPTIONS = {
    "eval": "locret.infer.evaluation.eval_options",
    "bench": "locret.infer.speed.bench_options",
    "infer": "locret.infer.command",
    "train": "locret.train.training_options",
}
"""Where the options are of the command that reads the recipes of a folder."""


def option_classes(job: str) -> tuple[type, ...]:
    classes: tuple[type, ...] = import_module(OPTIONS[job]).OPTION_CLASSES
    return classes


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_parses_says_how_to_run_it_and_names_what_exists(path: Path) -> None:
    job, name = path.relative_to(ROOT / "recipes").parts[0], str(path.relative_to(ROOT))
    # What a recipe leaves to the command line because only the user knows it.
    missing = {"infer": {"heads": "HEADS"}, "train": {"output": "OUTPUT"}, "eval": {"heads": "HEADS"}}.get(job, {})
    content = yaml.safe_load(path.read_text())
    extra = {key: value for key, value in missing.items() if key not in content}
    line = ["--config", str(path), *(part for key, value in extra.items() for part in (f"--{key}", value))]
    options, chosen = parse_options("test", "", option_classes(job), line)
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


# --- the papers' own settings ---


def recipe(name: str) -> tuple[dict[str, Method], Any]:
    (_, evaluation, budgets, _), _ = parse_options(
        "t", "", option_classes("eval"), ["--config", str(ROOT / "recipes" / "eval" / f"{name}.yaml")]
    )
    return {method.name: method for method in evaluation.chosen_methods()}, budgets


def scorer(method: str) -> Scorer:
    return scorers.get(method.partition("+")[0])


def test_nacl_splits_a_budget_as_its_code_and_its_table_do() -> None:
    def split(name: str, prompt: int) -> list[tuple[float, float, float]]:
        methods, budgets = recipe(name)
        units = units_of_share(budgets.budget_share, prompt)
        found = [scorer(method) for method in methods if method.startswith("nacl")]
        shares = []
        for one in found:
            assert isinstance(one, scorers.NACLScorer)
            protect, by_lot = one.protect_share * units / prompt, one.random_share * units / prompt
            shares.append((round(protect, 4), round(by_lot, 4), round(units / prompt - protect - by_lot, 4)))
            assert one.proxy_share * prompt <= one.most_proxies
        return shares

    assert split("nacl_infinitebench", 131_000) == [(0.01, 0.07, 0.12)] * 2
    assert split("nacl_longbench", 4000)[0] == (0.02, 0.12, 0.06)
    assert split("nacl_longbench", 4000)[1:3] == [(0.02, 0.18, 0.0), (0.02, 0.0, 0.18)]
    assert split("nacl_longbench_10", 4000) == [(0.01, 0.07, 0.02)]
    assert split("nacl_longbench_30", 4000) == [(0.015, 0.18, 0.105)]


@pytest.mark.parametrize(
    ("name", "group", "numbers"),
    [("sage_kv_qwen2.5", 7, (2048, 2560, 512)), ("sage_kv_llama_3.1_8b", 4, (2048, 2048, 1024))],
)
def test_sage_kv_splits_8192_units_as_the_paper_does(name: str, group: int, numbers: tuple[int, int, int]) -> None:
    methods, _ = recipe(name)
    one = next(scorer(method) for method in methods if method.startswith("sage_kv"))
    assert isinstance(one, scorers.SageKVScorer)
    places = 8192 - one.sink_tokens(8192, 0) - one.recent(8192)
    assert (one.sink_tokens(8192, 0), one.recent(8192), one.k or places // group) == numbers
    assert places == group * numbers[2]


def test_baselines_of_omnikv_give_half_of_30_percent_to_recent_units_and_1_percent_to_sinks() -> None:
    methods, budgets = recipe("omnikv_infinitebench")
    units = units_of_share(budgets.budget_share, 100_000)
    assert scorer("h2o:reduce=max").recent(units) == 15_000
    assert list(methods)[1:3] == ["h2o:reduce=max+prompt_end", "h2o:reduce=max"]
    sinks = scorers.get("streaming:sink_share=0.0333").sink_tokens(units, 0)
    assert list(methods)[3] == "streaming-original:sink_share=0.0333"
    assert sinks == pytest.approx(1000, abs=2)


@pytest.mark.parametrize(
    ("name", "layers", "filters", "ratio"),
    [
        ("omnikv_infinitebench", 32, (2, 8, 18), 0.0667),
        ("omnikv_longbench", 32, (2, 8, 18), 0.0667),
    ],
)
def test_omnikv_attends_to_the_share_that_leaves_30_percent_in_fast_memory(
    name: str, layers: int, filters: tuple[int, ...], ratio: float
) -> None:
    methods, budgets = recipe(name)
    assert budgets.budget_share == 0.3
    own = [lookups.get(text) for text in methods if text.startswith("omnikv")]
    assert own
    for one in own:
        assert one.filters(layers) == filters
        assert one.ratio(layers) == pytest.approx(ratio, abs=1e-3)
    if name == "omnikv_longbench":
        assert [one.selector for one in own] == ["last", "uniform", "exp"]
