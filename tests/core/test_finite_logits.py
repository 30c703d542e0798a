"""Logits that are not finite are refused wherever a token is chosen or scored by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from locret import LongContextModel
from locret.conversation.evidence import likelihood
from locret.engines.prefix import Prefix
from locret.engines.transformers import PagedContexts

TEXT, QUESTION = "The grass is green. " * 60, "What is green?"


@pytest.fixture(scope="module")
def lm() -> Iterator[LongContextModel]:
    """Return a model whose last layer makes NaN after all keys and values, so that no scorer sees it."""
    lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", budget=64, device="cpu")
    weight = lm.model.model.layers[-1].mlp.down_proj.weight
    before = weight[0, 0].item()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    yield lm
    with torch.no_grad():
        weight[0, 0] = before


def paged(lm: LongContextModel) -> Any:
    context = lm.read(TEXT, progress=False)
    asked = (Prefix.of(context), context.question_ids(QUESTION)[0].tolist())
    with PagedContexts(lm.model, kv_bytes=16 << 20) as engine:
        return list(engine.generate_batch([asked], max_new_tokens=4))


@pytest.mark.parametrize(
    "door",
    [
        lambda lm: lm.read(TEXT, progress=False).ask(QUESTION, max_new_tokens=4),
        lambda lm: list(lm.read(TEXT, progress=False).stream(QUESTION, max_new_tokens=4)),
        lambda lm: lm.read(TEXT, progress=False).ask(QUESTION, max_new_tokens=4, temperature=0.7),
        lambda lm: lm.read(TEXT, progress=False).ask(QUESTION, max_new_tokens=4, num_beams=2),
        lambda lm: likelihood(lm.read(TEXT, progress=False), QUESTION, "The grass."),
        lambda lm: lm.model.generate(
            **lm.tokenizer(TEXT, return_tensors="pt"), past_key_values=lm.new_cache(), max_new_tokens=4, pad_token_id=0
        ),
        paged,
    ],
)
def test_every_door_refuses(lm: LongContextModel, door: Callable[[LongContextModel], Any]) -> None:
    with pytest.raises(ValueError, match=r"^the backbone's logits are not finite in float32, .* check its weights$"):
        door(lm)


def test_the_way_out_of_half_precision_is_named(lm: LongContextModel) -> None:
    from locret.generation import check_finite_logits

    check_finite_logits(lm.model, torch.tensor([[3e38, -torch.inf]] * 2))  # a masked vocabulary, and a sum above
    with pytest.raises(ValueError, match=r"not finite in float16, .* load it with dtype=float32 \(--dtype float32\)$"):
        check_finite_logits(torch.nn.Linear(2, 2, dtype=torch.float16), torch.tensor([[0.0, torch.inf]]))
