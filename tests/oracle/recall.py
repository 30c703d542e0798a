"""Two tiers, slowly: what eviction drops goes to a second tier, and later queries attend to their own best few of it.

No buffers, no ranks, no masks: units are lists, and each token goes through the layers alone.
"""

# K KV heads, N query heads, T tokens, A answer tokens, D head dim

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracle.retaining import _attention, _evict, rotate, select_kept, split_projections

Unit = tuple[int, Tensor, Tensor, float]
"""Position, un-rotated key, value, score."""


def best_units(logits_GU: Tensor, recall: int) -> list[int]:
    """Return the units that one KV head recalls for one token: those with the largest logit of any query of the group.

    Args:
        logits_GU: Of each query head of the group, for every unit of the second tier.
        recall: How many.
    """
    best = logits_GU.amax(0)
    return sorted(sorted(range(len(best)), key=lambda unit: -float(best[unit]))[:recall])


def into_host(host: list[Unit], gone: list[Unit], host_budget: int | None) -> list[Unit]:
    """Return the second tier of one head after an eviction, ascending by position.

    Args:
        host: What it held.
        gone: What was evicted from the first tier.
        host_budget: Units it may hold, the best ones by score; None: all.
    """
    units = sorted([*host, *gone], key=lambda unit: unit[0])
    ratings = [unit[3] for unit in units]
    return [units[slot] for slot in select_kept(ratings, len(units) if host_budget is None else host_budget, set())]


def answer_with_recall(
    model: Any,
    heads: Any,
    texts: list[tuple[Tensor, Tensor]],
    inv_freq: Tensor,
    magnitude: float,
    numbers: tuple[int, int, int, int],
    tier: tuple[list[tuple[int | None, ...]], int],
    *,
    original_positions: bool = False,
    split: tuple[float, bool] | Callable[[int, list[int]], list[int]] | None = None,
    diversity: float = 0.0,
) -> tuple[list[list[list[int]]], Tensor]:
    """Read prompts as `read_prompt` does, but let their local tokens and the answers recall what was evicted.

    Each of those tokens attends, in every layer and KV head, to all units of the first tier and to the `recall` units
    of the second with the largest logits. Compact positions are ranks among all that either tier of the head holds, as
    if the recalled units had stayed.

    Args:
        model: A decoder-only transformers model with pre-norm layers (Llama, Mistral, Qwen2, Qwen3, Phi-3).
        heads: `heads[layer](features)` scores tokens.
        texts: (T,) token ids of each prompt, and (A,) those that are fed one after another once it has been read.
        inv_freq: (D/2,) rotary frequencies.
        magnitude: Factor of cos and sin.
        numbers: Budget, chunk size, stabilizers, local length.
        tier: Host budget of each layer's KV heads (None: all), and units recalled.
        original_positions: Rotate by place in the text instead of rank.
        split: See `read_prompt`; or what says how many units the KV heads of a layer keep of how many.
        diversity: See `read_prompt`.

    Returns:
        Per layer and KV head the positions that the second tier holds; and (1 + A, vocabulary) logits of the last
        prompt's last token and of each token of its answer.
    """
    budget, chunk_size, stabilizers, local_len = numbers
    host_budgets, recall = tier
    layers, rope = model.model.layers, (inv_freq, magnitude, original_positions)
    nothing = torch.zeros(1, model.config.hidden_size)
    kv_heads = [split_projections(layer.self_attn, nothing)[1].shape[1] for layer in layers]
    fast: list[list[list[Unit]]] = [[[] for _ in range(count)] for count in kv_heads]
    host: list[list[list[Unit]]] = [[[] for _ in range(count)] for count in kv_heads]

    def evict(index: int, guard: int) -> None:
        held = fast[index]
        own = split(index, [len(pool) for pool in held]) if callable(split) else split
        fast[index] = _evict(held, budget, guard, own, diversity)
        for head, (before, after) in enumerate(zip(held, fast[index], strict=True)):
            stayed = {unit[0] for unit in after}
            gone = [unit for unit in before if unit[0] not in stayed]
            host[index][head] = into_host(host[index][head], gone, host_budgets[index][head])

    seen, logits = 0, list[Tensor]()
    for prompt_T, answer_A in texts:
        length = max(len(prompt_T) - local_len, 0)
        for index in range(len(layers)):  # what an earlier text and its answer hold too much
            evict(index, stabilizers)
        for start in range(0, length, chunk_size):
            end = min(start + chunk_size, length)
            hidden_TE = model.model.embed_tokens(prompt_T[start:end])
            for index, layer in enumerate(layers):
                hidden_TE = hidden_TE + _attention(layer, hidden_TE, fast[index], seen + start, rope, heads[index])
                hidden_TE = hidden_TE + layer.mlp(layer.post_attention_layernorm(hidden_TE))
                evict(index, 0 if end == length else stabilizers)
        logits = []
        for position, token in enumerate([*prompt_T[length:], *answer_A], start=seen + length):
            hidden_E = model.model.embed_tokens(token[None])[0]
            for index, layer in enumerate(layers):
                tiers = fast[index], host[index]
                hidden_E = hidden_E + _recalling(layer, hidden_E, *tiers, position, rope, heads[index], recall)
                hidden_E = hidden_E + layer.mlp(layer.post_attention_layernorm(hidden_E[None]))[0]
            logits.append(model.lm_head(model.model.norm(hidden_E)))
        logits = logits[len(prompt_T) - length - 1 :]
        seen += len(prompt_T) + len(answer_A)
    return [[[unit[0] for unit in units] for units in of_layer] for of_layer in host], torch.stack(logits)


def _recalling(
    layer: Any,
    hidden_E: Tensor,
    fast: list[list[Unit]],
    host: list[list[Unit]],
    position: int,
    rope: tuple[Tensor, float, bool],
    retaining_head: Any,
    recall: int,
) -> Tensor:
    """Add one token's unit to the first tier and return the attention output, (E,)."""
    attention, (inv_freq, magnitude, original_positions) = layer.self_attn, rope
    query, key, value = (part[0] for part in split_projections(attention, layer.input_layernorm(hidden_E[None])))
    scores_K = retaining_head(torch.cat([query.flatten(), key.flatten(), value.flatten()])[None])[0]
    group = len(query) // len(key)
    out = torch.zeros(len(query), attention.head_dim)
    for k in range(len(key)):
        fast[k].append((position, key[k], value[k], float(scores_K[k])))
        units = sorted([*fast[k], *host[k]], key=lambda unit: unit[0])
        turned = {
            unit[0]: rotate(unit[1], unit[0] if original_positions else rank, inv_freq, magnitude)
            for rank, unit in enumerate(units)
        }
        asking = [
            rotate(query[n], position if original_positions else len(units) - 1, inv_freq, magnitude)
            for n in range(k * group, (k + 1) * group)
        ]
        chosen = []
        if host[k] and recall:
            logits_GU = torch.stack(asking) @ torch.stack([turned[unit[0]] for unit in host[k]]).T
            chosen = [host[k][rank] for rank in best_units(logits_GU * attention.scaling, recall)]
        seen = sorted([*fast[k], *chosen], key=lambda unit: unit[0])
        keys, values = torch.stack([turned[unit[0]] for unit in seen]), torch.stack([unit[2] for unit in seen])
        for n, asked in zip(range(k * group, (k + 1) * group), asking, strict=True):
            out[n] = torch.softmax(keys @ asked * attention.scaling, dim=0) @ values
    return attention.o_proj(out.flatten()[None])[0]  # type: ignore[no-any-return]
