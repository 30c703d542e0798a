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

from locret import RetentionPolicy, lookups, scorers
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


# --- the papers' own settings ---


def recipe(name: str) -> tuple[dict[str, Method], Any]:
    (_, evaluation, budgets, _), _ = parse_options(
        "t", "", option_classes("eval"), ["--config", str(ROOT / "recipes" / "eval" / f"{name}.yaml")]
    )
    return {method.name: method for method in evaluation.chosen_methods()}, budgets


def scorer(method: str) -> Scorer:
    return scorers.get(method.partition("+")[0])


def test_snapkv_has_its_longbench_configuration() -> None:
    methods, budgets = recipe("snapkv_longbench")
    name = "snapkv:window=32,kernel=7,pooling=max+prompt_end"
    assert scorer(name) == scorers.SnapKVScorer(window=32, kernel=7, pooling="max")
    assert methods[name].changes == {"when": "prompt_end"}
    assert [budget + budgets.local_len for budget in budgets.budget] == [1024, 2048, 4096]


def test_sirllm_keeps_as_many_units_as_its_code_does_between_chunks() -> None:
    methods, budgets = recipe("sirllm_infinitebench")
    assert budgets.budget == [4 + 1000 + 6000 - 3072, 4 + 1000 + 6000]
    assert scorer(next(iter(methods))) == scorers.SirLLMScorer(sinks=4, keep_recent=1000)
    (first, *_), budgets = recipe("sirllm_rock_paper_scissors")
    assert budgets.budget + budgets.local_len == 4 + 1020
    assert scorer(first) == scorers.SirLLMScorer(sinks=4, decay=0.9)


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
        ("omnikv_multi_step", 48, (3, 11, 30), 0.138),
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


def test_imdc_has_its_pruners_and_its_memory() -> None:
    methods, budgets = recipe("imdc_passkey")
    assert budgets.budget == 2048 + 4
    assert len(methods) == 7
    own = scorer("snapkv:queries=chunk,reduce=sum,sinks=4")
    assert own == scorers.SnapKVScorer(queries="chunk", reduce="sum", sinks=4)
    assert all(
        method.policy(RetentionPolicy(budget=2052, stabilizers=0)).positions == "compact" for method in methods.values()
    )
