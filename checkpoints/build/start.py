"""Initial weights of the embedded backbone: its first layer starts out looking at the tokens just before each token.

Finding a fact needs to know what came right before a token. A small model discovers attention by distance late, because
without biases it first has to invent a direction that all tokens share. Here all embeddings share one from the start,
and head h of the first layer turns it into a peak at distance h + 1. Everything is trained from there.
"""
# V vocabulary, E width, D head dim

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

SHARED = 0.9
"""Size of the shared direction; the rest of an embedding has norm 1."""
PLACE, MATCH, SAID, QUIET = 0.12, 8.0, 4.0, 0.02
"""Of a layer that starts out copying: sizes of a token's trace in the first layer, of queries and keys, of what is
said, and of what the MLPs of the two layers add."""
WAVES, ON_CURVE = 4, 0.4
"""Half-waves of the curve of numbers, and the share of an embedding's size that lies on it."""
SLOW = 12
"""Slowest rotary pairs, which compare content at any distance."""
SHARPNESS = (20.0, 10.0, 6.0, 6.0, 6.0)
"""Attention logits that the fastest rotary frequencies add at the preferred distance; their sum is the peak."""


@torch.no_grad()
def initialize(model: LlamaForCausalLM) -> None:
    """Set the weights in place, from torch's global random state."""
    config = model.config
    width, heads, kv_heads, dim = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    embedding_VE = model.get_input_embeddings().weight
    embedding_VE[:, 0] = SHARED
    # What the shared dimension holds after the first normalisation.
    shared = SHARED / ((1 + SHARED**2) / width) ** 0.5
    attention = model.model.layers[0].self_attn
    frequencies_F = model.model.rotary_emb.inv_freq[: len(SHARPNESS)].float()
    strength_F = torch.tensor(SHARPNESS).mul(dim**0.5).sqrt() / shared
    used = len(SHARPNESS)
    for kv_head in range(kv_heads):
        rows = attention.k_proj.weight[kv_head * dim : (kv_head + 1) * dim]
        _write(rows, strength_F, torch.zeros(used), dim)
    for head in range(heads):
        rows = attention.q_proj.weight[head * dim : (head + 1) * dim]
        angle_F = -(head + 1) * frequencies_F
        _write(rows, strength_F * angle_F.cos(), strength_F * angle_F.sin(), dim)


@torch.no_grad()
def order_numbers(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Give the pieces of numbers embeddings that lie on a curve, near values near each other.

    Which of two numbers is larger, and which comes next, is else learnt pair by pair: thousands of updates late.
    """
    embedding_VE = model.get_input_embeddings().weight
    width = embedding_VE.shape[1]
    # The first dimension is shared by all tokens.
    axes_DE = torch.nn.functional.pad(_orthonormal(2 * WAVES, width - 1), (1, 0))
    waves_D = torch.arange(1, WAVES + 1)
    for value in range(100):
        angle_D = waves_D * torch.pi * value / 100
        place_D = torch.cat([angle_D.cos() / waves_D, angle_D.sin() / waves_D])
        place_E = torch.nn.functional.normalize(place_D, dim=0) @ axes_DE
        texts = {f"{value:02d}", str(value)}
        for token in tokenizer.convert_tokens_to_ids([form for text in texts for form in (text, f"##{text}")]):
            own_E = embedding_VE[token] * (1 - ON_CURVE) ** 0.5
            embedding_VE[token, 1:] = (own_E + ON_CURVE**0.5 * place_E)[1:]


@torch.no_grad()
def connect(model: LlamaForCausalLM, layer: int) -> None:
    """Let a layer copy what followed the same token before, from what `initialize` made of the first layer.

    Head h of the first layer writes the token at distance h + 1 into directions of its own. KV head j of `layer` looks
    for places where the token at distance j + 1 is the one at distance j from here, and says which token is there.
    Without this, a small model finds the two halves of that step together only after thousands of updates.
    """
    config = model.config
    dim, kv_heads, groups = (
        config.head_dim,
        config.num_key_value_heads,
        config.num_attention_heads // config.num_key_value_heads,
    )
    first, copying = model.model.layers[0].self_attn, model.model.layers[layer].self_attn
    width = config.hidden_size
    for each in (0, layer):
        model.model.layers[each].mlp.down_proj.weight.mul_(QUIET)
    token_DE = _orthonormal(dim, width)
    places_EE = _orthonormal(width, width)
    for kv_head in range(kv_heads):
        first.v_proj.weight[kv_head * dim : (kv_head + 1) * dim] = token_DE
    first.o_proj.weight.copy_(PLACE * places_EE[:, : first.o_proj.weight.shape[1]])
    # Slow rotary pairs compare content at any distance; pairs are dimensions i and i + D / 2.
    slow = [i for i in range(dim) if i % (dim // 2) >= dim // 2 - SLOW]
    for kv_head in range(kv_heads):
        there_DE = places_EE[:, kv_head * dim : (kv_head + 1) * dim].T
        here_DE = places_EE[:, (kv_head - 1) * dim : kv_head * dim].T if kv_head else token_DE
        key, query = copying.k_proj.weight[kv_head * dim :][:dim], copying.q_proj.weight[kv_head * groups * dim :][:dim]
        for weight, rows in ((key, there_DE), (query, here_DE)):
            weight.zero_()
            weight[slow] = MATCH * rows[: len(slow)]
        said_DE = _orthonormal(dim, width)
        copying.v_proj.weight[kv_head * dim :][:dim] = said_DE
        for group in range(groups):
            start = (kv_head * groups + group) * dim
            copying.o_proj.weight[:, start : start + dim] = (0.0 if group else SAID) * said_DE.T


def _orthonormal(rows: int, columns: int) -> Tensor:
    matrix, _ = torch.linalg.qr(torch.randn(columns, rows))
    return matrix.T


def _write(rows_DE: Tensor, first_F: Tensor, second_F: Tensor, dim: int) -> None:
    """Make a head's projection depend on the shared dimension alone; rotary pairs are dimensions i and i + D / 2."""
    rows_DE.mul_(0.1)
    rows_DE[:, 0] = 0
    rows_DE[: len(first_F), 0] = first_F
    rows_DE[dim // 2 : dim // 2 + len(second_F), 0] = second_F
