"""Protected spans and fair shares: what is named stays in every layer and KV head, whatever else comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from families import build, padded, prompt
from oracle import kept_with_protection
from torch import Tensor

from locret import RetainingHeads, RetentionCache, RetentionPolicy, Span, generate, load_cache, prefill, save_cache
from locret.cache.compose import joined, shrunk
from locret.cache.limits import Limits
from locret.policy.protection import Guarantee
from locret.policy.schedule import layer_budgets as budgets_of
from locret.policy.schedule import protected

TOKENS = 130
PINS, SHARES = ((3, 8), (47, 52)), ((8, 40, 0.25), (60, 120, 0.125))
SPANS = [*(Span(*one) for one in PINS), *(Span(*one) for one in SHARES)]
POLICIES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "small chunks": {"chunk_size": 5},
    "one chunk": {"chunk_size": 200},
    "original positions": {"positions": "original"},
    "growing": {"memory": "sqrt"},
    "smaller chunks": {"memory": "linear", "decremental": True, "min_chunk": 4},
    "two tiers": {"host_budget": 30, "recall": 4},
    "rounded": {"key_bits": 4, "value_bits": 4},
}
OTHERS = {
    "a pyramid": {"layer_budgets": "pyramid", "pyramid_beta": 2, "budget": 48},
    "ragged heads": {"head_budgets": "adaptive"},
    "ragged heads without a floor": {"head_budgets": "adaptive", "head_floor": 0.0},
    "two tiers of ragged heads": {"head_budgets": "adaptive", "host_budget": 30, "recall": 4},
    "at the end": {"when": "prompt_end"},
    "shares": {"head_budgets": "shares", "head_shares": (0.25, 1.5, 0.5, 0.25, 2.0, 1.5)},
}
BLOCKS = {"budget": 64, "recall_by": "infllm:block=8,local=16,init=4,topk=2", "chunk_size": 8, "recall": 0}
BLOCKS |= {"stabilizers": 0}


def policy(**changes: Any) -> RetentionPolicy:
    return RetentionPolicy(**{"budget": 32, "chunk_size": 17, "stabilizers": 6, "local_len": 6, **changes})


def by_lot(rules: RetentionPolicy, family: str = "llama") -> RetentionCache:
    """Return a cache whose scores are drawn by position, layer and head: what else is held does not matter."""
    return RetentionCache(build(family), "random", rules)


def every_head(cache: RetentionCache, row: int = 0) -> list[Tensor]:
    found = [head for layer in cache.backbone.layers for head in cache.kept_positions(layer)[row]]
    return [head[head >= 0] for head in found]


def layer_budgets(cache: RetentionCache) -> list[int]:
    """Return for every KV head the budget that shares are of: the policy's, or its layer's if that is smaller."""
    own = budgets_of(cache.policy, cache.limits.heads, None)
    heads = [shape.num_kv_heads for shape in cache.backbone.full_shapes]
    if cache.policy.head_budgets == "shares":
        own = (cache.policy.budget,) * len(heads)
    return [min(cache.policy.budget, units) for units, count in zip(own, heads, strict=True) for _ in range(count)]


def check_guaranteed(
    cache: RetentionCache, spans: Sequence[Span], row: int = 0, read: int | None = None, most: int = TOKENS
) -> None:
    """Check what every head holds of a row; shares are of the cache's budgets, or of `most` where that is less."""
    read = cache.seen if read is None else read
    for head, budget in zip(every_head(cache, row), layer_budgets(cache), strict=True):
        for span in spans:
            held = int(((head >= span.start) & (head < (span.end or read))).sum())
            own = len(span.within(read))
            assert held >= (own if span.share is None else min(own, span.units(min(budget, most)))), (span, head)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_held_is_what_the_slow_oracle_holds_after_every_chunk(name: str) -> None:
    rules, ids = policy(**POLICIES[name]), prompt(TOKENS, seed=1)
    pins, shares = (PINS[1:], SHARES[1:]) if rules.memory != "fixed" else (PINS, SHARES)
    whole = by_lot(policy(budget=TOKENS, stabilizers=0))
    prefill(whole.model, ids, whole)
    scores = torch.stack([whole.kept_scores(layer)[0] for layer in whole.backbone.layers])
    cache, seen = by_lot(rules), list[list[list[int]]]()
    cache.protect([Span(*one) for one in (*pins, *shares)])
    prefill(cache.model, ids, cache, on_chunk=lambda cache: seen.append([head.tolist() for head in every_head(cache)]))
    steps = Limits(rules, cache.scorer, cache.backbone).plan(TOKENS).steps
    least = [(start, end, int(share * rules.budget)) for start, end, share in shares]
    for nth, own in enumerate(scores.flatten(0, 1)):
        layer = nth // scores.shape[1]
        budgets = [step.budgets[layer] for step in steps]
        guarded = [*(protected(rules, units) for units in budgets[:-1]), 0]
        expected = kept_with_protection(own.tolist(), [step.tokens for step in steps], budgets, guarded, [*pins], least)
        assert [chunk[nth] for chunk in seen] == expected[:-1]
        assert every_head(cache)[nth].tolist() == expected[-1]


