"""Values refitted at the last eviction of a read: the closed form, and that the fitted queries read better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from test_scorers import GREEDY, NUMBERS, make
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, load_cache, prefill, reference, save_cache
from locret.cache import refit
from locret.cache.refit import Refit
from locret.cache.store import Store
from locret.policy.selectors import Kept, KeptPerHead

ROOT = Path(__file__).parents[2]
every_kind = pytest.mark.parametrize("changes", [{}, {"head_budgets": "adaptive"}, {"positions": "original"}])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("held", "new", "kept"), [(9, 9, 3), (40, 7, 39), (33, 20, 1), (63, 5, 16)])
def test_values_are_those_of_the_normal_equations(held: int, new: int, kept: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(held)
    query = torch.randn(3, new, 8, generator=generator)
    keys, values = (torch.randn(held, 8, generator=generator) for _ in range(2))
    own = torch.randperm(held, generator=generator)[:kept].sort().values
    found = refit.refitted_values(query, keys, values, own, 0.35, softcap)
    wanted, before, after = reference.refitted_values(query, keys, values, own.tolist(), 0.35, refit.RIDGE, softcap)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert after <= before


def test_only_so_many_queries_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(*shape, generator=generator) for shape in ((2, 21, 8), (30, 8), (30, 8)))
    own = torch.arange(0, 30, 3)
    monkeypatch.setattr(refit, "QUERIES", 10)
    found = refit.refitted_values(query, keys, values, own, 0.35)
    wanted, _, _ = reference.refitted_values(
        query, keys, values, own.tolist(), 0.35, refit.RIDGE, queries=[0, 5, 10, 15, 20]
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_fitted_queries_of_a_real_text_read_better_in_every_layer_and_head(monkeypatch: pytest.MonkeyPatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(ROOT / "checkpoints/tiny").eval()
    heads, errors = RetainingHeads.from_pretrained(ROOT / "checkpoints/tiny-heads"), []
    apply = Refit.apply

    def watched(self: Refit, store: Store, kept: Kept) -> None:
        assert isinstance(kept, KeptPerHead)
        before, values = self.view, self.view.values.clone()
        apply(self, store, kept)
        group = self.query.shape[1] // self.kv_heads
        new, slots = self.query.shape[2], before.keys.shape[2]
        seen = torch.arange(slots) <= (slots - new + torch.arange(new))[:, None]
        for head in range(self.kv_heads):
            own = kept.units[0, head]
            logits = self.query[0, head * group : (head + 1) * group] @ before.keys[0, head].T * self.scaling
            logits = logits.masked_fill(~seen, -torch.inf).flatten(0, 1)
            wanted, weights = logits.softmax(-1) @ values[0, head], logits[:, own].softmax(-1)
            fitted = ~weights.isnan().any(-1)
            old, fresh = (
                (weights[fitted] @ v[0, head][own] - wanted[fitted]).square().sum() for v in (values, before.values)
            )
            errors.append((float(old), float(fresh)))

    monkeypatch.setattr(Refit, "apply", watched)
    monkeypatch.setattr(refit, "QUERIES", 10**6)  # all queries are fitted, so the error of all must fall
    text = (ROOT / "docs/architecture.md").read_text()

    ids = AutoTokenizer.from_pretrained(ROOT / "checkpoints/tiny")(text, return_tensors="pt")["input_ids"][:, :700]
    policy = RetentionPolicy(budget=48, chunk_size=200, stabilizers=8, local_len=20, refit=True)
    prefill(model, ids, RetentionCache(model, heads, policy))
    assert len(errors) == 5 * 4
    assert all(fresh < old for old, fresh in errors)


@every_kind
def test_only_values_change_in_as_many_bytes(changes: dict[str, Any]) -> None:
    model, ids, caches = build("llama"), prompt(60), []
    for fitted in (False, True):
        cache = RetentionCache(model, make("random", model), RetentionPolicy(**NUMBERS, **changes, refit=fitted))
        prefill(model, ids[:, :-6], cache)
        caches.append(cache)
    plain, fitted_cache = caches
    assert plain.memory() == fitted_cache.memory()
    assert plain.memory().planned == plain.memory().actual
    assert torch.equal(plain.kept_positions(0), fitted_cache.kept_positions(0))
    (before, _), (after, _) = plain.governed[0].state(), fitted_cache.governed[0].state()
    kept = slice(None) if "head_budgets" in changes else (..., slice(0, NUMBERS["budget"]), slice(None))
    torch.testing.assert_close(before["keys"], after["keys"])
    assert not torch.allclose(before["values"][kept], after["values"][kept])


@pytest.mark.parametrize("scorer", ["snapkv", "h2o", "key_norm"])
@pytest.mark.parametrize("when", ["chunk", "prompt_end"])
@pytest.mark.parametrize("family", ["llama-mqa", "gemma2", "phi3-longrope"])
def test_rows_read_together_are_fitted_like_rows_read_alone(
    tmp_path: Path, family: str, when: str, scorer: str
) -> None:
    model = build(family)
    policy = RetentionPolicy(**NUMBERS, refit=True, when=when)
    ids = torch.cat([prompt(40, seed=1), prompt(40, seed=2)])
    both = RetentionCache(model, make(scorer, model), policy)
    prefill(model, ids, both)
    for row in range(2):
        alone = RetentionCache(model, make(scorer, model), policy)
        prefill(model, ids[row : row + 1], alone)
        for mine, theirs in zip(both.governed, alone.governed, strict=True):
            torch.testing.assert_close(
                mine.state()[0]["values"][row], theirs.state()[0]["values"][0], rtol=1e-3, atol=1e-4
            )
    save_cache(both, tmp_path / "book.ctx")
    loaded = load_cache(tmp_path / "book.ctx", model, make(scorer, model))
    answers = [generate(model, cache=one, max_new_tokens=8, **GREEDY) for one in (loaded, both)]
    assert torch.equal(*answers)


def test_nothing_evicted_is_nothing_fitted() -> None:
    model, ids = build("llama"), prompt(40)
    cache = RetentionCache(model, "random", RetentionPolicy(budget=64, chunk_size=9, local_len=4, refit=True))
    torch.testing.assert_close(prefill(model, ids, cache), model(ids).logits[:, -1], rtol=1e-3, atol=1e-4)


def test_a_scorer_that_rates_after_the_pass_is_refused() -> None:
    with pytest.raises(
        ValueError, match="^refit=True fits values to a layer's queries when it evicts, but scorer sirllm"
    ):
        RetentionCache(build("llama"), "sirllm", RetentionPolicy(**NUMBERS, refit=True))


def test_growing_memory_whose_last_chunk_may_evict_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="where memory=linear a text's last chunk may find room without one; use"):
        RetentionPolicy(budget=64, refit=True, memory="linear")
