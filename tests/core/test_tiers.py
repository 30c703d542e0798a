"""Two tiers: what eviction drops is remembered within bounds, and every query recalls its own few units."""

# B batch, K KV heads, S units

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.shipped import find

IDS = torch.randint(5, 890, (2, 700), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(find("checkpoints/tiny")).eval()


@pytest.fixture(scope="module")
def heads() -> RetainingHeads:
    return RetainingHeads.from_pretrained(find("checkpoints/tiny-heads"))


def small(**changes: Any) -> RetentionPolicy:
    settings = {"budget": 16, "chunk_size": 64, "stabilizers": 4, "local_len": 8, "host_budget": 40, "recall": 4}
    return RetentionPolicy(**{**settings, **changes})


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("tokens", [300, 77, 5, 1])
def test_recalling_everything_is_full_attention(model: Any, heads: RetainingHeads, positions: str, tokens: int) -> None:
    policy = small(when="prompt_end", positions=positions, host_budget="all", recall=1000)
    cache, ids = RetentionCache(model, heads, policy), IDS[:, :tokens]
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    prefill(model, ids, cache)
    ours: Any = generate(model, cache=cache, **options)
    theirs = model.generate(ids, **options)
    assert cache.memory().host_units == max(0, tokens - 16 - 8)
    for mine, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def evicted_scores(model: Any, heads: RetainingHeads, policy: RetentionPolicy) -> list[tuple[torch.Tensor, ...]]:
    """Return scores and positions of everything that the policy evicts, per layer."""
    cache = RetentionCache(model, heads, small(host_budget="all", **policy_changes(policy)))
    prefill(model, IDS, cache)
    return [(layer.host.store.held("scores"), layer.host.store.held("positions")) for layer in cache.governed]


def policy_changes(policy: RetentionPolicy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in ("budget", "chunk_size", "stabilizers", "local_len")}


@pytest.mark.parametrize("chunk_size", [64, 37, 500])
def test_a_bounded_tier_holds_the_best_of_all_that_was_evicted(
    model: Any, heads: RetainingHeads, chunk_size: int
) -> None:
    policy = small(chunk_size=chunk_size)
    cache = RetentionCache(model, heads, policy)
    prefill(model, IDS, cache)
    for layer, (scores, positions) in zip(cache.governed, evicted_scores(model, heads, policy), strict=True):
        assert scores.shape[-1] == 700 - 16 - 8
        # Equal tokens have equal scores in the first layer: positions ascend, and the later of two units is the better.
        best = positions.gather(2, scores.argsort(dim=-1, stable=True)[..., -40:]).sort(dim=-1).values
        assert torch.equal(layer.host.store.held("positions"), best)


def test_by_recency_it_holds_the_last_of_the_text(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, small(host_by="recency"))
    prefill(model, IDS, cache)
    for layer, (_, positions) in zip(cache.governed, evicted_scores(model, heads, small()), strict=True):
        assert torch.equal(layer.host.store.held("positions"), positions[..., -40:])


@pytest.mark.parametrize("tokens", [100, 400, 700])
def test_both_tiers_have_the_bytes_that_were_planned(model: Any, heads: RetainingHeads, tokens: int) -> None:
    cache = RetentionCache(model, heads, small())
    prefill(model, IDS[:, :tokens], cache, new_tokens=20)
    memory = cache.memory()
    assert (memory.host, memory.actual) == (memory.host_planned, memory.planned)
    assert memory.host_units == 40
    unit = 2 * cache.backbone.head_dim * 4 + 8
    assert memory.host == 2 * len(cache.backbone.layers) * cache.backbone.num_kv_heads * 40 * unit


def test_what_is_moved_is_what_was_recalled(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, small())
    prefill(model, IDS[:1], cache)
    before = cache.memory().moved
    generate(model, cache=cache, max_new_tokens=5, do_sample=False, eos_token_id=-1)
    backbone = cache.backbone
    # The last token of the prompt is fed again for its logits, and the fifth new one is never fed.
    assert cache.memory().moved - before == 5 * len(backbone.layers) * backbone.num_kv_heads * 4 * backbone.head_dim * 8


def test_an_answer_may_evict_into_the_second_tier(model: Any, heads: RetainingHeads) -> None:
    cache = RetentionCache(model, heads, small(decode_budget=24, decode_interval=8))
    prefill(model, IDS, cache)
    generate(model, cache=cache, max_new_tokens=60, do_sample=False, eos_token_id=-1)
    memory = cache.memory()
    assert memory.units <= 24
    assert memory.host_units == 40
    held = [
        torch.cat([layer.store.held("positions"), layer.host.store.held("positions")], -1) for layer in cache.governed
    ]
    assert all(int(positions.sort(dim=-1).values.diff(dim=-1).min()) > 0 for positions in held)


@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
@pytest.mark.parametrize("positions", ["compact", "original"])
def test_units_are_in_the_order_of_the_text_when_they_are_looked_up(
    model: Any, heads: RetainingHeads, positions: str, when: str
) -> None:
    policy = small(positions=positions, when=when, decode_budget=24, decode_interval=8)
    cache = RetentionCache(model, heads, policy)
    for text in (IDS[:1, :200], IDS[1:, :300]):
        prefill(model, text, cache)
        generate(model, cache=cache, max_new_tokens=30, do_sample=False, eos_token_id=-1)
        for layer in cache.governed:
            assert int(layer.host.store.held("positions").diff(dim=-1).min()) > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"host_budget": None}, "recall=4 needs a second tier"),
        ({"recall": 0}, "host_budget=40 keeps units that nothing recalls"),
        ({"recall": -1}, "recall=-1 is too small"),
        ({"recall": 41}, "recall=41 is more than host_budget=40 can hold"),
        ({"host_budget": 0}, "host_budget=0 is too small"),
        ({"host_budget": "most"}, "host_budget=most is neither"),
        ({"host_by": "luck"}, 'host_by="luck" is unknown'),
        ({"head_budgets": "adaptive"}, "different numbers of units"),
    ],
)
def test_a_second_tier_that_makes_no_sense_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        small(**changes)


def test_an_unknown_lookup_is_refused(model: Any, heads: RetainingHeads) -> None:
    with pytest.raises(ValueError, match='lookup "exakt" is unknown; did you mean exact'):
        RetentionCache(model, heads, small(recall_by="exakt"))
