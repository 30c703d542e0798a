"""Ids, masks, models, scorers and options as people give them: what means something is taken, the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build, prompt
from transformers import DynamicCache

from locret import RetentionCache, RetentionPolicy, generate, prefill
from locret.scorers import Chunk, KeyNormScorer

POLICY = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6)
GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 5}
IDS = prompt(45)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


def new_cache(model: Any, scorer: Any = "snapkv", **changes: Any) -> RetentionCache:
    return RetentionCache(model, scorer, RetentionPolicy(**{**POLICY.to_dict(), **changes}))


GIVEN: dict[str, Any] = {
    "list": IDS[0].tolist(),
    "tuple": tuple(IDS[0].tolist()),
    "array": IDS.numpy(),
    "uint8": IDS.to(torch.uint8),
    "dict": {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)},
    "iterator": iter(IDS[0].tolist()),
    "range": range(3, 48),
}


@pytest.mark.parametrize("form", GIVEN)
def test_ids_may_come_as_people_have_them(model: Any, form: str) -> None:
    ids = torch.arange(3, 48)[None] if form == "range" else IDS
    assert torch.equal(prefill(model, GIVEN[form], new_cache(model)), prefill(model, ids, new_cache(model)))


@pytest.mark.parametrize("form", ["list", "bool", "float", "array", "dict"])
def test_masks_may_come_as_people_have_them(model: Any, form: str) -> None:
    ids, mask = prompt(45, batch=2), torch.ones(2, 45, dtype=torch.long)
    mask[1, :9] = 0
    given: dict[str, Any] = {"list": mask.tolist(), "bool": mask.bool(), "float": mask.float(), "array": mask.numpy()}
    expected = generate(model, ids, attention_mask=mask, cache=new_cache(model), **GREEDY)
    if form == "dict":
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        ours = generate(model, inputs, cache=new_cache(model), **GREEDY)
    else:
        ours = generate(model, ids, attention_mask=given[form], cache=new_cache(model), **GREEDY)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (IDS[None], "input_ids has 3 dimensions"),
        (IDS.float(), "input_ids holds float32 numbers"),
        ([], "input_ids is empty"),
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


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.full((1, 45), 2), "attention_mask holds 2; give 1 for a token and 0 for padding"),
        (torch.full((1, 45), torch.nan), "attention_mask holds nan"),
        ("ones", r"attention_mask is not a table of numbers \(str\)"),
        (torch.ones(1, 44), r"attention_mask has shape \(1, 44\) but input_ids \(1, 45\)"),
        (torch.arange(45)[None] < 44, "padding on the right; pad on the left"),
        (torch.zeros(1, 45), "row 0 of input_ids is padding only"),
    ],
)
def test_masks_that_say_nothing_are_refused(model: Any, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill(model, IDS, new_cache(model), mask)
    with pytest.raises(ValueError, match=message):
        generate(model, IDS, cache=new_cache(model), attention_mask=mask, **GREEDY)


# -- the same text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", ["snapkv", "sirllm"])
@pytest.mark.parametrize("beams", [1, 2])
def test_a_conversation_goes_on_only_with_what_was_answered(model: Any, scorer: str, beams: int) -> None:
    cache = new_cache(model, scorer)
    answer = generate(model, IDS, cache=cache, num_beams=beams, **GREEDY)
    wrong = answer.clone()
    wrong[0, 3 if beams > 1 else 46] += 1
    with pytest.raises(ValueError, match="tokens of input_ids are not those that the cache has read"):
        generate(model, torch.cat([wrong, IDS], dim=1), cache=cache, **GREEDY)
    generate(model, torch.cat([answer, IDS], dim=1), cache=cache, **GREEDY)
    assert cache.seen >= 45 * 2


def test_a_saved_cache_still_knows_its_text(model: Any, tmp_path: Any) -> None:
    from locret import load_cache, save_cache

    cache = new_cache(model)
    prefill(model, IDS, cache)
    cache.take_back()
    save_cache(cache, tmp_path / "cache.safetensors")
    loaded = load_cache(tmp_path / "cache.safetensors", model, "snapkv")
    with pytest.raises(ValueError, match="the first 44 tokens of input_ids are not those"):
        generate(model, prompt(45, seed=1), cache=loaded, **GREEDY)
    assert torch.equal(generate(model, IDS, cache=loaded, **GREEDY), generate(model, IDS, cache=cache, **GREEDY))


def test_a_cache_of_another_kind_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"cache is a DynamicCache; give a locret\.RetentionCache"):
        prefill(model, IDS, DynamicCache())


# -- scores -----------------------------------------------------------------------------------------------------------


class Returns(KeyNormScorer):
    """Returns what it is told to, from a certain position on."""

    what: Any = None
    start = 0

    def score(self, chunk: Chunk) -> Any:
        scores = super().score(chunk)
        return type(self).what(scores) if int(chunk.positions.max()) >= self.start else scores


WRONG = {
    "none": (lambda _: None, "returned scores of type NoneType, not a tensor"),
    "shape": (lambda s: s[:, :1], r"returned scores of shape \(1, 1, 10\)"),
    "nan": (lambda s: s * torch.nan, "returned scores that are NaN or infinite"),
}


@pytest.mark.parametrize("head_budgets", ["uniform", "adaptive"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_scorer_that_returns_no_numbers_is_noticed_at_once(model: Any, wrong: str, head_budgets: str) -> None:
    what, message = WRONG[wrong]
    scorer = type("Wrong", (Returns,), {"what": staticmethod(what)})()
    cache = new_cache(model, scorer, head_budgets=head_budgets)
    with pytest.raises(ValueError, match=message):
        prefill(model, IDS, cache)
    with pytest.raises(ValueError, match="interrupted"):
        generate(model, cache=cache, **GREEDY)


# -- options of generate ----------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "inputs": (IDS, "inputs has no effect here: give them as input_ids"),
    "past_key_values": (DynamicCache(), "past_key_values has no effect here: the cache is given as cache"),
    "assistant_model": (object(), "assistant_model has no effect here"),
    "use_cache": (False, "use_cache=False has no effect here"),
    "generation_config": ({}, ""),
    "penalty_alpha": (0.6, "decoding by contrastive_search is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_without_effect_are_refused_before_anything_is_read(model: Any, name: str) -> None:
    value, message = REFUSED[name]
    cache = new_cache(model)
    options = {**GREEDY, name: value, **({"top_k": 4} if name == "penalty_alpha" else {})}
    if name == "generation_config":
        options[name], message = "greedy", "generation_config is a str; give a transformers.GenerationConfig"
    with pytest.raises(ValueError, match=message):
        generate(model, IDS, cache=cache, **options)
    assert not cache.seen
    assert len(model.model.layers) == 3
    assert model.config.num_hidden_layers == 3
