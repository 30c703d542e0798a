"""Ids, masks, models, scorers and options as people give them: what means something is taken, the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import prompt
from transformers import DynamicCache

from locret import RetentionCache, RetentionPolicy, generate, load_cache, prefill, save_cache
from locret.scorers import Chunk, KeyNormScorer

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 5}
IDS = prompt(45)


def new_cache(model: Any, scorer: Any = "snapkv", **changes: Any) -> RetentionCache:
    return RetentionCache(model, scorer, RetentionPolicy(**{**POLICY.to_dict(), **changes}))


GIVEN: dict[str, Any] = {
    "list": IDS[0].tolist(),
    "array": IDS.numpy(),
    "dict": {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)},
    "iterator": iter(IDS[0].tolist()),
}


@pytest.mark.parametrize("form", GIVEN)
def test_ids_may_come_as_people_have_them(model: Any, form: str) -> None:
    assert torch.equal(prefill(model, GIVEN[form], new_cache(model)), prefill(model, IDS, new_cache(model)))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[None], "input_ids has 3 dimensions"),
        (IDS.float(), "input_ids holds float32 numbers"),
        (-IDS, "token ids are 0 or more"),
        (IDS + 199, "the backbone knows 199 tokens"),
        ([3, 2**70], "input_ids is not a table of numbers"),
        ("a text", "input_ids is a str; give token ids"),
        ([[3, 4], [5]], r"rows of different length\); pad them on the left, or give an iterator"),
        ({"ids": IDS}, "a mapping without a key 'input_ids'"),
        ({"input_ids": IDS, "pixel_values": IDS}, "pixel_values would be ignored"),
        (iter([]), "input_ids is empty; a prompt needs at least one token"),
        (iter([3, None, 4]), "input_ids yields None, which is not a token id"),
        (iter([3, 4, 199]), "the backbone knows 199 tokens"),
    ],
)
def test_what_cannot_be_read_is_refused_before_anything_changes(model: Any, ids: Any, message: str) -> None:
    cache = new_cache(model)
    with pytest.raises(ValueError, match=message) as refused:
        prefill(model, ids, cache)
    assert "\n" not in str(refused.value)
    if isinstance(ids, torch.Tensor | list | dict | str):
        assert not cache.seen
        prefill(model, IDS, cache)
        with pytest.raises(ValueError, match=message):
            generate(model, ids, cache=new_cache(model), **GREEDY)


def test_masks_may_come_as_people_have_them_and_hold_0_and_1(model: Any) -> None:
    ids, mask = prompt(45, batch=2), torch.ones(2, 45, dtype=torch.long)
    mask[1, :9] = 0
    expected = generate(model, ids, attention_mask=mask, cache=new_cache(model), **GREEDY)
    for given in (mask.tolist(), mask.bool(), mask.float(), mask.numpy()):
        assert torch.equal(generate(model, ids, attention_mask=given, cache=new_cache(model), **GREEDY), expected)
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
    assert torch.equal(generate(model, inputs, cache=new_cache(model), **GREEDY), expected)
    for wrong, message in (
        (mask * 2, "attention_mask holds 2; give 1 for a token and 0 for padding"),
        (mask * torch.nan, "attention_mask holds nan"),
        ("ones", r"attention_mask is not a table of numbers \(str\)"),
        (mask[:, 1:], r"attention_mask has shape \(2, 44\) but input_ids \(2, 45\)"),
        (mask.flip(1), "padding on the right; pad on the left"),
        (mask * torch.tensor([[0], [1]]), "row 0 of input_ids is padding only"),
    ):
        with pytest.raises(ValueError, match=message):
            prefill(model, ids, new_cache(model), wrong)
        with pytest.raises(ValueError, match=message):
            generate(model, ids, cache=new_cache(model), attention_mask=wrong, **GREEDY)


# -- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", ["snapkv", "sirllm"])
@pytest.mark.parametrize("beams", [1, 2])
def test_a_conversation_goes_on_only_with_what_was_answered_also_from_a_file(
    model: Any, scorer: str, beams: int, tmp_path: Path
) -> None:
    cache = new_cache(model, scorer)
    answer = generate(model, IDS, cache=cache, num_beams=beams, **GREEDY)
    wrong = answer.clone()
    wrong[0, 3 if beams > 1 else 46] += 1
    with pytest.raises(ValueError, match="tokens of input_ids are not those that the cache has read"):
        generate(model, torch.cat([wrong, IDS], dim=1), cache=cache, **GREEDY)
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model, scorer)
    with pytest.raises(ValueError, match="tokens of input_ids are not those that the cache has read"):
        generate(model, torch.cat([wrong, IDS], dim=1), cache=loaded, **GREEDY)
    for one in (cache, loaded):
        generate(model, torch.cat([answer, IDS], dim=1), cache=one, **GREEDY)
        assert one.seen >= 45 * 2


# -- scores and options -----------------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "returned scores of type NoneType, not a tensor": lambda _: None,
    r"returned scores of shape \(1, 1, 10\)": lambda scores: scores[:, :1],
    "returned scores that are NaN or infinite": lambda scores: scores * torch.nan,
}


@pytest.mark.parametrize("head_budgets", ["uniform", "adaptive"])
@pytest.mark.parametrize("message", WRONG)
def test_a_scorer_that_returns_no_numbers_is_noticed_at_once(model: Any, message: str, head_budgets: str) -> None:
    class Wrong(KeyNormScorer):
        def score(self, chunk: Chunk) -> Any:
            return WRONG[message](super().score(chunk))

    cache = new_cache(model, Wrong(), head_budgets=head_budgets)
    with pytest.raises(ValueError, match=message):
        prefill(model, IDS, cache)
    with pytest.raises(ValueError, match="interrupted"):
        generate(model, cache=cache, **GREEDY)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"inputs": IDS}, "inputs has no effect here: give them as input_ids"),
    ({"past_key_values": DynamicCache()}, "past_key_values has no effect here: the cache is given as cache"),
    ({"assistant_model": object()}, "assistant_model has no effect here"),
    ({"use_cache": False}, "use_cache=False has no effect here"),
    ({"generation_config": "greedy"}, "generation_config is a str; give a transformers.GenerationConfig"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "decoding by contrastive_search is not supported"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[next(iter(options)) for options, _ in REFUSED])
def test_options_without_effect_are_refused_before_anything_is_read(
    model: Any, options: dict[str, Any], message: str
) -> None:
    cache = new_cache(model)
    with pytest.raises(ValueError, match=message):
        generate(model, IDS, cache=cache, **{**GREEDY, **options})
    assert not cache.seen