FAMILIES = [
    *(("llama", name) for name in ["shares", *POLICIES, *OTHERS][:-1]),
    ("gemma3", "ragged heads"),
    ("phi3", "growing"),
]


@pytest.mark.parametrize(("family", "name"), FAMILIES)
def test_guarantees_hold_after_every_chunk_and_take_no_byte(family: str, name: str) -> None:
    rules, ids = policy(**{**POLICIES, **OTHERS}[name]), prompt(TOKENS, seed=2)
    model = build(family)
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    bare, cache = (RetentionCache(model, heads, rules) for _ in range(2))
    spans = [one for one in SPANS if one.start > 40 or rules.memory == "fixed"]
    cache.protect(spans)
    chunks = []

    def look(cache: RetentionCache) -> None:
        chunks.append(cache.seen)
        if rules.when == "chunk":
            check_guaranteed(cache, spans)

    prefill(model, ids, bare)
    prefill(model, ids, cache, on_chunk=look)
    check_guaranteed(cache, spans)
    assert chunks
    fills, without = ([layer.fill for layer in one.governed] for one in (cache, bare))
    assert cache.memory().actual <= cache.memory().planned
    if rules.head_budgets == "shares":  # a layer of many units may be full at another chunk, or never
        assert sum(fills) == sum(without)
    else:
        assert fills == without
        assert cache.memory() == bare.memory()
    assert any(len(set(spans[0].within(TOKENS)) - set(head.tolist())) for head in every_head(bare))


@pytest.mark.parametrize(
    "scorer", ["random:sinks=12", "streaming", "snapkv", "h2o", "nacl", "sage_kv", "tova", "sirllm"]
)
def test_every_method_leaves_room_for_what_is_protected(scorer: str) -> None:
    shares = [] if scorer in ("nacl", "sage_kv", "tova") else [policy(**OTHERS["shares"])]
    for rules in (policy(when="prompt_end" if scorer == "sage_kv" else "chunk"), *shares):
        cache = RetentionCache(build("llama"), scorer, rules)
        cache.protect(SPANS)
        prefill(cache.model, prompt(TOKENS, seed=3), cache)
        check_guaranteed(cache, SPANS)
        assert sum(layer.fill for layer in cache.governed) <= (32 + 6) * 3


@pytest.mark.parametrize("cut", [1, 5, 41, 60, 129])
def test_a_span_may_begin_and_end_anywhere_between_texts_of_one_session(cut: int) -> None:
    ids, cache = prompt(TOKENS, seed=4), by_lot(policy())
    cache.protect([span for span in SPANS if (span.end or 0) <= cut])
    prefill(cache.model, ids[:, :cut], cache)
    cache.protect([span for span in SPANS if span.start >= cut or (span.end or 0) <= cut])
    prefill(cache.model, ids[:, cut:], cache)
    check_guaranteed(cache, cache.protected[0] if cache.protected else ())


def test_rows_have_spans_of_their_own_and_hold_what_each_does_alone() -> None:
    model, texts = build("llama"), [prompt(length, seed=length) for length in (90, 61, 12, 75)]
    spans = [[Span(0, 5)], [Span(20, 30), Span(30, 60, 0.25)], [], [Span(2, 70, 0.5)]]
    heads = RetainingHeads.for_model(model, hidden_dim=8, seed=0)
    ids, mask = padded(texts)
    together = RetentionCache(model, heads, policy())
    together.protect(*spans)
    prefill(model, ids, together, attention_mask=mask)
    for row, (text, own) in enumerate(zip(texts, spans, strict=True)):
        alone = RetentionCache(model, heads, policy())
        alone.protect(own)
        prefill(model, text, alone)
        for one, other in zip(every_head(together, row), every_head(alone), strict=True):
            assert torch.equal(one, other)
        check_guaranteed(alone, own)
    picked = together.copy()
    picked.select_rows(torch.tensor([3, 1, 1]))
    assert picked.protected == (tuple(spans[3]), tuple(spans[1]), tuple(spans[1]))
    prefill(model, torch.cat([prompt(40, seed=9)] * 3), picked)
    check_guaranteed(picked, spans[1], row=2, read=61 + 40)
    alike = by_lot(policy())
    alike.protect([Span(0, 12)])  # of every row
    assert [one.protected for one in alike.split(4)] == [((Span(0, 12),),)] * 4
    generate(alike.model, ids, attention_mask=mask, cache=alike, max_new_tokens=1)
    for row, text in enumerate(texts):
        check_guaranteed(alike, [Span(0, 12)], row, text.shape[1])


