"""Backbones by shape, with random weights, so that nothing has to be downloaded."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

CPU_512 = LlamaConfig(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
CPU_DEEP = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=131072,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
"""Narrow and deep: as in models that people use, the cache of all layers outweighs what one layer works with."""
SHAPES = {"cpu-512": CPU_512, "cpu-deep": CPU_DEEP}
CPU_512_HIDDEN_DIM = 64
"""d_R for which heads are about as small beside this backbone as the paper's are beside an 8B model."""


def random_model(config: LlamaConfig, seed: int = 0) -> PreTrainedModel:
    """Return a float32 model in evaluation mode whose weights come from the seed."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
