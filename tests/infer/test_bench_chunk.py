"""`locret-bench --chunk-size auto` reads with the chunk that `locret-infer` would take, the same for every method."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from locret import RetainingHeads, RetentionPolicy
from locret.infer import chunk_size
from locret.infer.sizing import PlannedRun
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.command import command
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.report import numbers
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.runs import make_setup, new_run

NUMBERS = {"shape": "tiny", "budget": 1200, "stabilizers": 16, "local_len": 8, "new_tokens": 4, "dtype": "float32"}


def plan_of(**changes: Any) -> BenchPlan:
    given = {**NUMBERS, "lengths": "3000", "methods": "full,floor,locret", "chunk_size": "auto", **changes}
    return make_plan(BenchOptions(**given), set(given))


def free(monkeypatch: pytest.MonkeyPatch, count: int | None) -> None:
    monkeypatch.setattr(chunk_size, "free_bytes", lambda _device: count)


@pytest.mark.parametrize("share", [1.2, 1.0, 0.98])
def test_the_chunk_is_the_one_of_locret_infer(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    free(monkeypatch, None)
    plan = plan_of()
    assert plan.chunk_choice is not None
    room = int(share * plan.chunk_choice.needed_bytes / chunk_size.SHARE) + 1
    free(monkeypatch, room)
    heads = RetainingHeads.for_model(plan.config, plan.hidden_dim)
    infer = PlannedRun(
        config=plan.config, scorer=heads, dtype=torch.float32, device=torch.device("cpu"), prompt_tokens=None,
        new_tokens=4,
    )  # fmt: skip

    def policy_of(size: int) -> RetentionPolicy:
        return RetentionPolicy(budget=1200, chunk_size=size, stabilizers=16, local_len=8)

    expected = infer.choose_chunk(policy_of)
    assert plan_of().chunk_choice == expected
    assert expected.chunk_size == (512 if share >= 1 else 256)
    assert expected.free_bytes == room


def test_every_method_reads_with_the_chunk_that_all_bounded_methods_fit_into(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, None)
    needed = {}
    for name in ("locret", "streaming+linear"):
        choice = plan_of(methods=name).chunk_choice
        assert choice is not None
        needed[name] = choice.needed_bytes
    both = plan_of(methods="full,locret,streaming+linear")
    assert both.chunk_choice is not None
    assert both.chunk_choice.needed_bytes == max(needed.values()) > min(needed.values())
    # What keeps everything needs more, but follows what locret-infer would do.
    follows = plan_of(methods="full,floor").chunk_choice
    assert follows is not None
    assert follows.needed_bytes == needed["locret"]
    free(monkeypatch, int(min(needed.values()) / chunk_size.SHARE) + 1)
    tight = plan_of(methods="full,locret,streaming+linear")
    alone = {name: plan_of(methods=name).policy.chunk_size for name in needed}
    assert tight.policy.chunk_size == min(alone.values()) < max(alone.values())
    for method in tight.methods:
        assert method.reading(tight.sizes, tight.policy, 3000)[0].tokens == tight.policy.chunk_size


def test_runs_read_in_chunks_of_the_chosen_size(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, None)
    plan = plan_of(budget=600, lengths="700")
    assert plan.policy.chunk_size == 256
    setup, passes = make_setup(plan), []
    setup.model.get_decoder().register_forward_pre_hook(
        lambda _module, _args, given: passes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    for method in plan.methods:
        passes.clear()
        new_run(setup, method, 700).read()
        assert passes[:2] == [256, 256]


def test_heads_take_room(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 10**9)
    small, large = (plan_of(hidden_dim=size).chunk_choice for size in (8, 2048))
    assert small is not None
    assert large is not None
    features = (8 + 2 * 4) * 32
    assert large.needed_bytes - small.needed_bytes >= 4 * (2048 - 8) * (features + 4) * 4


@pytest.mark.slow
def test_a_cap_on_device_memory_bounds_the_chunk() -> None:
    numbers = {"shape": "llama-3.1-8b", "device": "cuda", "budget": 16384, "dtype": "bfloat16", "lengths": "128K"}
    wide, narrow = (plan_of(**numbers, memory_cap=cap).policy.chunk_size for cap in ("40GiB", "24GB"))
    assert wide == 8192
    assert 64 <= narrow < wide
    with pytest.raises(
        ValueError, match="--chunk-size auto finds no size that fits: .* free on cuda.* within --memory"
    ):
        plan_of(**numbers, memory_cap="12GB")


def test_the_choice_is_in_the_record_the_heading_and_the_dry_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, 10**10)
    flags = [part for name, value in NUMBERS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    assert command([*flags, "--lengths", "3000", "--chunk-size", "auto", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    config = json.loads(out)["config"]
    assert config["policy"]["chunk_size"] == config["chunk_choice"]["chunk_size"] == 512
    assert config["chunk_choice"]["needed_bytes"] < config["chunk_choice"]["free_bytes"] == 10**10
    assert "chunks of 512 (auto), 16 stabilizers" in err
    assert numbers(config) in err
    given = plan_of(chunk_size=300).resolved()
    assert given["chunk_choice"] is None
    assert "chunks of 300, 16 stabilizers" in numbers(given)


def test_a_machine_without_room_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 1000)
    with pytest.raises(ValueError, match="--chunk-size auto finds no size that fits: with 64 tokens .* on cpu; lower"):
        plan_of()
    with pytest.raises(ValueError, match="chunk_size=0 is too small"):
        plan_of(chunk_size=0)
