"""Every method really does the forward passes that its plan counts, and answers what it should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.runs import BenchSetup, BoundedRun, FloorRun, make_setup, new_run

LENGTH, NEW = 150, 5


def plan_of(methods: str, **changes: Any) -> BenchPlan:
    numbers = {"budget": 32, "chunk_size": 24, "stabilizers": 8, "local_len": 7, "new_tokens": NEW, "threads": 1}
    given = {"shape": "tiny", "lengths": str(LENGTH), "methods": methods, **numbers, **changes}
    return make_plan(BenchOptions(**given), set(given))


def watched(setup: BenchSetup, run: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Return a list that grows by the new tokens, and the units each layer holds, of every forward pass."""
    passes: list[tuple[int, tuple[int, ...]]] = []

    def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        layers = getattr(kwargs["past_key_values"], "layers", [])
        held = tuple(getattr(layer, "fill", None) or layer.get_seq_length() for layer in layers)
        passes.append((kwargs["input_ids"].shape[1], held or (0,) * 4))

    setup.model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    return passes


@pytest.mark.parametrize("name", ["full", "floor", "locret", "streaming+pyramid", "snapkv+linear", "h2o"])
def test_forward_passes_are_those_of_the_plan(name: str) -> None:
    plan = plan_of(name)
    setup, method = make_setup(plan), plan.methods[0]
    run = new_run(setup, method, LENGTH)
    passes = watched(setup, run)
    first = run.read()
    assert passes == [(one.tokens, one.held) for one in method.reading(plan.sizes, plan.policy, LENGTH)]
    passes.clear()
    assert len(run.write(first)) == NEW
    units = method.units_after(plan.sizes, plan.policy, LENGTH)
    assert passes == [(1, tuple(held + step for held in units)) for step in range(NEW)]


def test_full_attention_answers_what_one_plain_forward_pass_says() -> None:
    plan = plan_of("full")
    setup = make_setup(plan)
    run = new_run(setup, plan.methods[0], LENGTH)
    first = run.read()
    answer = [first, *run.write(first)]
    ids = setup.prompt_1N
    with torch.no_grad():
        for token in answer:
            assert int(setup.model(input_ids=ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_a_bounded_cache_that_holds_everything_answers_like_full_attention() -> None:
    plan = plan_of("full,locret", budget=LENGTH)
    setup = make_setup(plan)
    answers = []
    for method in plan.methods:
        run = new_run(setup, method, LENGTH)
        first = run.read()
        later = run.write(first)
        answers.append([first, *later])
    full, bounded = answers
    # A bounded cache feeds the prompt's last token once more, so its first token comes twice.
    assert bounded == [full[0], *full[:-1]]


def test_the_floor_generates_over_as_many_units_as_a_bounded_cache() -> None:
    plan = plan_of("floor,locret")
    setup = make_setup(plan)
    held = []
    for method in plan.methods:
        run = new_run(setup, method, LENGTH)
        assert isinstance(run, (FloorRun, BoundedRun))
        first = run.read()
        held.append(run.cache.layers[0].fill)
        run.write(first)
    assert held == [plan.policy.budget + plan.policy.local_len] * 2
    assert setup.model.config._attn_implementation == "sdpa"


def test_shorter_prompts_are_beginnings_of_the_longest() -> None:
    plan = plan_of("full", lengths="40,90")
    setup = make_setup(plan)
    assert torch.equal(new_run(setup, plan.methods[0], 40).ids, new_run(setup, plan.methods[0], 90).ids[:, :40])
    assert torch.equal(make_setup(plan).prompt_1N, setup.prompt_1N)


def test_a_backbones_own_end_of_text_ends_no_answer(backbone: Any) -> None:
    given = {"model": str(backbone), "lengths": "40", "methods": "full,locret", "budget": 16, "new_tokens": 64}
    plan = make_plan(BenchOptions(**given), set(given))
    setup = make_setup(plan)
    assert setup.model.generation_config.eos_token_id is None
    for method in plan.methods:
        run = new_run(setup, method, 40)
        assert len(run.write(run.read())) == 64
