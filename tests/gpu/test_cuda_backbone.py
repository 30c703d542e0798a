"""Rows packed with texts, read by FlexAttention on a GPU, have the loss of the texts read apart on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checkpoints.build import attention
from checkpoints.build.batches import Stage, batches_of
from checkpoints.build.model import build_model
from checkpoints.build.options import BackboneTraining
from checkpoints.build.packed import Packed, pack
from checkpoints.build.training import masked_loss
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.data.text.filler import generator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is here"),
]


def test_a_row_has_the_loss_of_its_texts() -> None:
    tokenizer = build_tokenizer()
    stage = Stage(
        steps=1, tokens=900, batch_tokens=1, shortest=256, tasks=["multikey", "world/qa1"], forks=8, span=4096,
        local_share=0.5, skim_share=0.5, dense_share=0.2, drill_share=0.2,
    )  # fmt: skip
    options = BackboneTraining(stages=[replace(stage, batch_tokens=4096)], num_layers=4, start="distances")
    model = build_model(options, tokenizer)
    rng = generator(0, "train", "packed")
    texts = [batch for text in range(10) for batch in batches_of(rng, tokenizer, 0, stage, f"0/{text}")]
    total = sum(int(batch.mask_BT[:, 1:].sum()) for batch in texts)
    loss, right = 0.0, 0.0
    with torch.no_grad():
        for batch in texts:
            skim = attention.skimmed(256 if batch.skim else 0)
            with attention.local_layers(2 if batch.local else 0, 32), skim:
                one, tokens_R, right_R = masked_loss(model, batch)
            loss += one.item() * tokens_R.sum().item() / total
            right += right_R.sum().item()
    packed = Packed(model.to("cuda"), 8192, local_layers=2)
    found, tokens_R, right_R = packed.loss(pack(texts, 8192, window=32, skim_window=256))
    found.backward()
    assert found.item() == pytest.approx(loss, rel=1e-3)
    assert (tokens_R.sum().item(), right_R.sum().item()) == (total, pytest.approx(right, abs=0.02 * total))
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
