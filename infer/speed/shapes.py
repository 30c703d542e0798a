"""Backbones by shape, with random weights, so that nothing has to be downloaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PretrainedConfig, PreTrainedModel, Qwen3Config

_LONG = 131072


def _llama(**numbers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=1024,
        head_dim=64,
        max_position_embeddings=_LONG,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        **numbers,
    )


CPU_512 = _llama(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=2
)
CPU_DEEP = _llama(
    hidden_size=256, intermediate_size=512, num_hidden_layers=24, num_attention_heads=4, num_key_value_heads=2
)
"""Narrow and deep: as in models that people use, the cache of all layers outweighs what one layer works with."""
TINY = LlamaConfig(
    vocab_size=900,
    hidden_size=192,
    intermediate_size=384,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=65536,
    tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
"""The embedded backbone's."""
LLAMA_3_1_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=_LONG,
    rms_norm_eps=1e-5,
    dtype="bfloat16",
    rope_parameters={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
PHI_3_MINI_128K = Phi3Config(
    vocab_size=32064,
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    max_position_embeddings=_LONG,
    sliding_window=262144,
    dtype="bfloat16",
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
"""With plain rotary factors: LongRoPE's cost the same."""
QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=_LONG,
    dtype="bfloat16",
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
)
SHAPES: dict[str, PretrainedConfig] = {
    "cpu-512": CPU_512,
    "cpu-deep": CPU_DEEP,
    "tiny": TINY,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "phi-3-mini-128k": PHI_3_MINI_128K,
    "qwen3-8b": QWEN3_8B,
}
CPU_512_HIDDEN_DIM = 64
"""d_R for which heads are about as small for this backbone as the paper's are for an 8B model."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How a shape is benchmarked unless told otherwise."""

    budget: int = 1024
    chunk_size: int = 512
    stabilizers: int = 256
    local_len: int = 64
    hidden_dim: int = CPU_512_HIDDEN_DIM
    lengths: tuple[int, ...] = (8192, 16384)
    gpu: bool = False
    """Whether the shape is too large for a CPU to say anything about."""


PRESETS: dict[str, Preset] = {
    "cpu-512": Preset(),
    "cpu-deep": Preset(),
    "tiny": Preset(budget=256, chunk_size=256, stabilizers=64, local_len=32, hidden_dim=256),
    # Budgets, chunks, stabilizers, local tokens and d_R of Locret, section 4.1.
    "llama-3.1-8b": Preset(
        budget=16384, chunk_size=1024, stabilizers=2500, local_len=100, hidden_dim=1024, lengths=(_LONG,), gpu=True
    ),
    "phi-3-mini-128k": Preset(
        budget=6000, chunk_size=3072, stabilizers=2500, local_len=100, hidden_dim=1024, lengths=(_LONG,), gpu=True
    ),
    # Not in the paper: as for the other model of this size.
    "qwen3-8b": Preset(
        budget=16384, chunk_size=1024, stabilizers=2500, local_len=100, hidden_dim=1024, lengths=(_LONG,), gpu=True
    ),
}


def random_model(
    config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Return a model in evaluation mode whose weights come from the seed; they are made on the device."""
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
