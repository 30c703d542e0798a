"""InfLLM, slowly: a list of tokens, three distances, and a loop over heads, queries and units."""

# T tokens, N query heads, K KV heads, D head dim, E hidden size

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oracle.retaining import rotate, split_projections


@dataclass
class Unit:
    """A token in one layer."""

    position: int
    key_KD: Tensor
    """Before rotation."""
    value_KD: Tensor
    attention_N: Tensor
    """Post-softmax attention that it got while it was in the window, per query head."""


@dataclass
class Block:
    """Tokens that have left the window together, and the vector that stands for them."""

    units: list[Unit]
    vector_ND: Tensor


@dataclass
class Memory:
    """What one layer holds: `recent` are the window and the remainder, not yet a block."""

    first: list[Unit] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    recent: list[Unit] = field(default_factory=list)


@dataclass(frozen=True)
class Numbers:
    """InfLLM's own numbers, in tokens or blocks."""

    block: int
    init: int
    local: int
    topk: int
    repr_topk: int


def infllm(
    model: Any, passes: list[Tensor], inv_freq: Tensor, magnitude: float, numbers: Numbers
) -> tuple[list[Tensor], list[Memory]]:
    """Read a text in execution blocks, token by token and layer by layer, with nothing fused.

    Args:
        model: A decoder-only transformers model with pre-norm layers (Llama, Mistral, Qwen2, Qwen3, Phi-3).
        passes: (T,) token ids of each execution block; a generated token is a block of its own.
        inv_freq: (D/2,) rotary frequencies.
        magnitude: Factor of cos and sin.
        numbers: Of the method.

    Returns:
        Per execution block (vocabulary,) logits of its last token; and what every layer holds at the end.
    """
    memories = [Memory() for _ in model.model.layers]
    logits, start = [], 0
    for ids_T in passes:
        hidden_TE = model.model.embed_tokens(ids_T)
        for layer, memory in zip(model.model.layers, memories, strict=True):
            normed_TE = layer.input_layernorm(hidden_TE)
            hidden_TE = hidden_TE + _attend(layer, normed_TE, memory, start, (inv_freq, magnitude), numbers)
            hidden_TE = hidden_TE + layer.mlp(layer.post_attention_layernorm(hidden_TE))
            move_old(memory, numbers)
        start += len(ids_T)
        logits.append(model.lm_head(model.model.norm(hidden_TE[-1])))
    return logits, memories


def move_old(memory: Memory, numbers: Numbers) -> None:
    """Move what has left the window: the text's first tokens to `first`, then whole blocks of the oldest."""
    recent = memory.recent
    while len(memory.first) < numbers.init and len(recent) > numbers.local:
        memory.first.append(recent.pop(0))
    while len(recent) - numbers.block >= numbers.local:
        units = [recent.pop(0) for _ in range(numbers.block)]
        memory.blocks.append(Block(units, representative(units, numbers.repr_topk)))


def representative(units: list[Unit], repr_topk: int) -> Tensor:
    """Return (N, D): per query head the mean un-rotated key of the tokens that got the most attention."""
    heads, kv_heads = len(units[0].attention_N), len(units[0].key_KD)
    vectors = []
    for n in range(heads):
        best = sorted(units, key=lambda unit: float(unit.attention_N[n]), reverse=True)[:repr_topk]
        vectors.append(torch.stack([unit.key_KD[n // (heads // kv_heads)] for unit in best]).mean(dim=0))
    return torch.stack(vectors)


def choose(query_TND: Tensor, blocks: list[Block], topk: int, heads: range) -> list[int]:
    """Return the blocks that fit the mean query best, summed over `heads`, ascending; all where there are no more."""
    if len(blocks) <= topk:
        return list(range(len(blocks)))
    mean_ND = query_TND.mean(dim=0)
    fits = [sum(float(mean_ND[n] @ block.vector_ND[n]) for n in heads) for block in blocks]
    return sorted(sorted(range(len(blocks)), key=lambda nth: fits[nth], reverse=True)[:topk])


def _attend(
    layer: Any, normed_TE: Tensor, memory: Memory, start: int, rope: tuple[Tensor, float], numbers: Numbers
) -> Tensor:
    """Return the attention output (T, E) of an execution block, and add its units to the memory."""
    attention = layer.self_attn
    query, key, value = split_projections(attention, normed_TE)
    tokens, heads, kv_heads, dim = len(query), query.shape[1], key.shape[1], attention.head_dim
    memory.recent.extend(Unit(start + i, key[i], value[i], torch.zeros(heads)) for i in range(tokens))
    group = heads // kv_heads
    far_TND = torch.stack([torch.stack([rotate(q, numbers.local - 1, *rope) for q in token]) for token in query])
    chosen = choose(far_TND, memory.blocks, numbers.topk, range(heads))
    out = torch.zeros(tokens, heads, dim)
    gained = {unit.position: torch.zeros(heads) for unit in memory.recent}
    for i in range(tokens):
        place = start + i
        near = [unit for unit in memory.recent if 0 <= place - unit.position < numbers.local]
        old = [unit for unit in memory.first + memory.recent if place - unit.position >= numbers.local]
        for n in range(heads):
            k = n // group
            blocks = [memory.blocks[nth] for nth in chosen]
            far = old + [unit for block in blocks for unit in block.units]
            near_query = rotate(query[i, n], place, *rope)
            logits = [near_query @ rotate(unit.key_KD[k], unit.position, *rope) for unit in near]
            logits += [far_TND[i, n] @ rotate(unit.key_KD[k], 0, *rope) for unit in far]  # keys stay at position 0
            weights = torch.softmax(torch.stack(logits) * attention.scaling, dim=0)
            out[i, n] = weights @ torch.stack([unit.value_KD[k] for unit in near + far])
            for unit, weight in zip(near, weights, strict=False):
                gained[unit.position][n] += weight
    for unit in memory.recent:
        unit.attention_N = unit.attention_N + gained[unit.position]
    return attention.o_proj(out.flatten(1))  # type: ignore[no-any-return]
