"""Plans of a read: sizes that add up, the papers' numbers, and refusals of what cannot be planned."""

from __future__ import annotations

from typing import Any

import oracle as reference
import pytest
from families import build, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from locret import RetentionCache, RetentionPolicy, prefill
from locret.policy.growth import adaptive_sizes, memory_sizes, pyramid_budgets
from locret.policy.schedule import decode_budgets, plan

COUNT = st.integers(1, 400)


def policy(**changes: Any) -> RetentionPolicy:
    return RetentionPolicy(
        **{"budget": 24, "chunk_size": 10, "stabilizers": 0, "local_len": 6, "min_chunk": 4, **changes}
    )


# -- the formulas -----------------------------------------------------------------------------------------------------


def test_pyramid_has_the_numbers_of_the_official_code() -> None:
    small = pyramid_budgets(128, 32, 8000, window=8)
    assert (small[0], small[-1], sum(small) / 32) == (242, 25, 133.5)
    large = pyramid_budgets(2048, 32, 8000, window=8)
    assert (large[0], large[-1], sum(large) / 32) == (3986, 111, 2048.5)


@settings(deadline=None)
@given(cap=COUNT, window=st.integers(0, 399), tokens=st.integers(1, 3000), layers=st.integers(2, 80), beta=COUNT)
def test_pyramid_falls_around_the_budget_and_equals_the_slow_version(
    cap: int, window: int, tokens: int, layers: int, beta: int
) -> None:
    window = min(window, cap - 1)
    budgets = pyramid_budgets(cap, layers, tokens, window, beta)
    assert list(budgets) == [max(1, n) for n in reference.pyramid_budgets(cap, window, tokens, layers, beta)]
    assert list(budgets) == sorted(budgets, reverse=True)
    assert 0 <= sum(budgets) / layers - cap <= layers / 2
    assert min(budgets) >= window
    if tokens < max(cap, 2 * (cap - window)):
        assert set(budgets) == {cap}
    else:
        assert budgets[0] <= tokens