@pytest.mark.parametrize("num_beams", [1, 2])
def test_an_answer_evicts_nothing_that_is_protected(num_beams: int) -> None:
    cache, ids = by_lot(policy(decode_budget=44, decode_interval=4)), prompt(TOKENS, seed=5)
    cache.protect([Span(0, 12), Span(12, 60, 0.25)])
    generate(cache.model, ids, cache=cache, max_new_tokens=60, min_new_tokens=60, num_beams=num_beams)
    check_guaranteed(cache, cache.protected[0])
    assert max(layer.fill for layer in cache.governed) <= 44


@pytest.mark.parametrize("name", ["fixed", "shares", "ragged heads", "two tiers", "rounded"])
def test_copies_files_and_smaller_caches_protect_on(name: str, tmp_path: Any) -> None:
    rules = policy(**{**POLICIES, **OTHERS}[name])
    cache, ids = by_lot(rules), prompt(TOKENS, seed=6)
    cache.protect(SPANS)
    prefill(cache.model, ids, cache)
    save_cache(cache, tmp_path / "one.ctx")
    loaded = load_cache(tmp_path / "one.ctx", cache.model, "random")
    assert loaded.protected == cache.protected == (tuple(SPANS),)
    for one in (cache.copy(), loaded):
        prefill(one.model, prompt(90, seed=7), one)
        check_guaranteed(one, SPANS)
    small = shrunk(cache, 24)
    assert small.policy.budget == 24
    check_guaranteed(small, SPANS)
    assert shrunk(cache, 64).protected == loaded.protected  # some layers hold less than their spans may
    (cache := by_lot(rules)).protect([Span(TOKENS - 12, None)])
    prefill(cache.model, ids, cache)
    check_guaranteed(shrunk(cache, 20), [Span(TOKENS - 12, TOKENS)])


@pytest.mark.parametrize("name", ["fixed", "shares", "ragged heads"])
@pytest.mark.parametrize("afterwards", [False, True])
def test_texts_read_apart_keep_what_each_protects(name: str, afterwards: bool) -> None:
    caches, lengths, model = [], (TOKENS, 90, 70), build("llama")
    for nth, length in enumerate(lengths):
        cache = RetentionCache(model, "random", policy(**{**POLICIES, **OTHERS}[name]))
        cache.protect([Span(5, 12), Span(20, None if nth == 1 else 60, 0.125)])
        prefill(cache.model, prompt(length, seed=nth), cache)
        caches.append(cache)
    parts = [(one.copy(), 8 if nth else 0) for nth, one in enumerate(caches)]
    whole = shrunk(joined(parts), 60) if afterwards else joined(parts, 60)
    starts = [0, TOKENS - 8, TOKENS + 90 - 16]
    spans = [Span(5, 12), Span(20, 60, 0.125)]
    spans += [Span(starts[1] + 8, starts[1] + 12), Span(starts[1] + 20, starts[1] + 90, 0.125)]
    spans += [Span(starts[2] + 8, starts[2] + 12), Span(starts[2] + 20, starts[2] + 60, 0.125)]
    assert whole.protected == (tuple(spans),)
    check_guaranteed(whole, spans, most=32)  # what they were read with
    assert sum(layer.fill for layer in whole.governed) <= 60 * len(whole.governed)
    with pytest.raises(ValueError, match=r"need \d+ units .* raise budget, or protect less"):
        joined([(one.copy(), 0) for one in caches], 24)


def test_pinned_tokens_count_for_the_share_they_are_in() -> None:
    one = Guarantee.of([Span(0, 10), Span(5, 8), Span(0, 40, 0.5), Span(40, None, 0.25)], 32)
    assert one.pins == ((0, 10),)
    assert [one.needed(read) for read in (0, 4, 12, 30, 44, 99)] == [0, 4, 12, 16, 20, 24]


