"""A step's memory, counted byte by byte: what reading takes, and one layer's head whatever their number."""

from __future__ import annotations

import pytest
import torch
from allocations import peak_bytes
from transformers import LlamaConfig

from locret import RetainingHeads
from locret.backbone.chunk import Attended, Projections
from locret.infer.speed.plan import random_model
from locret.labels.labels import layer_labels
from locret.train.step import train_step
from locret.train.training_options import Loss

TOKENS = 512


def peaks(layers: int) -> tuple[int, int]:
    """Return the bytes that are allocated at once while a row is only read, and while it is trained on again."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_hidden_layers=layers,
    )
    model = random_model(config, dtype=torch.float32)
    heads = RetainingHeads.for_model(model, 64, seed=0)
    ids = torch.randint(3, 256, (1, TOKENS + 200), generator=torch.Generator().manual_seed(0))

    def read() -> None:
        with torch.no_grad():
            model.get_decoder()(input_ids=ids, use_cache=False)

    def train() -> None:
        train_step(model, heads, ids[:, :TOKENS], ids[:, TOKENS:], Loss(label_kind="log_attention"))

    train()  # the gradients are there
    return peak_bytes(read), peak_bytes(train)


def test_a_row_takes_what_reading_it_takes_and_layers_add_nothing_but_gradients() -> None:
    (reading, training), (_, many) = peaks(2), peaks(6)
    assert training <= 1.01 * reading
    assert many - training < 4096


@pytest.mark.parametrize("kind", ["logit", "log_attention"])
def test_no_matrix_of_answer_by_prompt_exists(kind: str) -> None:
    prompt, answer, heads, dim = 3000, 1500, 4, 8
    query, key = torch.randn(1, heads, prompt + answer, dim), torch.randn(1, 2, prompt + answer, dim)
    nothing = Projections(None)  # type: ignore[arg-type]
    chunk = Attended(layer_idx=0, query=query, key=key, value=key, scaling=1.0, softcap=None, projections=nothing)
    with torch.no_grad():
        peak = peak_bytes(lambda: layer_labels(chunk, prompt, kind, False))
    logits = 3 * 4 * heads * dim * (prompt + answer)  # a block has no more of them than the layer has queries
    assert peak <= logits + key.nbytes < 4 * prompt * answer / 2
