"""Budgets in bytes and shares, plans that depend on the prompt's length, and what `--dry-run` shows of them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infer_cases import write_text

from locret import loading, scorers
from locret.infer import chunk_size
from locret.infer.infer_options import ModelOptions, PolicyOptions
from locret.infer.sizing import PlannedRun, final_policy

Infer = Callable[..., Any]
SMALL = ("--scorer", "random", "--chunk-size", 32, "--local-len", 8, "--max-new-tokens", 8)


@pytest.fixture
def call(infer: Infer, backbone: Path, text: Path) -> Infer:
    """Return a function that runs the command with a training-free scorer and small numbers."""

    def run(*more: object) -> Any:
        return infer("--model", backbone, "--prompt-file", text, *SMALL, *more)

    return run


@pytest.fixture
def ask(call: Infer) -> Infer:
    """Return a function that asks for JSON and returns the record."""

    def run(*more: object) -> Any:
        outcome = call("--json", *more)
        assert outcome.code == 0, outcome.err
        return json.loads(outcome.out)

    return run


@pytest.mark.slow
def test_memory_is_filled_but_not_exceeded(ask: Infer) -> None:
    for memory, count in (("64KiB", 64 << 10), ("150kB", 150_000)):
        record = ask("--kv-memory", memory)
        budget, stabilizers = record["policy"]["budget"], record["policy"]["stabilizers"]
        assert record["peak_cache_bytes"] == record["planned_cache_bytes"] <= count
        assert record["kept_units"] == budget + 8
        assert stabilizers == budget // 4, "the default protects 2500, which is more than there are"
        more = ask("--budget", budget + 1, "--stabilizers", 0, "--dry-run")
        assert more["planned_cache_bytes"] > count
        assert ask("--kv-memory", memory, "--dry-run")["planned_cache_bytes"] == record["planned_cache_bytes"]


def test_memory_counts_the_beams_and_the_answer(ask: Infer) -> None:
    alone, beams = (ask("--kv-memory", "256KiB", "--num-beams", n, "--dry-run") for n in (1, 3))
    assert beams["policy"]["budget"] < alone["policy"]["budget"] / 3
    assert beams["planned_cache_bytes"] <= 256 << 10
    long = ask("--kv-memory", "256KiB", "--max-new-tokens", 200, "--dry-run")
    assert long["policy"]["budget"] < alone["policy"]["budget"] - 100


@pytest.mark.parametrize("growth", [("--memory", "linear"), ("--memory", "sqrt", "--decremental")])
@pytest.mark.slow
def test_memory_holds_more_where_it_grows(ask: Infer, growth: tuple[str, ...]) -> None:
    fixed, growing = ask("--kv-memory", "64KiB"), ask("--kv-memory", "64KiB", *growth)
    assert growing["policy"]["budget"] >= fixed["policy"]["budget"]
    assert growing["peak_cache_bytes"] == growing["planned_cache_bytes"] <= 64 << 10


@pytest.mark.slow
def test_memory_that_holds_the_prompt_needs_no_larger_budget(ask: Infer) -> None:
    record = ask("--kv-memory", "1GiB", "--memory", "linear", "--layer-budgets", "pyramid")
    assert record["policy"]["budget"] == record["prompt_tokens"] == record["kept_units"]


@pytest.mark.slow
def test_a_share_is_that_of_the_counted_prompt(ask: Infer, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = ask("--budget-share", 0.1)
    assert record["policy"]["budget"] == record["prompt_tokens"] // 10
    assert record["kept_units"] == record["policy"]["budget"] + 8
    plan = ask("--budget-share", 0.1, "--dry-run")
    assert (plan["prompt_tokens"], plan["policy"]) == (record["prompt_tokens"], record["policy"])
    assert plan["planned_cache_bytes"] == record["peak_cache_bytes"]
    assert plan["options"]["budget_share"] == 0.1
    with text.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert ask("--budget-share", 0.1, "--prompt-file", "-")["answer"] == record["answer"]


def test_a_recommended_budget_gives_way_and_recommended_stabilizers_stay_if_they_fit(
    infer: Infer, backbone: Path, heads: Path, text: Path
) -> None:
    usual = ("--model", backbone, "--heads", heads, "--prompt-file", text, "--dry-run")
    large = json.loads(infer(*usual, "--kv-memory", "1MiB").out)["policy"]
    small = json.loads(infer(*usual, "--kv-memory", "64KiB", "--max-new-tokens", 4).out)["policy"]
    assert large["budget"] > 64
    assert (large["stabilizers"], large["chunk_size"]) == (16, 32)
    assert small["stabilizers"] == min(16, small["budget"] // 4)


def test_dry_run_shows_the_steps_as_data_and_as_a_table(call: Infer) -> None:
    outcome = call("--budget", 64, "--stabilizers", 8, "--dry-run")
    record = json.loads(outcome.out)
    assert record["prompt_tokens"] is None
    assert [(row["chunk"], row["attended"], row["kept"], row["protected"]) for row in record["steps"]] == [
        (32, 96, 64, 8),
        (8, 72, 72, 0),
    ]
    assert [line.split() for line in outcome.err.splitlines()] == [
        ["step", "chunk", "attends", "to", "keeps", "protects"],
        ["1-", "32", "96", "64", "8"],
        ["local", "8", "72", "72", "0"],
    ]
    assert record["not_given"] == []
    assert call("--budget", 64, "--stabilizers", 8, "--dry-run", "--quiet").err == ""


def test_dry_run_says_what_follows_from_the_budget(infer: Infer, backbone: Path, heads: Path, text: Path) -> None:
    usual = ("--model", backbone, "--prompt-file", text, "--dry-run", "--budget", 1024)
    outcome = infer(*usual, "--scorer", "snapkv", "--chunk-size", 64)
    assert json.loads(outcome.out)["not_given"] == ["stabilizers", "local_len"]
    assert outcome.err.splitlines()[0] == (
        "not given, so from a budget of 1,024: stabilizers 256 (else 2,500), local_len 100"
    )
    outcome = infer("--model", backbone, "--heads", heads, "--prompt-file", text, "--dry-run", "--budget", 20)
    assert outcome.err.splitlines()[0] == (
        "not given, so from a budget of 20: stabilizers 5 (else 16), local_len 8, chunk_size 32"
    )


def test_dry_run_counts_the_prompt_where_the_plan_depends_on_it(ask: Infer, call: Infer, tmp_path: Path) -> None:
    file = write_text(tmp_path / "some.txt", 3000)
    options = ("--prompt-file", file, "--budget", 32, "--stabilizers", 8, "--memory", "linear", "--decremental")
    shrinking = (*options, "--min-chunk", 8)
    plan, record = ask(*shrinking, "--dry-run"), ask(*shrinking)
    assert plan["prompt_tokens"] == record["prompt_tokens"]
    assert (
        sum(row["chunk"] * (row["last_step"] - row["first_step"] + 1) for row in plan["steps"]) == plan["prompt_tokens"]
    )
    assert len({row["attended"] for row in plan["steps"][1:-1]}) == 1
    assert plan["planned_cache_bytes"] == record["peak_cache_bytes"]
    outcome = call(*options[:-1], "--layer-budgets", "pyramid", "--dry-run")
    rows = json.loads(outcome.out)["steps"]
    assert rows[-2]["kept"] == [8 + 47, 8 + 1], "8 stabilizers and a pyramid of the other 24"
    assert "9..55" in outcome.err
    adaptive = call(*options[:-2], "adaptive", "--dry-run").err
    assert adaptive.splitlines()[-1].startswith("layers share what a step keeps by what they retain")


@pytest.mark.slow
def test_memory_that_grows_with_the_prompt_is_announced_and_its_peak_reported(call: Infer, tmp_path: Path) -> None:
    options = ("--budget", 64, "--when", "prompt_end")
    outcome = call(*options)
    assert outcome.code == 0
    warning, *_, summary = outcome.err.splitlines()
    assert "warning: --when prompt_end keeps every unit until the prompt has been read, so memory grows" in warning
    record = json.loads(call(*options, "--json", "--quiet").out)
    assert f"{record['prompt_tokens']:,} tokens" in warning
    assert f"cache {record['peak_cache_bytes'] / 2**20:,.1f} MiB at most" in summary
    bounded = json.loads(call(*options[:-2], "--json").out)
    assert record["kept_units"] == bounded["kept_units"]
    assert record["peak_cache_bytes"] > 10 * bounded["peak_cache_bytes"]
    assert json.loads(call(*options, "--dry-run").out)["planned_cache_bytes"] == record["peak_cache_bytes"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--budget", 64, "--kv-memory", "1MiB"), ("--budget 64 and --kv-memory 1MiB exclude each other; drop one",)),
        (
            ("--kv-memory", "1MiB", "--budget-share", 0.5),
            ("--kv-memory 1MiB and --budget-share 0.5 exclude each other",),
        ),
        (("--kv-memory", "much"), ("--kv-memory: much is not an amount of memory; write it like 2GiB",)),
        (("--budget-share", 1.5), ("--budget-share: 1.5 is not a share of the prompt; give more than 0",)),
        (
            ("--kv-memory", "4KiB"),
            ("--kv-memory 4KiB is too small: with --chunk-size 32 and --max-new-tokens 8 even a budget of 1 takes ",),
        ),
        (("--kv-memory", "64KiB", "--stabilizers", 5000), ("--kv-memory 64KiB is too small", "even a budget of 5001")),
        (
            ("--kv-memory", "1MiB", "--when", "prompt_end"),
            ("--kv-memory 1MiB bounds the cache, but --when prompt_end lets it grow with the prompt; use --when",),
        ),
        (
            ("--budget-share", 0.01, "--stabilizers", 3000),
            ("stabilizers=3000 leaves no room for scored units in budget",),
        ),
        (("--memory", "cubic"), ('memory="cubic" is unknown',)),
        (("--memory", "adaptive", "--decremental"), ('memory="adaptive" differs by layer',)),
        (("--memory", "sqrt", "--when", "prompt_end"), ('memory="sqrt" grows from chunk to chunk',)),
    ],
)
def test_sizes_that_cannot_be_are_refused_in_one_line(call: Infer, options: tuple[object, ...], parts: Any) -> None:
    outcome = call(*options)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--max-new-tokens", 10**12), "--max-new-tokens 1000000000000 needs a cache of "),
        (("--num-beams", 10**7), "--num-beams 10000000 needs a cache of "),
        (("--num-beams", 10**7, "--max-new-tokens", 10**12), "--budget 6000 together need a cache of "),
    ],
)
def test_what_no_memory_can_hold_is_refused_before_anything_is_allocated(
    call: Infer, options: tuple[object, ...], part: str
) -> None:
    outcome = call(*options)
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
    assert part in outcome.err
    assert "has room for" in outcome.err


def test_what_is_said_to_fit_is_not_refused(call: Infer) -> None:
    most = re.search(r"give at most (\d+)", call("--max-new-tokens", 10**12).err)
    assert most is not None
    assert call("--max-new-tokens", int(most[1]) - 10**4, "--dry-run").code == 0
    assert call("--max-new-tokens", int(most[1]) + 10**4, "--dry-run").code == 2


def test_a_budget_beyond_any_memory_reads_a_short_prompt(infer: Infer, backbone: Path, text: Path) -> None:
    usual = ("--model", backbone, "--prompt-file", text, "--scorer", "random", "--max-new-tokens", 4, "--json")
    record = json.loads(infer(*usual, "--budget", 10**15, "--chunk-size", 10**15).out)
    assert record["kept_units"] == record["prompt_tokens"]


def test_free_memory_next_to_the_weights_holds_the_prompt(ask: Infer) -> None:
    record = ask("--kv-memory", "auto")
    assert record["policy"]["budget"] == record["prompt_tokens"] == record["kept_units"]
    assert ask("--kv-memory", "auto", "--dry-run")["policy"] == record["policy"]


def test_the_largest_budget_that_suits_the_free_memory_is_taken(
    ask: Infer, call: Infer, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[tuple[int, int]] = []

    def remember(self: Any, policy: Any) -> int:
        needed.append((policy.budget, plain(self, policy)))
        return needed[-1][1]

    plain = PlannedRun.bytes_beside_weights
    monkeypatch.setattr(PlannedRun, "bytes_beside_weights", remember)
    ask("--kv-memory", "auto", "--dry-run")
    least = next(count for budget, count in needed if budget == 1)
    free = {"bytes": 0}
    monkeypatch.setattr(chunk_size, "free_bytes", lambda device: free["bytes"])
    monkeypatch.setattr(PlannedRun, "weight_bytes", property(lambda self: 1000))
    free["bytes"] = int((1000 + 2 * least) / chunk_size.SHARE) + 1
    budget = ask("--kv-memory", "auto", "--dry-run")["policy"]["budget"]
    sizes = dict(needed)
    assert 1 < budget < max(sizes)
    assert 1000 + sizes[budget] <= chunk_size.SHARE * free["bytes"] < 1000 + sizes[budget + 1]
    free["bytes"] = 1000
    outcome = call("--kv-memory", "auto", "--dry-run")
    assert outcome.code == 2
    assert "--kv-memory auto finds nothing free: weights, a chunk and a budget of 1 take " in outcome.err


def test_free_memory_is_filled_where_the_length_of_the_text_is_unknown(
    backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PlannedRun(
        config=loading.load_config(ModelOptions(model=str(backbone))),
        scorer=scorers.get("random"),
        dtype=torch.float32,
        device=torch.device("cpu"),
        prompt_tokens=None,
        new_tokens=8,
    )
    free = run.weight_bytes + 2**24
    monkeypatch.setattr(chunk_size, "free_bytes", lambda device: free)
    policy, _ = final_policy(PolicyOptions(kv_memory="auto"), {"kv_memory"}, {}, run)
    assert 0.89 * free < run.weight_bytes + run.bytes_beside_weights(policy) <= 0.9 * free
    monkeypatch.setattr(chunk_size, "free_bytes", lambda device: None)
    with pytest.raises(ValueError, match="--kv-memory auto: cpu does not tell what is free; give an amount"):
        final_policy(PolicyOptions(kv_memory="auto"), {"kv_memory"}, {}, run)


def test_a_plan_that_depends_on_a_missing_prompt_is_refused(infer: Infer, backbone: Path, tmp_path: Path) -> None:
    outcome = infer("--model", backbone, *SMALL, "--budget-share", 0.1, "--dry-run", "--prompt-file", tmp_path / "none")
    assert outcome.code == 2
    assert "none" in outcome.err


@pytest.mark.slow
def test_shares_of_heads_are_planned_as_they_are_held(infer: Infer, text: Path) -> None:
    shares = ",".join(["0.02", "0.08"] * 10)
    line = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads", "--prompt-file", text, "--json"]
    line += ["--budget", 64, "--head-budgets", "shares", "--head-shares", shares, "--max-new-tokens", 4]
    plan, record = (json.loads(infer(*line, *more).out) for more in (["--dry-run"], []))
    assert plan["planned_cache_bytes"] == record["planned_cache_bytes"] == record["peak_cache_bytes"]
