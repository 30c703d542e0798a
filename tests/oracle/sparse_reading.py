"""A text read and answered pass by pass, where a rule says which earlier tokens each query head sees; nothing fused."""

# N query heads, K KV heads, T tokens so far, D head dim

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from oracle.retaining import attend, rotate, split_projections


class Visible(Protocol):
    """Says which earlier tokens each query head sees in a pass; None: all of them."""

    def __call__(self, layer: int, query_NTD: Tensor, key_KTD: Tensor, start: int) -> list[list[int]] | None:
        """Choose by the layer, its queries and keys so far, and where the pass starts."""


def read_by_choice(
    model: Any, ids_T: Tensor, passes: list[int], inv_freq: Tensor, magnitude: float, visible: Visible
) -> Tensor:
    """Feed a text in passes of so many tokens, with original positions and every unit held.

    Args:
        model: A decoder-only transformers model with pre-norm layers (Llama, Mistral, Qwen2, Qwen3, Phi-3).
        ids_T: (T,) token ids of prompt and answer.
        passes: Tokens of each forward pass: the prompt at once or in chunks, then one by one.
        inv_freq: (D/2,) rotary frequencies.
        magnitude: Factor of cos and sin.
        visible: Which earlier tokens a pass sees; its own tokens see each other causally whatever it says.

    Returns:
        (passes, vocabulary) logits of the last token of each pass.
    """
    layers = model.model.layers
    held: list[tuple[list[Tensor], list[Tensor], list[Tensor]]] = [([], [], []) for _ in layers]
    start, logits = 0, []
    for size in passes:
        hidden_TE = model.model.embed_tokens(ids_T[start : start + size])
        for index, layer in enumerate(layers):
            attention = layer.self_attn
            parts = split_projections(attention, layer.input_layernorm(hidden_TE))
            for i in range(size):
                query, key, value = (part[i] for part in parts)
                place = (start + i, inv_freq, magnitude)
                held[index][0].append(torch.stack([rotate(vector_D, *place) for vector_D in query]))
                held[index][1].append(torch.stack([rotate(vector_D, *place) for vector_D in key]))
                held[index][2].append(value)
            query_NTD, key_KTD, value_KTD = (torch.stack(part, dim=1) for part in held[index])
            seen = visible(index, query_NTD, key_KTD, start)
            out_TND = torch.zeros(size, *query_NTD[:, 0].shape)
            group = len(query_NTD) // len(key_KTD)
            for n in range(len(query_NTD)):
                earlier = list(range(start)) if seen is None else sorted(seen[n])
                for i in range(size):
                    slots = [*earlier, *range(start, start + i + 1)]
                    key_1SD, value_1SD = (part[n // group, slots][None] for part in (key_KTD, value_KTD))
                    query_11D = query_NTD[n, start + i][None, None]
                    out_TND[i, n] = attend(query_11D, key_1SD, value_1SD, attention.scaling)[0, 0]
            hidden_TE = hidden_TE + attention.o_proj(out_TND.flatten(1))
            hidden_TE = hidden_TE + layer.mlp(layer.post_attention_layernorm(hidden_TE))
        logits.append(model.lm_head(model.model.norm(hidden_TE[-1])))
        start += size
    return torch.stack(logits)
