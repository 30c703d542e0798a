"""Contexts that were read apart are asked together, and one that was read is made smaller, without reading again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, merger, prompt
from hypothesis import given
from hypothesis import strategies as st
from oracle.compose import Text, composed

import locret
from locret import Context, LongContextModel, RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.adapters import find_decoder
from locret.cache.compose import joined, shrunk
from locret.engines.prefix import Prefix
from locret.policy.sizes import divided

NUMBERS = {"budget": 24, "chunk_size": 16, "stabilizers": 4, "local_len": 5}
POLICY = RetentionPolicy(budget=96, chunk_size=128, stabilizers=16, local_len=16)
FIRST = "The grass is green. " * 30 + "The tower is made of stone. " * 20
SECOND = "The sky is blue. " * 30 + "The river runs to the sea. " * 20


@pytest.fixture(scope="module")
def both(lm: LongContextModel) -> list[Context]:
    return lm.read([FIRST, SECOND])


def read(family: str, tokens: int, seed: int, **changes: Any) -> RetentionCache:
    model = MODELS.setdefault(family, build(family))
    if "merge" in changes:
        changes["merge"] = merger(family)
    cache = RetentionCache(model, changes.pop("scorer", "key_norm"), RetentionPolicy(**{**NUMBERS, **changes}))
    prefill(model, prompt(tokens, seed=seed), cache)
    return cache


MODELS: dict[str, Any] = {}


def as_text(cache: RetentionCache, layer: int, skip: int) -> Text:
    held = cache.to_dynamic_cache().layers[layer]
    scores, positions = cache.kept_scores(layer)[0], cache.kept_positions(layer)[0]
    return Text(held.keys[0], held.values[0], scores, positions, cache.seen, skip)


# -- the oracle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi3-partial", "llama-yarn"])
@pytest.mark.parametrize(
    ("budget", "shares"), [(40, "score"), (40, "fair"), (None, "fair"), (9, "fair"), (999, "score")]
)
def test_joined_units_are_those_of_the_oracle(family: str, budget: int | None, shares: str) -> None:
    caches = [read(family, tokens, seed) for seed, tokens in enumerate((71, 50, 22))]
    skips = [0, 6, 3]
    texts = [[as_text(cache, nth, skip) for cache, skip in zip(caches, skips, strict=True)] for nth in range(3)]
    dropped = [max(int((layer[nth].positions < layer[nth].skip).sum(-1).max()) for layer in texts) for nth in range(3)]
    assert dropped[1] > 0
    copies = [cache.copy() for cache in caches]
    whole = joined([*zip(copies, skips, strict=True)], budget if shares == "fair" else None)
    if shares == "score" and budget is not None:  # shrunk afterwards, the best of all stay
        whole = shrunk(whole, budget)
    exported, turning = whole.to_dynamic_cache(), find_decoder(whole.model).rotary_emb.inv_freq.double()  # type: ignore[union-attr]
    for nth, layer in enumerate(texts):
        wanted = composed(layer, turning, dropped, budget, fair=shares == "fair", local=5)
        for ours, theirs in zip((exported.layers[nth].keys, exported.layers[nth].values), wanted, strict=False):
            torch.testing.assert_close(ours[0], theirs.float(), atol=2e-5, rtol=0)
        assert torch.equal(whole.kept_positions(nth)[0], wanted[2])
    assert whole.seen == whole.text_end == 71 + 50 - 6 + 22 - 3
    assert whole.next_position == exported.get_seq_length() == whole.memory().units


@pytest.mark.parametrize(
    ("template", "system"), [("chat", None), ("none", None), ("original", "Be brief."), ("chat", "Be brief.")]
)
def test_the_first_layer_of_a_composed_context_is_that_of_one_read_of_both(
    lm: LongContextModel, template: str, system: str | None
) -> None:
    """Its keys know of no other token, so with everything kept it is all the same; the opening stands there once."""
    everything = RetentionPolicy(budget=2000, chunk_size=2000)
    whole = LongContextModel(lm.model, lm.tokenizer, lm.scorer, everything, template=template)
    apart = locret.compose([whole.read(text, system=system) for text in (FIRST.strip(), SECOND.strip())])
    together = whole.read(FIRST.strip() + "\n\n" + SECOND.strip(), system=system)
    assert apart.cache.seen == together.cache.seen
    assert apart.talk.ids == together.talk.ids, "what options such as repetition_penalty look back at"
    ours, theirs = (context.to_dynamic_cache().layers[0] for context in (apart, together))
    torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-4, rtol=0)
    torch.testing.assert_close(ours.values, theirs.values, atol=1e-5, rtol=0)
    assert torch.equal(apart.question_ids("Who?"), together.question_ids("Who?"))
    assert torch.equal(apart.cache.kept_positions(3), together.cache.kept_positions(3))


# -- what a composed context does -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"budget": 150}])
def test_it_is_saved_asked_and_talked_to_like_any_context(
    both: list[Context], options: dict[str, Any], tmp_path: Path
) -> None:
    before = [Prefix.of(context).digest for context in both]
    whole = locret.compose(both, **options)
    assert whole.name == "text + text"
    assert [Prefix.of(context).digest for context in both] == before
    assert whole.to_dynamic_cache().get_seq_length() == options.get("budget", whole.memory().units)
    whole.save(tmp_path / "a.ctx")
    again = whole.lm.load(tmp_path / "a.ctx")
    assert again.ask("Who?", max_new_tokens=8) == whole.ask("Who?", max_new_tokens=8)
    assert Prefix.from_file(tmp_path / "a.ctx").digest == Prefix.of(whole).digest
    chat = whole.chat()
    chat.say("Who?", max_new_tokens=4)
    chat.say("x " * 200, max_new_tokens=4)  # longer than a chunk: read like a text, within the budget
    assert chat.memory().units <= whole.cache.policy.budget + POLICY.local_len + 4
    assert whole.memory().actual <= whole.memory().planned
    small = whole.shrink(5)  # fewer than local tokens
    assert small.memory().units == Prefix.of(small).units == small.cache.policy.budget == 5
    assert small.memory().actual < whole.memory().actual


@pytest.mark.parametrize(
    "changes",
    [
        {"head_budgets": "adaptive"},
        {"key_bits": 8, "value_bits": 4, "rounding": "token", "exact_recent": 8},
        {"layer_budgets": "pyramid"},
        {"positions": "original"},
        {"merge": "loco"},
        {"decode_budget": 90, "decode_interval": 8},
    ],
)
@pytest.mark.parametrize("budget", [None, 30])
def test_every_store_and_policy_holds_both(changes: dict[str, Any], budget: int | None) -> None:
    parts = [(read("llama", 60, seed, **changes), skip) for seed, skip in ((0, 0), (1, 4))]
    before = [cache.copy() for cache, _ in parts]
    units = [layer.fill for layer in before[0].governed]
    assert [layer.fill for layer in shrunk(before[0], -(-sum(units) // 3)).governed] == units, "all fit"
    whole = joined(parts, budget)
    assert whole.seen == 116
    folded = torch.finfo(torch.float32).min if "merge" in changes else None  # LoCoCo's score of what it folded in
    for layer in range(3):
        for head in range(2):
            positions, scores = whole.kept_positions(layer)[0, head], whole.kept_scores(layer)[0, head]
            for own, distance in ((before[0], 0), (before[1], 56)):
                held = own.kept_positions(layer)[0, head].tolist(), own.kept_scores(layer)[0, head].tolist()
                score_at = dict(zip(*held, strict=True))
                for place, score in zip(positions.tolist(), scores.tolist(), strict=True):
                    if place != -1 and (place >= 60) == bool(distance):
                        assert score in (score_at[place - distance], folded)
    if budget is not None:
        assert sum(layer.fill for layer in whole.governed) <= budget * 3
    generate(whole.model, torch.cat([prompt(116, seed=5), prompt(9)], 1), cache=whole, max_new_tokens=3)
    prefill(whole.model, prompt(40), whole)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_contexts_that_do_not_go_together_are_refused(lm: LongContextModel, both: list[Context]) -> None:
    other = LongContextModel(lm.model, lm.tokenizer, lm.scorer, POLICY)
    bits = LongContextModel(lm.model, lm.tokenizer, lm.scorer, RetentionPolicy(**{**POLICY.to_dict(), "key_bits": 8}))
    host = LongContextModel(
        lm.model, lm.tokenizer, lm.scorer, RetentionPolicy(**{**POLICY.to_dict(), "host_budget": 50, "recall": 4})
    )
    told = lm.read(FIRST, system="Be brief.")
    rounded = bits.read(SECOND)
    rounded.lm = lm
    cases: list[tuple[Any, str]] = [
        ([], "compose joins two or more contexts"),
        ([both[0], both[1].chat()], "compose joins two or more contexts"),
        ([both[0], other.read(SECOND)], "belong to two models; load both with one"),
        ([both[0], told], r"were read with system=None and system='Be brief\.'"),
        ([both[0], rounded], "they were read with key_bits=16 and key_bits=8; read the texts with one key_bits"),
        (host.read([FIRST, SECOND]), "host_budget=50 holds the evicted units of one text"),
    ]
    for contexts, said in cases:
        with pytest.raises(ValueError, match=said):
            locret.compose(contexts)
    for options, said in (({"budget": 0}, "budget=0 is no number of units"), ({"name": 5}, "name=5 is no text")):
        with pytest.raises(ValueError, match=said):
            locret.compose(both, **options)


# -- a budget ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.lists(st.integers(0, 30), min_size=1, max_size=5), st.data())
def test_a_budget_is_divided_whole(budget: int, held: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=len(held), max_size=len(held)))
    units = divided(budget, weights, held)
    assert sum(units) == min(budget, sum(held))
    assert all(0 <= own <= most for own, most in zip(units, held, strict=True))
    fair = divided(budget, [1.0] * len(held), held)
    for own, most in zip(fair, held, strict=True):  # who gets less than another has all of its own
        assert own == most or own >= max(fair) - 1
