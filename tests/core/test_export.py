"""A compact cache as an ordinary prefix: a plain `DynamicCache` and an untouched model answer as we do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, prompt
from transformers import DynamicCache

from locret import RetentionCache, RetentionPolicy, generate, prefill, save_cache
from locret.engines.prefix import Prefix

GREEDY = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
NUMBERS = {"budget": 16, "chunk_size": 12, "stabilizers": 4, "local_len": 5}
FAMILIES = ("llama", "qwen3", "phi3-partial", "llama-yarn", "llama-mqa")


def read(family: str = "llama", tokens: int = 71, rows: int = 1, **changes: Any) -> tuple[Any, RetentionCache]:
    model = build(family)
    cache = RetentionCache(model, "key_norm", RetentionPolicy(**{**NUMBERS, **changes}))
    prefill(model, prompt(tokens, batch=rows), cache)
    return model, cache


def theirs(family: str, exported: DynamicCache, last: torch.Tensor, new: int = 9) -> Any:
    """Let a model that never met us go on from a prefix."""
    nothing = torch.full((len(last), exported.get_seq_length()), 3)
    ids = torch.cat([nothing, last], dim=1)
    mask = torch.ones_like(ids)
    return build(family).generate(ids, attention_mask=mask, past_key_values=exported, max_new_tokens=new, **GREEDY)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_plain_cache_answers_as_ours(family: str, rows: int) -> None:
    model, cache = read(family, rows=rows)
    last = cache.last_tokens
    assert last is not None
    cache.take_back()  # so that both have the last token of the prompt to feed
    exported = cache.to_dynamic_cache()
    ours: Any = generate(model, cache=cache, max_new_tokens=9, **GREEDY)
    other = theirs(family, exported, last)
    assert torch.equal(ours.sequences[:, -9:], other.sequences[:, -9:])
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(other.logits), atol=1e-4, rtol=0)


@pytest.mark.parametrize("new", [60, 61, 62])
def test_after_a_long_answer_that_evicted_units_begin_at_zero_again(new: int) -> None:
    model, cache = read(decode_budget=25, decode_interval=6)
    longer = cache.copy()
    answer: Any = generate(model, cache=cache, max_new_tokens=new, **GREEDY)
    exported = cache.to_dynamic_cache()
    assert cache.memory().units < 25  # the token that is fed now evicts nothing
    assert exported.get_seq_length() == cache.governed[0].fill
    ours: Any = generate(model, cache=longer, max_new_tokens=new + 1, **GREEDY)
    other = theirs("llama", exported, answer.sequences[:, -1:], new=1)
    torch.testing.assert_close(other.logits[0], ours.logits[-1], atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama", {"positions": "original"}, 'positions="original" leaves gaps .* read the text with .*"compact"'),
        ("llama", {"head_budgets": "adaptive"}, 'head_budgets="adaptive" .* different numbers of units'),
        ("llama", {"layer_budgets": "pyramid"}, 'layer_budgets="pyramid" leave heads or layers with different numbers'),
        ("gemma3", {}, "slide over a window"),
        ("phi3-longrope", {}, "in another way below 64 tokens"),
    ],
)
def test_what_is_no_ordinary_prefix_is_refused(family: str, changes: dict[str, Any], says: str) -> None:
    _, cache = read(family, **changes)
    with pytest.raises(ValueError, match=says):
        cache.to_dynamic_cache()


# -- from its file alone, without the backbone ------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "long answer": {"decode_budget": 25, "decode_interval": 6},
    "codes": {"key_bits": 4, "value_bits": 8, "exact_recent": 4},
    "codes by token": {"key_bits": 8, "rounding": "token", "exact_layers": 1},
    "second tier": {"host_budget": 9, "recall": 3},
    "codes in two tiers": {"host_budget": 9, "recall": 3, "key_bits": 8, "value_bits": 8},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "phi3-partial", "llama-yarn", "llama-3.1-rope", "qwen3"])
def test_a_file_is_the_prefix_that_its_cache_is(family: str, form: str, tmp_path: Path) -> None:
    model, cache = read(family, 45, **FORMS[form])
    if form == "long answer":  # which evicts, so that units do not begin at position 0
        generate(model, cache=cache, max_new_tokens=40, do_sample=False, eos_token_id=None)
        assert cache.next_position > cache.memory().units
    save_cache(cache, tmp_path / "a.ctx")
    ours, theirs = Prefix.of(cache), Prefix.from_file(tmp_path / "a.ctx")
    for mine, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)
    assert (ours.tokens, ours.vocab_size, ours.model_type) == (theirs.tokens, theirs.vocab_size, theirs.model_type)
    assert ours.digest == theirs.digest
