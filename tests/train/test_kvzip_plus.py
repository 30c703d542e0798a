"""Labels of KVzip+: attention, weighed by values behind the output projection and by the hidden states that ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import gates
from torch import Tensor
from training_cases import backbone, token_ids, train
from transformers import AutoModelForCausalLM, DeepseekV3Config

from locret import labels
from locret.backbone.chunk import Attended
from locret.labels.labels import layer_labels, observe
from locret.labels.many_answers import labels_of_answers


@pytest.mark.parametrize("family", ["llama", "llama-mha", "qwen3"])
@pytest.mark.parametrize("block_elements", [None, 64])
def test_labels_are_those_of_the_obvious_version(family: str, block_elements: int | None) -> None:
    model = backbone(family)
    compared: list[int] = []

    def on_layer(chunk: Attended) -> None:
        module: Any = chunk.projections.module
        given = (chunk.query[0], chunk.key[0], chunk.value[0], chunk.projections.hidden[0], module.o_proj.weight)
        slow = gates.kvzip_plus(*given, prompt=11, scaling=chunk.scaling)
        found = layer_labels(chunk, 11, "kvzip_plus", False, block_elements=block_elements)
        torch.testing.assert_close(found, slow, atol=2e-5, rtol=1e-5)
        compared.append(chunk.layer_idx)

    observe(model, token_ids(17), on_layer)
    assert compared


def test_the_last_prompt_token_and_earlier_answers_count_too() -> None:
    model, prompt, answer = backbone("llama"), token_ids(20), token_ids(6, seed=1)

    def found(**more: Any) -> Tensor:
        return labels.answer_labels(model, prompt, answer, "kvzip_plus", **more)

    plain = found()
    assert (found(include_last_prompt_token=True) >= plain).all()
    raised = found(earlier_answers=[(8, 12)])
    assert (raised[:, :, :8] > plain[:, :, :8]).any()
    assert torch.equal(raised[:, :, 8:], plain[:, :, 8:])


def test_many_questions_of_one_read_label_as_each_by_itself() -> None:
    model, document = backbone("qwen3"), token_ids(20)
    asked = [(token_ids(4, seed=seed), token_ids(3 + seed, seed=9 + seed)) for seed in (1, 2, 3)]
    found = labels_of_answers(model, document, asked, "kvzip_plus")
    each = [labels.answer_labels(model, torch.cat([document, q], 1), a, "kvzip_plus")[..., :20] for q, a in asked]
    torch.testing.assert_close(found, torch.stack(each).amax(0), atol=2e-5, rtol=1e-5)


def test_a_longer_value_is_worth_more_and_a_longer_hidden_state_takes_away() -> None:
    model, row = backbone("llama"), (token_ids(20), token_ids(6, seed=1))
    before = labels.answer_labels(model, *row, "kvzip_plus")[-1]
    last: Any = model.model.layers[-1].self_attn
    with torch.no_grad():
        last.v_proj.weight *= 3
    after = labels.answer_labels(model, *row, "kvzip_plus")[-1]
    torch.testing.assert_close(after - before, torch.full_like(after, 3.0).log())


def test_latents_are_refused(paths: tuple[Path, Path], tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    ranks = {"q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    config = DeepseekV3Config(**sizes, **ranks, **heads)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="--label-kind kvzip_plus .* holds latents; use log_attention"):
        labels.answer_labels(model, token_ids(9), token_ids(3, seed=1), "kvzip_plus")
    config.save_pretrained(tmp_path / "model")  # no weights: the config tells
    with pytest.raises(ValueError, match="--label-kind kvzip_plus .* holds latents; use log_attention"):
        train((tmp_path / "model", paths[1]), tmp_path / "run", "--label-kind=kvzip_plus")
    assert not (tmp_path / "run").exists()


def test_the_command_trains_on_them(paths: tuple[Path, Path], tmp_path: Path) -> None:
    flags = ["--steps=1", "--warmup-steps=0", "--label-kind=kvzip_plus", "--label-source=reconstruction"]
    assert train(paths, tmp_path / "run", *flags) == 0
    assert "A token's label is the log of the attention, times the length" in (tmp_path / "run/README.md").read_text()
