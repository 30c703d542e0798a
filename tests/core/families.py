"""Tiny random backbones of every supported family, built from configs. Imported by the tests beside it."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

SHAPE = {
    "vocab_size": 199,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.5, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


DELTA = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"num_hidden_layers": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA2 = {**MAMBA, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_OF_STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": (
        "qwen3_next",
        {"num_hidden_layers": 4, **DELTA, **EXPERTS, "shared_expert_intermediate_size": 16, "head_dim": 8},
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "bamba": ("bamba", {**MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon-h1": ("falcon_h1", {**MAMBA2, "mamba_d_ssm": 64, "head_dim": 8, "key_multiplier": 0.7}),
}
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-3.1-rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "phi3": ("phi3", {"sliding_window": 600}),
    "phi3-partial": ("phi3", {"rope_parameters": PARTIAL}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "olmo3": ("olmo3", SLIDING),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 8, **EXPERTS}),
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "gpt-oss": ("gpt_oss", {**SLIDING, "head_dim": 8, **LOCAL_EXPERTS}),
    "gemma2": ("gemma2", {**SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**SLIDING, "head_dim": 8, "query_pre_attn_scalar": 8}),
}
FAMILIES = sorted(_OTHERS)


def build(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random model of the family in float32, in evaluation mode."""
    kind, own = {**_OTHERS, **_OF_STATES}[family]
    config = CONFIG_MAPPING[kind](**copy.deepcopy({**SHAPE, **own}))
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def merger(family: str) -> str:
    """Return a merger with random kernels for a family, as a policy names it."""
    from locret.mergers.kernels import MergingKernels

    folder = tempfile.mkdtemp()
    MergingKernels.for_model(build(family), slots=3, kernel_size=5, seed=0).save_pretrained(folder)
    return f"loco:kernels={folder}"


def prompt(length: int, batch: int = 1, seed: int = 0, vocabulary: int = 199) -> torch.Tensor:
    """Return random (batch, length) token ids without special tokens."""
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of different lengths, aligned to the right, and their mask."""
    width = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - row.shape[1] :], mask[index, width - row.shape[1] :] = row[0], 1
    return ids, mask
