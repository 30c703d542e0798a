"""The Locret paper, slowly: retaining heads, Algorithm 1, labels and losses."""

# L layers, N query heads, K KV heads, T tokens, A answer queries, S slots, D head dim

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle.attention_scorers import attention
from oracle.budgets import select_over_heads


def select_kept(scores_S: list[float], budget: int, protected: set[int]) -> list[int]:
    """Return the kept slots of one head, ascending: protected ones first, then by score, newer first among equals."""
    slots = range(len(scores_S))
    ranked = sorted(slots, key=lambda s: (s in protected, float("inf") if s in protected else scores_S[s], s))
    return sorted(ranked[len(scores_S) - min(budget, len(scores_S)) :])


def rotate(vector_D: Tensor, position: float, inv_freq: Tensor, magnitude: float = 1.0) -> Tensor:
    """Rotate one vector's pairs (d, d + D/2) by position * inv_freq[d]; LongRoPE and YaRN scale by `magnitude`."""
    half = len(inv_freq)
    rotated = vector_D.clone()
    angle = position * inv_freq
    x, y = vector_D[:half], vector_D[half : 2 * half]
    rotated[:half] = magnitude * (x * torch.cos(angle) - y * torch.sin(angle))
    rotated[half : 2 * half] = magnitude * (y * torch.cos(angle) + x * torch.sin(angle))
    return rotated