@pytest.mark.parametrize("growth", ["linear", "sqrt", "square"])
@settings(deadline=None)
@given(steps=st.integers(2, 200), most=st.integers(1, 20000))
def test_memory_grows_to_the_budget_and_equals_the_slow_version(growth: str, steps: int, most: int) -> None:
    sizes = memory_sizes(growth, steps, most)
    assert sizes[0] == max(1, most // steps)
    assert sizes[-1] == most
    assert list(sizes) == sorted(sizes)
    assert all(abs(a - b) <= 1 for a, b in zip(sizes, reference.memory_sizes(growth, steps, most), strict=True))


@settings(deadline=None)
@given(
    tokens=st.integers(1, 5000),
    chunk=st.integers(1, 800),
    most=st.integers(1, 4000),
    growth=st.sampled_from(["linear", "sqrt", "square"]),
    least=st.integers(1, 100),
)
def test_decremental_chunks_sum_to_the_text_and_keep_attention_constant_where_none_is_too_small(
    tokens: int, chunk: int, most: int, growth: str, least: int
) -> None:
    least = min(least, chunk)
    rules = policy(budget=most, chunk_size=chunk, memory=growth, decremental=True, min_chunk=least)
    schedule = plan(rules, 2, tokens + 6)
    sizes = [step.tokens for step in schedule.steps]
    assert sum(sizes) == tokens
    assert min(sizes) >= min(least, tokens)
    assert all(size > 0 for size in sizes)
    memory = [step.budgets[0] for step in schedule.steps]
    if most >= tokens or len(sizes) == 1:
        return
    formula = reference.decremental_chunks(tokens / len(sizes), memory)
    floors = [max(least, new - old) for old, new in zip(memory, memory[1:], strict=False)]
    lengths = [size + units for size, units in zip(sizes[1:], memory, strict=False)]
    if all(size >= floor + 1 for size, floor in zip(formula[1:], floors, strict=True)):
        assert max(lengths) - min(lengths) <= (sum(memory[:-1]) < len(sizes) ** 2), "one length, unless memory is tiny"
        assert 0 <= sizes[0] - tokens // len(sizes) < len(sizes)
        assert sizes[0] <= max(lengths), "what rounding leaves over does not raise the peak"
    assert [step.kept[0] for step in schedule.steps][-1] <= most


def test_adaptive_layers_share_by_what_they_retained_up_to_the_cap() -> None:
    old = [{1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}]
    new = [{1, 2, 3, 4}, {3, 4, 5, 6}, {4, 5, 6, 7}]
    assert reference.adaptive_sizes([20, 20, 20], old, new) == pytest.approx([240 / 7, 120 / 7, 60 / 7])
    assert adaptive_sizes([20, 20, 20], [1.0, 0.5, 0.25], [30, 30, 30]) == (30, 17, 8)
    assert adaptive_sizes([20, 20], [0.0, 0.0], [30, 30]) == (20, 20)
    assert adaptive_sizes([20, 20], [0.0, 1.0], [30, 30]) == (1, 30)


# -- whole plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["fixed", "linear", "sqrt", "square", "square_sqrt", "adaptive"])
@pytest.mark.parametrize("layer_budgets", ["uniform", "pyramid"])
@settings(deadline=None)
@given(tokens=st.integers(0, 600), held=st.integers(0, 60), layers=st.integers(1, 6), stabilizers=st.integers(0, 23))
def test_every_plan_is_consistent(
    memory: str, layer_budgets: str, tokens: int, held: int, layers: int, stabilizers: int
) -> None:
    rules = policy(memory=memory, layer_budgets=layer_budgets, stabilizers=stabilizers)
    schedule = plan(rules, layers, tokens, held=[held] * layers)
    assert sum(step.tokens for step in schedule.steps) + schedule.last.tokens == tokens
    before = schedule.held
    for number, step in enumerate(schedule.steps, start=1):
        assert all(1 <= units <= most for units, most in zip(step.kept, schedule.budgets, strict=True))
        if memory != "adaptive":
            assert all(k == min(h + step.tokens, m) for k, h, m in zip(step.kept, before, step.budgets, strict=True))
        assert all(p <= m for p, m in zip(step.protected, step.budgets, strict=True))
        assert all(h + step.tokens <= most for h, most in zip(before, schedule.peak, strict=True))
        if number == len(schedule.steps):
            assert set(step.protected) == {0}
            assert step.budgets == schedule.budgets
        before = step.kept
    if memory == "fixed" and layer_budgets == "uniform":
        assert all(set(step.protected) == {stabilizers} for step in schedule.steps[:-1])
        assert max(schedule.peak) <= max(rules.prefill_units, held + tokens)


def test_stabilizers_are_half_of_a_small_memory_and_no_part_of_a_pyramid() -> None:
    grown = plan(policy(stabilizers=10, memory="linear"), 2, 246)
    assert [step.protected[0] for step in grown.steps[:4]] == [0, 1, 1, 2]
    assert grown.steps[-2].protected == (10, 10)
    assert plan(policy(budget=100, stabilizers=40, layer_budgets="pyramid"), 4, 999).budgets == pyramid_budgets(
        100, 4, 993, window=40
    )
    assert plan(policy(budget=100, layer_budgets="pyramid"), 4, 999, recent=30).budgets == pyramid_budgets(
        100, 4, 993, window=30
    )


def test_a_second_text_starts_from_what_is_held() -> None:
    schedule = plan(policy(memory="linear"), 2, 86, held=[30, 12])
    assert schedule.held == (24, 12)
    assert {step.budgets[0] for step in schedule.steps} == {24}
    assert schedule.steps[0].budgets[1] == 12
    assert schedule.steps[-1].budgets == (24, 24)


def test_a_text_of_unknown_length_repeats_one_step() -> None:
    schedule = plan(policy(stabilizers=5), 2, None)
    assert schedule.endless
    assert schedule.step(0) == schedule.step(99)
    assert schedule.peak == (34, 34)
    assert schedule.table() == [
        {"first_step": 1, "last_step": None, "chunk": 10, "attended": 34, "kept": 24, "protected": 5, "local": False},
        {"first_step": None, "last_step": None, "chunk": 6, "attended": 30, "kept": 30, "protected": 0, "local": True},
    ]


def test_the_table_joins_equal_steps_and_lists_layers_that_differ() -> None:
    rows = plan(policy(stabilizers=5), 2, 57).table()
    assert [(r["first_step"], r["last_step"], r["chunk"], r["attended"], r["kept"]) for r in rows] == [
        (1, 1, 10, 10, 10), (2, 2, 10, 20, 20), (3, 3, 10, 30, 24), (4, 5, 10, 34, 24),
        (6, 6, 1, 25, 24), (7, 7, 6, 30, 30),
    ]  # fmt: skip
    rows = plan(policy(layer_budgets="pyramid"), 2, 106).table()
    assert rows[-1]["kept"] == [47 + 6, 1 + 6]


def test_decode_budgets_of_a_pyramid_leave_every_layer_room_for_an_eviction() -> None:
    rules = policy(layer_budgets="pyramid", decode_budget=40, decode_interval=8)
    budgets = decode_budgets(rules, 4)
    assert budgets == pyramid_budgets(40, 4, None, window=14)
    assert budgets is not None
    assert min(budgets) > 6 + 8
    assert decode_budgets(policy(decode_budget=40, decode_interval=8), 4) == (40,) * 4
    assert decode_budgets(policy(), 4) is None


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_budgets": "cone"}, 'layer_budgets="cone" is unknown; choose one of uniform, pyramid'),
        ({"memory": "cubic"}, 'memory="cubic" is unknown; choose one of fixed, linear, sqrt, square, square_sqrt, '),
        ({"pyramid_beta": 0}, "pyramid_beta=0 is too small; it must be 1 or more"),
        ({"min_chunk": 0}, "min_chunk=0 is too small; it must be 1 or more"),
        (
            {"memory": "linear", "when": "prompt_end"},
            'memory="linear" grows from chunk to chunk, but when="prompt_end" evicts once; use when="chunk" or',
        ),
        ({"decremental": True}, 'but memory="fixed" does not grow; choose memory linear, sqrt or square'),
        (
            {"decremental": True, "memory": "square_sqrt"},
            'needs one memory size for all layers, but memory="square_sqrt" differs by layer; choose memory linear',
        ),
        ({"decremental": True, "memory": "adaptive"}, 'memory="adaptive" differs by layer'),
        (
            {"decremental": True, "memory": "linear", "min_chunk": 11},
            "min_chunk=11 is larger than the average chunk, chunk_size=10; lower min_chunk or raise chunk_size",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_the_policy_is_made(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        policy(**changes)
    assert message in str(error.value)


@pytest.mark.parametrize("stabilizers", [0, 2, 8])
@pytest.mark.parametrize("memory", ["linear", "sqrt", "square", "square_sqrt"])
def test_growing_memory_holds_the_first_tokens_from_its_first_step(memory: str, stabilizers: int) -> None:
    cache = RetentionCache(build("llama"), "streaming", policy(memory=memory, stabilizers=stabilizers))
    firsts: list[list[int]] = []

    def look(cache: RetentionCache) -> None:
        firsts.extend(head[:4].tolist() for layer in cache.backbone.layers for head in cache.kept_positions(layer)[0])

    prefill(cache.model, prompt(300), cache, on_chunk=look)
    assert firsts
    assert all(one == [0, 1, 2, 3] for one in firsts)
