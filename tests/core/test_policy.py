"""What a policy takes and refuses, what follows from its budget, the plans that come of it, and the selection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from locret import RetentionCache, RetentionPolicy, prefill
from locret.cache.limits import check_slots
from locret.policy.planned_bytes import parse_bytes, units_of_share
from locret.policy.policy import usual_budget
from locret.policy.resolve import resolve
from locret.policy.schedule import decode_budgets, plan, protected
from locret.policy.selectors import select_kept
from locret.policy.sizes import adaptive_sizes, memory_sizes, pyramid_budgets
from locret.scorers.chosen import MEASURED

SMALLEST = {
    **dict.fromkeys(("budget", "chunk_size", "local_len", "decode_interval", "pyramid_beta", "min_chunk"), 1),
    **dict.fromkeys(("stabilizers", "recall", "exact_recent", "exact_layers"), 0),
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: least - 1}, f"{name}={least - 1} is too small; it must be {least}") for name, least in SMALLEST.items()),
    ({"positions": "absolute"}, 'positions="absolute" is unknown; choose one of compact, original'),
    ({"memory": "cubic"}, 'memory="cubic" is unknown; choose one of fixed, linear, sqrt, square, square_sqrt, '),
    ({"head_floor": 1.5}, "head_floor=1.5 is not a share; it must lie between 0 and 1"),
    ({"head_floor": float("nan")}, "head_floor=nan is not a finite number; give one such as 0.2"),
    ({"head_floor": 10**400}, "is not a finite number; give one such as 0.2"),
    ({"diversity": 0.2, "positions": "original"}, 'before rotation, which positions="original" with head_budgets="un'),
    ({"when": None}, "when=None is not a text; give one such as 'chunk'"),
    ({"decremental": 1}, "decremental=1 is not true or false; give one such as False"),
    (
        {"budget": 100, "stabilizers": 100},
        "stabilizers=100 leaves no room for scored units in budget=100; "
        "raise budget, lower stabilizers to at most 99, or leave them out to follow the budget",
    ),
    ({"decode_budget": 164, "local_len": 100, "decode_interval": 64}, "decode_budget=164 cannot hold local_len=1"),
    ({"recall": 4}, "recall=4 needs a second tier"),
    ({"host_budget": 40}, "host_budget=40 keeps units that nothing recalls"),
    ({"host_budget": 40, "recall": 41}, "recall=41 is more than host_budget=40 can hold"),
    ({"host_budget": "most", "recall": 1}, "host_budget=most is neither"),
    ({"recall_by": "quest", "recall": 1, "host_budget": 40, "head_budgets": "adaptive"}, 'quest" finds none'),
    ({"head_budgets": "shares", "layer_budgets": "pyramid"}, "shares out the layers too"),
    ({"head_budgets": "shares", "when": "prompt_end"}, "leaves some KV heads no room for the newest"),
    (
        {"memory": "linear", "when": "prompt_end"},
        'memory="linear" grows from chunk to chunk, but when="prompt_end" evicts once; use when="chunk" or',
    ),
    ({"decremental": True}, 'but memory="fixed" does not grow; choose memory linear, sqrt or square'),
    *(
        ({"decremental": True, "memory": name}, f'needs one memory size for all layers, but memory="{name}" differs')
        for name in ("square_sqrt", "adaptive")
    ),
    (
        {"decremental": True, "memory": "linear", "min_chunk": 11, "chunk_size": 10},
        "min_chunk=11 is larger than the average chunk, chunk_size=10; lower min_chunk or raise chunk_size",
    ),
]
WHOLE = [name for name, value in RetentionPolicy().to_dict().items() if type(value) is int or name == "decode_budget"]


def test_what_cannot_be_is_refused_in_a_sentence_with_the_way_out() -> None:
    for numbers, message in REFUSED:
        with pytest.raises(ValueError) as error:
            RetentionPolicy(**numbers)
        assert (message in str(error.value), "\n" in str(error.value)) == (True, False), error.value


@pytest.mark.parametrize("value", [float("inf"), 7000.0, "7000", True, torch.tensor(7e3)])
def test_a_number_that_is_not_whole_is_refused(value: Any) -> None:
    for name in WHOLE:
        with pytest.raises(ValueError, match=f"^{name}=.* is not a whole number; give one"):
            RetentionPolicy(**{name: value})


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({}, (6000, 3072, 2500, 100)),  # those of the original package
        ({"budget": 5999}, (5999, 3072, 1499, 100)),
        ({"budget": 1024}, (1024, 1024, 256, 100)),
        ({"budget": 64}, (64, 512, 16, 64)),
        ({"budget": 1}, (1, 512, 0, 1)),
        ({"budget": 1024, "stabilizers": 1000, "chunk_size": 4096}, (1024, 4096, 1000, 100)),
        ({"budget": 64, "local_len": 100}, (64, 512, 16, 100)),
    ],
)
def test_what_is_not_given_follows_from_the_budget(given: dict[str, int], numbers: tuple[int, ...]) -> None:
    policy = RetentionPolicy(**given)  # type: ignore[arg-type]
    assert (policy.budget, policy.chunk_size, policy.stabilizers, policy.local_len) == numbers
    assert set(policy.following()) == {"stabilizers", "local_len", "chunk_size"} - set(given)
    assert RetentionPolicy.from_dict(given, "policy") == policy == RetentionPolicy.from_dict(policy.to_dict(), "policy")


@pytest.mark.parametrize(("positions", "budget"), [(4096, 2048), (8192, 4096), (12_000, 6000), (2**20, 6000)])
def test_where_nobody_gives_a_budget_what_is_attended_to_fits_the_backbone(positions: int, budget: int) -> None:
    assert usual_budget(positions) == budget
    policy = RetentionPolicy(budget=budget)
    assert policy.budget + policy.chunk_size <= positions
    assert RetentionCache(build("llama", max_position_embeddings=positions), scorer="h2o").policy == policy


def test_stabilizers_are_no_matter_where_everything_is_selected_at_the_prompts_end() -> None:
    policy = RetentionPolicy(budget=64, when="prompt_end", stabilizers=64)
    assert policy.idle()["stabilizers"] == "when chunk"
    assert "stabilizers" not in replace(policy, stabilizers=0).idle(), "which says what is so anyway"
    assert "stabilizers" not in RetentionPolicy(budget=64, when="prompt_end").following()
    assert protected(policy, 64) == 0
    check_slots(policy, 64)
    with pytest.raises(ValueError, match='merge="none" makes 65 units per KV head, more than budget=64 holds beside'):
        check_slots(policy, 65)
    with pytest.raises(ValueError, match="stabilizers=64 leaves no room"):
        replace(policy, when="chunk")


def test_another_budget_keeps_what_was_given_and_follows_with_the_rest() -> None:
    small = RetentionPolicy().changed(budget=1024)
    assert small == RetentionPolicy(budget=1024)
    assert small.changed(budget=6000) == RetentionPolicy()
    assert RetentionPolicy(budget=1024, stabilizers=7).changed(budget=6000).stabilizers == 7
    with pytest.raises(ValueError, match="stabilizers=2500 leaves no room for scored units in budget=1024; raise "):
        RetentionPolicy(stabilizers=2500).changed(budget=1024)
    saved = RetentionPolicy.from_dict(RetentionPolicy().to_dict(), "policy")
    assert saved.following() == []
    with pytest.raises(ValueError, match="stabilizers=2500 leaves no room"):
        saved.changed(budget=1024)
    for taken in (RetentionPolicy(budget=2048, stabilizers=small.stabilizers), replace(small, budget=2048)):
        assert taken.stabilizers == small.stabilizers == 256, "a number taken from a policy is the one that it shows"


PAPER = {"budget": 6000, "chunk_size": 3072, "stabilizers": 2500, "local_len": 100}
SMALL = {"budget": 256, "chunk_size": 1024, "stabilizers": 100, "local_len": 32}


@pytest.mark.parametrize(
    ("own", "recommended", "numbers"),
    [
        ({"budget": 40_000}, {}, {**PAPER, "budget": 40_000}),
        ({"budget": 1000}, {}, {"stabilizers": 250, "chunk_size": 1000, "local_len": 100}),
        ({"budget": 100, "stabilizers": 80}, {"stabilizers": 64}, {"stabilizers": 80}),
        ({}, SMALL, SMALL),
        ({"budget": 1000}, SMALL, {**SMALL, "budget": 1000}),
        ({"budget": 128}, SMALL, {"budget": 128, "chunk_size": 512, "stabilizers": 32, "local_len": 32}),
        ({"budget": 16, "chunk_size": None}, SMALL, {"chunk_size": 512, "stabilizers": 4, "local_len": 16}),
        ({"decode_budget": None}, {"decode_budget": 1000}, {"decode_budget": None}),
        ({"head_budgets": "uniform"}, {"head_budgets": "adaptive", "host_budget": 9000, "recall": 8}, {"recall": 8}),
        ({"budget": 1000}, MEASURED, MEASURED),
        ({"host_budget": "all", "recall": 8}, MEASURED, {**MEASURED, "recall": 8}),
        ({"host_budget": "all", "recall": 8, "recall_by": "quest"}, MEASURED, {"head_budgets": "uniform"}),
        ({"layer_budgets": "pyramid"}, {**MEASURED, "diversity": 0.1}, {"head_budgets": "uniform", "diversity": 0.1}),
        ({"key_bits": 16, "value_bits": 16}, {**MEASURED, "key_bits": 4, "value_bits": 4}, MEASURED),
        ({"positions": "original"}, {**MEASURED, "diversity": 0.1}, {**MEASURED, "diversity": 0.0}),
        ({"key_bits": 4}, {**MEASURED, "head_shares": [0.5, 1.5]}, {"head_budgets": "uniform", "head_shares": None}),
    ],
)
def test_what_nobody_chose_is_recommended_or_follows_a_smaller_budget(
    own: dict[str, Any], recommended: dict[str, Any], numbers: dict[str, Any]
) -> None:
    policy = resolve(own, recommended)
    assert {name: getattr(policy, name) for name in numbers} == numbers


def test_amounts_of_memory_and_shares_are_read_or_refused() -> None:
    amounts = {"2GiB": 2 << 30, "1.5 GB": 1_500_000_000, "800kib": 800 << 10, "77": 77, "3M": 3_000_000}
    assert {text: parse_bytes(text) for text in amounts} == amounts
    for text in ("2 gigs", "", "-1GiB", "0GiB", "iB", "GiB"):
        with pytest.raises(ValueError, match="is not an amount of memory; write it like 2GiB|is less than one byte"):
            parse_bytes(text)
    shares = (0.1, 1, 0.0001, "25%", "0.25", "12.5 %", 1e-05)
    assert [units_of_share(share, 1005) for share in shares] == [100, 1005, 1, 251, 251, 125, 1]
    for share in (0, -0.1, 1.01, "101%", "nan", "1/0", "much"):
        with pytest.raises(ValueError, match=f"{share} is not a share of the prompt; give more than 0 and at most 1"):
            units_of_share(share, 10)


COUNT = st.integers(1, 400)


def policy(**changes: Any) -> RetentionPolicy:
    numbers = {"budget": 24, "chunk_size": 10, "stabilizers": 0, "local_len": 6, "min_chunk": 4}
    return RetentionPolicy(**{**numbers, **changes})


# -- the formulas -----------------------------------------------------------------------------------------------------


def test_pyramid_has_the_numbers_of_the_official_code() -> None:
    small = pyramid_budgets(128, 32, 8000, window=8)
    assert (small[0], small[-1], sum(small) / 32) == (242, 25, 133.5)
    large = pyramid_budgets(2048, 32, 8000, window=8)
    assert (large[0], large[-1], sum(large) / 32) == (3986, 111, 2048.5)


@settings(deadline=None)
@given(cap=COUNT, window=st.integers(0, 399), tokens=st.integers(1, 3000), layers=st.integers(2, 80), beta=COUNT)
def test_pyramid_equals_the_slow_version_and_keeps_the_budget_on_average(
    cap: int, window: int, tokens: int, layers: int, beta: int
) -> None:
    window = min(window, cap - 1)
    budgets = pyramid_budgets(cap, layers, tokens, window, beta)
    assert list(budgets) == [max(1, n) for n in reference.pyramid_budgets(cap, window, tokens, layers, beta)]
    assert 0 <= sum(budgets) / layers - cap <= layers / 2


@settings(deadline=None, max_examples=300)
@given(growth=st.sampled_from(["linear", "sqrt", "square"]), steps=st.integers(2, 200), most=st.integers(1, 20000))
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
    schedule = plan(rules, (1, 1), tokens + 6)
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


# Smallest and largest chunk, and the length that chunk and memory have together, of 32 chunks of 1024 in the mean.
@pytest.mark.parametrize(
    ("growth", "sizes"), [("linear", (544, 1504, 1536)), ("square", (410, 1338, 1371)), ("sqrt", (693, 1668, 1700))]
)
def test_incremental_memory_and_decremental_chunks_have_the_numbers_of_the_papers_formulas(
    growth: str, sizes: tuple[int, ...]
) -> None:
    rules = policy(budget=1024, chunk_size=1024, memory=growth, decremental=True, min_chunk=1)
    steps = plan(rules, (1,), 32768 + 6).steps
    lengths = [step.tokens + before.kept[0] for step, before in zip(steps[1:], steps, strict=False)]
    found = min(step.tokens for step in steps), steps[1].tokens, max(lengths)
    assert found == pytest.approx(sizes, abs=1)
    assert max(lengths) - min(lengths) <= 1
    # m_0 + (m - m_0) i^2 / 9 in the lower half of the layers, m_0 + (m - m_0) sqrt(i / 3) in the upper, m_0 = 24 / 4.
    layers = plan(policy(memory="square_sqrt"), (1, 1, 1), 46).steps
    assert [step.budgets for step in layers] == [(6, 6, 6), (8, 16, 16), (14, 20, 20), (24, 24, 24)]


def test_adaptive_layers_share_by_what_they_retained_up_to_the_cap() -> None:
    old = [{1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}]
    new = [{1, 2, 3, 4}, {3, 4, 5, 6}, {4, 5, 6, 7}]
    assert reference.adaptive_sizes([20, 20, 20], old, new) == pytest.approx([240 / 7, 120 / 7, 60 / 7])
    assert adaptive_sizes([20, 20, 20], [1.0, 0.5, 0.25], [30, 30, 30]) == (30, 17, 8)
    assert adaptive_sizes([20, 20], [0.0, 0.0], [30, 30]) == (20, 20)
    assert adaptive_sizes([20, 20], [0.0, 1.0], [30, 30]) == (1, 30)


# -- whole plans ------------------------------------------------------------------------------------------------------


def test_a_second_text_starts_from_what_is_held() -> None:
    schedule = plan(policy(memory="linear"), (1, 1), 86, held=[30, 12])
    assert schedule.held == (24, 12)
    assert {step.budgets[0] for step in schedule.steps} == {24}
    assert schedule.steps[0].budgets[1] == 12
    assert schedule.steps[-1].budgets == (24, 24)
    # 43 tokens beside a full memory: no chunk is longer than 43 / 5, rounded up.
    full = plan(policy(memory="linear", decremental=True), (1, 1), 49, held=[24, 24])
    assert [step.tokens for step in full.steps] == [8, 9, 9, 9, 8]


def test_a_plan_says_what_every_step_keeps() -> None:
    schedule = plan(policy(stabilizers=5), (1, 1), 57)
    kept = [(step.tokens, *step.kept) for step in (*schedule.steps, schedule.last)]
    assert kept == [(10, 10, 10), (10, 20, 20), *3 * [(10, 24, 24)], (1, 24, 24), (6, 30, 30)]
    assert schedule.peak == (34, 34)
    assert plan(policy(layer_budgets="pyramid"), (1, 1), 106).last.kept == (47 + 6, 1 + 6)


def test_decode_budgets_of_a_pyramid_leave_every_layer_room_for_an_eviction() -> None:
    rules = policy(layer_budgets="pyramid", decode_budget=40, decode_interval=8)
    assert decode_budgets(rules, 4) == (budgets := pyramid_budgets(40, 4, None, window=14))
    assert min(budgets) > 6 + 8
    assert decode_budgets(policy(decode_budget=40, decode_interval=8), 4) == (40,) * 4
    assert decode_budgets(policy(), 4) is None


@pytest.mark.parametrize("stabilizers", [0, 8])
def test_growing_memory_holds_the_first_tokens_from_its_first_step(stabilizers: int) -> None:
    cache = RetentionCache(build("llama"), "streaming", policy(memory="square_sqrt", stabilizers=stabilizers))
    firsts: list[list[int]] = []

    def look(cache: RetentionCache) -> None:
        firsts.extend(head[:4].tolist() for layer in cache.backbone.layers for head in cache.kept_positions(layer)[0])

    prefill(cache.model, prompt(300), cache, on_chunk=look)
    assert firsts
    assert all(one == [0, 1, 2, 3] for one in firsts)


def test_protection_beats_infinite_scores_and_nan_loses_to_everything() -> None:
    scores = torch.tensor([[[torch.inf, torch.nan, -torch.inf, -5.0]]])
    protected = torch.tensor([False, False, True, False])
    assert select_kept(scores, 1, protected).tolist() == [[[2]]]
    assert select_kept(scores, 3, protected).tolist() == [[[0, 2, 3]]]


FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0])


@settings(max_examples=200, deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(1, 45), st.integers(0, 40))
def test_any_scores_give_the_oracles_choice(scores: list[float], budget: int, protected: int) -> None:
    newest = set(range(len(scores) - min(protected, len(scores)), len(scores)))
    mask = torch.tensor([slot in newest for slot in range(len(scores))])
    kept = select_kept(torch.tensor(scores)[None, None], budget, mask if protected else None)
    assert kept[0, 0].tolist() == reference.select_kept(scores, budget, newest if protected else set())