def attend(
    query_NLD: Tensor, key_KSD: Tensor, value_KSD: Tensor, scaling: float, sinks_N: Tensor | None = None
) -> Tensor:
    """Return (N, L, D): new token i of L sees slots 0 .. S - L + i, and its head's learned sink, which has no value."""
    weights_NLS = attention(query_NLD, key_KSD, scaling, sinks_N=sinks_N)
    group = len(query_NLD) // len(key_KSD)
    return torch.stack([weights_LS @ value_KSD[n // group] for n, weights_LS in enumerate(weights_NLS)])


def labels(
    query_NTD: Tensor,
    key_KTD: Tensor,
    prompt: int,
    first_query: int,
    scaling: float,
    kind: str,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Return (K, prompt) causal importance labels of one layer (Locret, Eq. 2) from dense causal attention.

    Args:
        query_NTD: post-rotary queries of prompt and answer.
        key_KTD: post-rotary keys of prompt and answer.
        prompt: number of prompt tokens.
        first_query: first answer query: `prompt`, or `prompt - 1` to include the last prompt token.
        scaling: factor of the logits.
        kind: "logit", or "log_attention": the logit minus its row's log-sum-exp.
        sinks_N: logits of learned sinks, which belong to their rows.
    """
    heads, tokens, _ = query_NTD.shape
    kv_heads = key_KTD.shape[0]
    result = torch.full((kv_heads, prompt), -torch.inf)
    for n in range(heads):
        k = n // (heads // kv_heads)
        for i in range(first_query, tokens):
            row = key_KTD[k, : i + 1] @ query_NTD[n, i] * scaling
            if kind == "log_attention":
                whole = row if sinks_N is None else torch.cat([row, sinks_N[n : n + 1]])
                row = row - torch.logsumexp(whole, dim=0)
            # The last prompt token cannot see beyond itself, and is itself a prompt token that it sees.
            seen = min(prompt, i + 1)
            result[k, :seen] = torch.maximum(result[k, :seen], row[:seen])
    return result


def loss(scores_LKT: Tensor, labels_LKT: Tensor, alpha: float) -> tuple[float, float, float]:
    """Return total, regression and smoothness (Locret, Eq. 3, with the reductions of the original code)."""
    layers, kv_heads, tokens = scores_LKT.shape
    regression = smoothness = 0.0
    for layer in range(layers):
        steps = 0.0
        for head in range(kv_heads):
            for t in range(tokens):
                error = abs(float(scores_LKT[layer, head, t] - labels_LKT[layer, head, t]))
                regression += (0.5 * error * error if error < 1 else error - 0.5) / (layers * kv_heads * tokens)
            for t in range(tokens - 1):
                steps += float(scores_LKT[layer, head, t] - scores_LKT[layer, head, t + 1]) ** 2
        smoothness += steps / (kv_heads * (tokens - 1))
    return regression + alpha * smoothness, regression, smoothness


def ranking_loss(scores_LKT: Tensor, labels_LKT: Tensor) -> float:
    """Return ListNet's loss: the mean over heads of KL(softmax(labels) || softmax(scores))."""
    layers, kv_heads, tokens = scores_LKT.shape
    total = 0.0
    for layer in range(layers):
        for head in range(kv_heads):
            scores_T, labels_T = scores_LKT[layer, head].double(), labels_LKT[layer, head].double()
            for t in range(tokens):
                log_wanted = labels_T[t] - torch.logsumexp(labels_T, dim=0)
                log_given = scores_T[t] - torch.logsumexp(scores_T, dim=0)
                total += float(torch.exp(log_wanted) * (log_wanted - log_given))
    return total / (layers * kv_heads)


def read_prompt(
    model: Any,
    heads: Any,
    prompt_T: Tensor,
    inv_freq: Tensor,
    magnitude: float,
    numbers: tuple[int, int, int, int],
    original_positions: bool = False,
    steps: list[tuple[int, list[int], list[int]]] | None = None,
    head_split: tuple[float, bool] | None = None,
    diversity: float = 0.0,
) -> tuple[list[list[list[list[int]]]], Tensor]:
    """Read a prompt token by token and layer by layer, as the original implementation does, with nothing fused.

    Args:
        model: A decoder-only transformers model with pre-norm layers (Llama, Mistral, Qwen2, Qwen3, Phi-3).
        heads: `heads[layer](features)` scores tokens.
        prompt_T: (T,) token ids.
        inv_freq: (D/2,) rotary frequencies, computed by the caller from the config.
        magnitude: Factor of cos and sin.
        numbers: budget, chunk size, stabilizers, local length.
        original_positions: Rotate by place in the text instead of slot.
        steps: Per chunk its tokens, and per layer the budget and the protected units; those of `numbers` if None.
        head_split: Where the heads of a layer compete, the share of the budget that each keeps at least, and whether
            heads are compared by the softmax of their scores.
        diversity: How much the order of the keys counts beside that of the scores.

    Returns:
        Per chunk, layer and KV head the kept text positions; and (vocabulary,) logits of the last token.
    """
    budget, chunk_size, stabilizers, local_len = numbers
    total, length = len(prompt_T), max(len(prompt_T) - local_len, 0)
    layers = model.model.layers
    if steps is None:
        sizes = [min(chunk_size, length - start) for start in range(0, length, chunk_size)]
        guarded = [stabilizers] * (len(sizes) - 1) + [0]
        steps = [
            (size, [budget] * len(layers), [guard] * len(layers)) for size, guard in zip(sizes, guarded, strict=False)
        ]
    starts = [sum(size for size, _, _ in steps[:number]) for number in range(len(steps))]
    # One list per layer and KV head, of (position, un-rotated key, value, score).
    pools: list[list[list[tuple[int, Tensor, Tensor, float]]]] = [
        [[] for _ in range(split_projections(layer.self_attn, torch.zeros(1, model.config.hidden_size))[1].shape[1])]
        for layer in layers
    ]
    history = []
    for start, (size, budgets, guards) in zip([*starts, length], [*steps, (total - length, [], [])], strict=True):
        hidden_TE = model.model.embed_tokens(prompt_T[start : start + size])
        for index, layer in enumerate(layers):
            rope = (inv_freq, magnitude, original_positions)
            hidden_TE = hidden_TE + _attention(layer, hidden_TE, pools[index], start, rope, heads[index])
            hidden_TE = hidden_TE + layer.mlp(layer.post_attention_layernorm(hidden_TE))
            if start < length:
                pools[index] = _evict(pools[index], budgets[index], guards[index], head_split, diversity)
        if start < length:
            history.append([[[unit[0] for unit in pool] for pool in layer_pools] for layer_pools in pools])
    return history, model.lm_head(model.model.norm(hidden_TE[-1]))


def _evict(
    pools: list[list[Any]],
    budget: int,
    guard: int,
    head_split: tuple[float, bool] | list[int] | None,
    diversity: float = 0.0,
) -> list[list[Any]]:
    """Return what stays of one layer's units, head by head, so many of each, or over all heads together."""
    scores = [diverse(pool, diversity) if diversity else [unit[3] for unit in pool] for pool in pools]
    if head_split is None:
        kept = [
            select_kept(scores[head], budget, set(range(max(len(pool) - guard, 0), len(pool))))
            for head, pool in enumerate(pools)
        ]
    elif isinstance(head_split, list):
        kept = [select_kept(own, units, set()) for own, units in zip(scores, head_split, strict=True)]
    else:
        positions = [[unit[0] for unit in pool] for pool in pools]
        floor, relative = head_split
        kept = select_over_heads(scores, positions, budget, guard, int(floor * budget), relative)
    return [[pool[slot] for slot in slots] for pool, slots in zip(pools, kept, strict=True)]


def diverse(pool: list[Any], diversity: float) -> list[float]:
    """Return what units are worth by their scores and by how unlike the average their keys are, both standardised."""
    if not pool:
        return []
    directions = torch.stack([key / key.norm() for _, key, _, _ in pool])
    average = directions.mean(0)
    scores, unlike = torch.tensor([unit[3] for unit in pool]), -(directions @ average) / average.norm()
    first, second = ((one - one.mean()) / one.std(correction=0).clamp_min(1e-6) for one in (scores, unlike))
    return ((1 - diversity) * first + diversity * second).tolist()


def split_projections(attention: Any, hidden_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q (T, N, D), k and v (T, K, D) before rotation, after q/k norms where the layer has them."""
    dim = attention.head_dim
    if hasattr(attention, "qkv_proj"):
        kv_heads, heads = attention.num_key_value_heads, attention.config.num_attention_heads
        flat = attention.qkv_proj(hidden_TE).split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    else:
        flat = (attention.q_proj(hidden_TE), attention.k_proj(hidden_TE), attention.v_proj(hidden_TE))
    if hasattr(attention, "q_norm") and attention.q_norm.weight.numel() > dim:  # over all heads together (OLMo)
        flat = (attention.q_norm(flat[0]), attention.k_norm(flat[1]), flat[2])
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in flat)
    heads = attention.config.num_attention_heads
    if query.shape[1] == 2 * heads:  # each head's query, and its gate
        query = query.flatten(1).unflatten(-1, (heads, 2, dim))[:, :, 0]
    for names in (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")):
        if hasattr(attention, names[0]) and getattr(attention, names[0]).weight.numel() == dim:
            query, key = getattr(attention, names[0])(query), getattr(attention, names[1])(key)
    return query, key * getattr(attention, "key_multiplier", 1), value


def _attention(
    layer: Any,
    hidden_TE: Tensor,
    pools: list[list[tuple[int, Tensor, Tensor, float]]],
    start: int,
    rope: tuple[Tensor, float, bool],
    retaining_head: Any,
) -> Tensor:
    """Add a chunk's units to the pools and return the attention output, (T, E)."""
    attention, (inv_freq, magnitude, original_positions) = layer.self_attn, rope
    query, key, value = split_projections(attention, layer.input_layernorm(hidden_TE))
    scores_TK = retaining_head(torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], dim=-1))
    new, group = len(hidden_TE), query.shape[1] // key.shape[1]
    out = torch.zeros(new, query.shape[1], attention.head_dim)
    for k, pool in enumerate(pools):
        cached = len(pool)
        pool.extend((start + i, key[i, k], value[i, k], float(scores_TK[i, k])) for i in range(new))
        places = [unit[0] if original_positions else slot for slot, unit in enumerate(pool)]
        keys = torch.stack([rotate(u[1], p, inv_freq, magnitude) for u, p in zip(pool, places, strict=True)])
        values = torch.stack([unit[2] for unit in pool])
        for n in range(k * group, (k + 1) * group):
            rotated = [rotate(query[i, n], places[cached + i], inv_freq, magnitude) for i in range(new)]
            out[:, n] = attend(torch.stack(rotated)[None], keys[None], values[None], attention.scaling)[0]
    return attention.o_proj(out.flatten(1))  # type: ignore[no-any-return]