@pytest.mark.parametrize(
    ("spans", "changes", "message"),
    [
        ([Span(0, 20, name="system"), Span(30, 50)], {}, "need 40 units .* for system .tokens 0 to 20.*32"),
        ([Span(0, 30)], {}, r"need 30 units .* stabilizers \(6\) included; lower those, or protect less"),
        ([Span(0, 40, 0.2), Span(39, 99, 0.2)], {}, "have tokens in common, and a share each"),
        ([Span(0, 40, 0.01)], {}, "is less than one unit; give 0.032 or more"),
        ([Span(0, 9)], {"memory": "adaptive"}, 'memory="adaptive" lets layers share'),
        ([Span(0, 4)], BLOCKS, "by a rule of its own.*set init in recall_by"),
        ([Span(0, 24)], {"decode_budget": 34, "decode_interval": 8}, "decode_budget=34 holds 20 beside local_len"),
        ([Span(0, 24)], {"layer_budgets": "pyramid"}, 'full-attention layer 2; raise budget, use layer_budgets="unif'),
    ],
)
def test_what_the_budget_cannot_hold_is_refused_before_anything_is_read(
    spans: list[Span], changes: dict[str, Any], message: str
) -> None:
    cache = RetentionCache(build("llama"), "streaming" if changes is BLOCKS else "random", policy(**changes))
    with pytest.raises(ValueError, match=message):
        cache.protect(spans)
    assert cache.protected == ()


def test_stabilizers_that_nobody_gave_make_room() -> None:
    cache = RetentionCache(build("llama"), "random", RetentionPolicy(budget=32, chunk_size=17))
    cache.protect([Span(0, 30)])
    prefill(cache.model, prompt(TOKENS, seed=1), cache)
    check_guaranteed(cache, [Span(0, 30)])


OUTSIDE = "the question .tokens 58 to 61. cannot be protected, for the text has 60 tok"
OPEN = Span(10, None, name="the log")


@pytest.mark.parametrize(
    ("span", "tokens", "streamed", "changes", "message"),
    [
        (Span(0, 12), TOKENS, False, {"memory": "square", "stabilizers": 0}, 'chunk 1 memory holds .*memory="fixed"'),
        (Span(58, 61, name="the question"), 60, False, {}, OUTSIDE),
        (Span(58, 61, name="the question"), 60, True, {}, OUTSIDE),
        (OPEN, TOKENS, False, {}, r"need 41 units .* the log .tokens 10 to the end., .* chunk 3 .* 32; raise bud"),
        (OPEN, TOKENS, True, {}, "need 41 units .* but 32 units may stay here; raise budget"),
    ],
)
def test_what_a_text_has_no_room_for_is_refused_while_it_is_read(
    span: Span, tokens: int, streamed: bool, changes: dict[str, Any], message: str
) -> None:
    cache, ids = by_lot(policy(**changes)), prompt(tokens, seed=1)
    cache.protect([span])
    with pytest.raises(ValueError, match=message):
        prefill(cache.model, iter(ids[0].tolist()) if streamed else ids, cache)


def test_what_is_gone_cannot_be_pinned_and_what_is_held_can() -> None:
    cache = by_lot(policy())
    prefill(cache.model, prompt(TOKENS, seed=1), cache)
    with pytest.raises(ValueError, match="cannot be protected any more: 20 of its tokens have been read"):
        cache.protect([Span(0, 20)])
    cache.protect([Span(TOKENS - 6, TOKENS)])
    prefill(cache.model, prompt(TOKENS, seed=2), cache)
    check_guaranteed(cache, [Span(TOKENS - 6, TOKENS)])
    cache.protect()
    assert cache.protected == ()


@pytest.mark.parametrize(
    ("protect", "message"),
    [
        (lambda _: Span(5, 5), "holds no token"),
        (lambda _: Span(0, 5.0), "whole numbers"),  # type: ignore[arg-type]
        (lambda _: Span(0, 5, float("nan")), "give more than 0 and at most 1"),
        (lambda cache: cache.protect([(0, 5)]), r"\(0, 5\) is no span of a text; give locret.Span"),
        (lambda cache: cache.protect(Span(0, 3)), r"is no list of spans; give one for all rows, as \[locret.Span"),
    ],
)
def test_a_span_is_tokens_and_a_share_in_a_list(protect: Callable[[RetentionCache], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        protect(by_lot(policy()))


def test_spans_of_other_rows_than_there_are_are_refused() -> None:
    cache = by_lot(policy())
    cache.protect([Span(0, 3)], [Span(0, 4)])
    with pytest.raises(ValueError, match="spans of 2 rows are protected, but there are 1"):
        prefill(cache.model, prompt(40, seed=1), cache)
