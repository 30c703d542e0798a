"""Layer budgets, growing memory and shrinking chunks in a cache: what is planned is what is held, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle as reference
import pytest
import torch
from families import build, prompt

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.policy.budget import cache_bytes
from locret.policy.schedule import plan
from locret.scorers import TokenPass, TokenScorer

NUMBERS: dict[str, Any] = {"budget": 24, "chunk_size": 10, "stabilizers": 5, "local_len": 6, "min_chunk": 4}
KINDS: dict[str, dict[str, Any]] = {
    "pyramid": {"layer_budgets": "pyramid"},
    "linear": {"memory": "linear"},
    "sqrt": {"memory": "sqrt"},
    "square": {"memory": "square"},
    "square_sqrt": {"memory": "square_sqrt"},
    "adaptive": {"memory": "adaptive"},
    "decremental": {"memory": "linear", "decremental": True},
    "pyramid, decremental": {"memory": "sqrt", "decremental": True, "layer_budgets": "pyramid"},
    "pyramid, adaptive": {"memory": "adaptive", "layer_budgets": "pyramid"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
both_positions = pytest.mark.parametrize("positions", ["compact", "original"])


def policy(kind: str, **changes: Any) -> RetentionPolicy:
    return RetentionPolicy(**{**NUMBERS, **KINDS[kind], **changes})


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def heads(model: Any) -> RetainingHeads:
    return RetainingHeads.for_model(model, hidden_dim=16, seed=3)


def read(model: Any, scorer: Any, rules: RetentionPolicy, length: int) -> tuple[RetentionCache, list[tuple[int, ...]]]:
    """Read a prompt; return the cache and the units of every layer after every chunk."""
    cache, fills = RetentionCache(model, scorer, rules), []
    prefill(model, prompt(length), cache, on_chunk=lambda c: fills.append(tuple(layer.fill for layer in c.governed)))
    return cache, fills


# -- one prompt -------------------------------------------------------------------------------------------------------


@every_kind
@both_positions
@pytest.mark.parametrize("scorer", ["heads", "random", "snapkv", "h2o"])
def test_every_step_keeps_the_planned_units_in_the_planned_bytes(
    model: Any, heads: RetainingHeads, scorer: str, positions: str, kind: str
) -> None:
    rules = policy(kind, positions=positions)
    cache, fills = read(model, heads if scorer == "heads" else scorer, rules, 157)
    schedule = plan(rules, 3, 157, recent=cache.scorer.recent(24))
    if rules.memory == "adaptive":
        assert all(n <= most for fill in fills for n, most in zip(fill, schedule.budgets, strict=True))
        assert fills[:2] == [step.kept for step in schedule.steps[:2]]
    else:
        assert fills == [step.kept for step in schedule.steps]
        assert tuple(layer.fill for layer in cache.governed) == schedule.last.kept
    memory = cache.memory()
    assert memory.planned == memory.actual == memory.peak
    assert memory.planned == cache_bytes(cache.backbone, schedule.peak, 4)
    assert [layer.capacity for layer in cache.governed] == list(schedule.peak)


@both_positions
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "adaptive" not in kind])
@torch.no_grad()
def test_every_kind_keeps_and_answers_what_the_slow_oracle_does(
    model: Any, heads: RetainingHeads, kind: str, positions: str
) -> None:
    rules, ids = policy(kind, positions=positions), prompt(71)
    steps = [(s.tokens, list(s.budgets), list(s.protected)) for s in plan(rules, 3, 71).steps]
    inv_freq = 10000.0 ** -(torch.arange(0, 8, 2).float() / 8)
    numbers = (24, 10, 5, 6)
    history, logits = reference.read_prompt(
        model, heads, ids[0], inv_freq, 1.0, numbers, positions == "original", steps
    )
    kept: list[Any] = []

    def record(cache: RetentionCache) -> None:
        kept.append([cache.kept_positions(layer)[0].tolist() for layer in range(3)])

    ours = prefill(model, ids, RetentionCache(model, heads, rules), on_chunk=record)
    assert kept == history
    torch.testing.assert_close(ours[0], logits, atol=1e-4, rtol=0)


def test_adaptive_layers_keep_the_share_that_their_retention_earns(model: Any) -> None:
    rules = policy("adaptive", stabilizers=0, chunk_size=12)
    base = [step.budgets[0] for step in plan(rules, 3, 186).steps]
    memories: list[list[list[set[int]]]] = []

    def record(cache: RetentionCache) -> None:
        memories.append([[set(head.tolist()) for head in cache.kept_positions(layer)[0]] for layer in range(3)])

    prefill(model, prompt(186), RetentionCache(model, "h2o", rules), on_chunk=record)
    assert len(base) == 15
    unequal = 0
    for step in range(2, 15):
        # Heads keep equally many units, so all of a layer's heads together have the ratio of their mean.
        old, new = (
            [{(head, unit) for head, kept in enumerate(layer) for unit in kept} for layer in memories[number]]
            for number in (step - 2, step - 1)
        )
        shares = reference.adaptive_sizes([base[step]] * 3, old, new)
        held = [len(layer[0]) for layer in memories[step - 1]]
        expected = [min(max(1, int(s + 1e-6)), 24, n + 12) for s, n in zip(shares, held, strict=True)]
        assert [len(layer[0]) for layer in memories[step]] == expected
        unequal += len(set(expected)) > 1
    assert unequal > 3


def test_decremental_takes_fewer_bytes_than_growing_memory_and_that_fewer_than_fixed_memory() -> None:
    model = build("llama", num_hidden_layers=2)
    numbers: dict[str, Any] = {"budget": 64, "chunk_size": 64, "stabilizers": 8, "local_len": 8}
    peaks = {}
    for name, changes in (("fixed", {}), ("growing", KINDS["linear"]), ("shrinking", KINDS["decremental"])):
        cache = RetentionCache(model, "random", RetentionPolicy(**numbers, **changes, min_chunk=8))
        prefill(model, prompt(32 * 64 + 8), cache)
        assert cache.memory().units == 64 + 8
        assert cache.memory().peak == cache.memory().planned
        peaks[name] = cache.memory().peak
    slot = peaks["fixed"] // 128
    assert (peaks["fixed"], peaks["growing"], peaks["shrinking"]) == (slot * 128, slot * 126, slot * 96)


@every_kind
@both_positions
def test_a_budget_of_the_prompts_length_equals_full_attention(model: Any, kind: str, positions: str) -> None:
    ids = prompt(90)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
    for chunk_size in (7, 64):
        rules = policy(kind, budget=90, chunk_size=chunk_size, positions=positions)
        torch.testing.assert_close(
            prefill(model, ids, RetentionCache(model, "random", rules)), expected, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("family", ["gemma3", "phi3-longrope"])
@every_kind
def test_other_families_hold_what_is_planned(family: str, kind: str) -> None:
    rules = policy(kind)
    cache, fills = read(build(family), "random", rules, 90)
    schedule = plan(rules, len(cache.backbone.layers), 90)
    assert fills[-1] == schedule.steps[-1].kept or rules.memory == "adaptive"
    assert cache.memory().actual <= cache.memory().planned


def test_a_pyramid_reads_an_iterator_like_a_tensor(model: Any) -> None:
    for length in (5, 25, 40, 53, 54, 55, 56, 57, 150):
        ids, rules = prompt(length), policy("pyramid")
        whole, streamed = RetentionCache(model, "random", rules), RetentionCache(model, "random", rules)
        expected = prefill(model, ids, whole)
        torch.testing.assert_close(prefill(model, iter(ids[0].tolist()), streamed), expected, atol=1e-5, rtol=0)
        assert [layer.fill for layer in whole.governed] == [layer.fill for layer in streamed.governed]


def test_growing_memory_refuses_a_text_of_unknown_length_and_leaves_the_cache_usable(model: Any) -> None:
    cache = RetentionCache(model, "random", policy("sqrt"))
    with pytest.raises(ValueError, match='memory="sqrt" grows over all chunks of a prompt, whose length is unknown'):
        prefill(model, iter(prompt(90)[0].tolist()), cache)
    fresh = RetentionCache(model, "random", policy("sqrt"))
    assert torch.equal(prefill(model, prompt(90), cache), prefill(model, prompt(90), fresh))


@pytest.mark.parametrize("memory", ["linear", "adaptive"])
def test_a_scorer_that_rates_tokens_follows_the_plan(model: Any, memory: str) -> None:
    class Loudest(TokenScorer):
        name = "loudest"

        def score_tokens(self, model: Any, tokens: TokenPass) -> torch.Tensor:
            return tokens.hidden_BLE.norm(dim=-1)

    rules = policy("linear", memory=memory, layer_budgets="pyramid")
    _, fills = read(model, Loudest(), rules, 120)
    planned = [step.kept for step in plan(rules, 3, 120).steps]
    assert fills[:2] == planned[:2]
    assert memory == "adaptive" or fills == planned


# -- selection at the prompt's end ------------------------------------------------------------------------------------


def test_a_pyramid_at_the_prompts_end_keeps_its_budgets_beside_the_local_tokens(model: Any) -> None:
    rules = policy("pyramid", when="prompt_end")
    cache, fills = read(model, "random", rules, 120)
    assert fills[-1] == (114, 114, 114)
    assert [layer.fill for layer in cache.governed] == [47 + 6, 24 + 6, 1 + 6]
    assert [layer.capacity for layer in cache.governed] == [53, 30, 7]


# -- answers, sessions, batches, files --------------------------------------------------------------------------------


@both_positions
def test_a_pyramids_answer_stays_within_each_layers_decode_budget(model: Any, positions: str) -> None:
    rules = policy("pyramid", decode_budget=40, decode_interval=8, positions=positions)
    cache, most = RetentionCache(model, "random", rules), [0, 0, 0]
    finished = cache.finished

    def watch(hidden: torch.Tensor) -> None:
        finished(hidden)
        if cache.seen >= 150:
            most[:] = [max(n, layer.fill) for n, layer in zip(most, cache.governed, strict=True)]

    cache.finished = watch  # type: ignore[method-assign]
    generate(model, prompt(100), cache=cache, max_new_tokens=120, do_sample=False, eos_token_id=None)
    assert most == [65, 40, 15]
    assert sum(most) == 3 * 40
    memory = cache.memory()
    assert memory.peak == memory.planned


@every_kind
def test_a_second_text_stays_within_the_plan_and_starts_from_what_is_held(model: Any, kind: str) -> None:
    rules = policy(kind)
    cache = RetentionCache(model, "random", rules)
    prefill(model, prompt(100), cache)
    held, fills = [layer.fill for layer in cache.governed], []
    prefill(model, prompt(80, seed=1), cache, on_chunk=lambda c: fills.append(tuple(y.fill for y in c.governed)))
    schedule = plan(rules, 3, 80, held=held)
    if rules.memory != "adaptive":
        assert fills == [step.kept for step in schedule.steps]
    assert all(n <= most for fill in fills for n, most in zip(fill, schedule.budgets, strict=True))
    assert cache.memory().peak == cache.memory().planned


@every_kind
def test_a_second_text_that_fits_equals_full_attention(model: Any, kind: str) -> None:
    cache = RetentionCache(model, "random", policy(kind, budget=200))
    prefill(model, prompt(60), cache)
    logits = prefill(model, prompt(45, seed=1), cache)
    with torch.no_grad():
        expected = model(torch.cat([prompt(60), prompt(45, seed=1)], dim=1)).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@every_kind
@both_positions
def test_each_row_of_a_batch_equals_its_own_run(model: Any, kind: str, positions: str) -> None:
    rules, lengths = policy(kind, positions=positions), (61, 4, 90, 17)
    rows = [prompt(length, seed=length) for length in lengths]
    ids, mask = torch.zeros(4, 90, dtype=torch.long), torch.zeros(4, 90, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, 90 - row.shape[1] :], mask[index, 90 - row.shape[1] :] = row[0], 1
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    for batch, padding, own in ((ids, mask, rows), (prompt(70, batch=3), None, list(prompt(70, batch=3)[:, None]))):
        cache = RetentionCache(model, "random", rules)
        logits = prefill(model, batch, cache, attention_mask=padding)
        answers = generate(
            model, batch, cache=RetentionCache(model, "random", rules), attention_mask=padding, **options
        )
        for index, row in enumerate(own):
            alone = RetentionCache(model, "random", rules)
            torch.testing.assert_close(logits[index], prefill(model, row, alone)[0], atol=1e-5, rtol=0)
            for layer in range(3):
                kept = cache.kept_positions(layer)[index]
                assert torch.equal(
                    kept[:, kept.shape[1] - alone.governed[layer].fill :], alone.kept_positions(layer)[0]
                )
            single = generate(model, row, cache=RetentionCache(model, "random", rules), **options)
            assert torch.equal(answers[index, -6:], single[0, -6:])


@every_kind
def test_a_saved_cache_answers_and_reads_on_like_the_first(model: Any, kind: str, tmp_path: Path) -> None:
    cache = RetentionCache(model, "random", policy(kind))
    prefill(model, prompt(100), cache)
    save_cache(cache, tmp_path / "text")
    loaded = load_cache(tmp_path / "text", model, "random")
    assert loaded.policy == cache.policy
    more = prompt(70, seed=2)
    copies = [prefill(model, more, one.copy()) for one in (cache, loaded)]
    assert torch.equal(*copies)
    assert torch.equal(prefill(model, more, cache), copies[0]), "reading a copy leaves the first cache's plan alone"


@pytest.mark.parametrize("codes", [{}, {"key_bits": 4, "exact_layers": 1}])
@pytest.mark.parametrize(("scorer", "budget"), [("streaming", 80), ("streaming", 500), ("heads", 80)])
def test_where_every_unit_stays_in_its_slot_no_workspace_is_planned(
    scorer: str, budget: int, codes: dict[str, int]
) -> None:
    model = build("llama", num_hidden_layers=4, layer_types=["full_attention"] * 4)
    heads = RetainingHeads.for_model(model, hidden_dim=16, seed=3)
    rules = RetentionPolicy(**{**NUMBERS, "budget": budget, "positions": "original", **codes})
    cache = RetentionCache(model, heads if scorer == "heads" else scorer, rules)
    for tokens in (40, 35, 90):
        prefill(model, prompt(tokens, seed=tokens), cache, new_tokens=2)
        generate(model, cache=cache, max_new_tokens=2, do_sample=False, eos_token_id=None)
        memory = cache.memory()
        # Of heads, what waits for a score while an answer is written needs a little of it.
        assert memory.planned == memory.actual or (scorer == "heads" and memory.planned > memory.actual)
    assert (cache.memory().units < 167) == (budget == 80)
