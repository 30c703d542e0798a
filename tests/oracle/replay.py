"""Reading with eviction, slowly, for any backbone: the whole text in one pass of the backbone's own code, under masks.

What a token attends to follows from what had been evicted before its chunk. A mask over the whole text says the same,
so nothing is held from chunk to chunk: neither units, nor the states of layers that carry any.
"""

# N query heads, K KV heads, T tokens, D head dim, E hidden size

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracle.retaining import select_kept, split_projections

History = list[list[list[list[int]]]]


def read_whole(
    model: Any, heads: Any, prompt_T: Tensor, attentions: dict[int, Any], numbers: tuple[int, int, int, int]
) -> tuple[History, Tensor]:
    """Read a prompt as `read_prompt` does, with original positions; the backbone attends eagerly.

    Args:
        model: A decoder-only transformers model.
        heads: `heads[layer](features)` scores tokens.
        prompt_T: (T,) token ids.
        attentions: The attention module of each governed layer.
        numbers: budget, chunk size, stabilizers, local length.

    Returns:
        Per chunk, governed layer and KV head the kept text positions; and (vocabulary,) logits of the last token.
    """
    budget, chunk_size, stabilizers, local_len = numbers
    length = len(prompt_T) - local_len
    starts = list(range(0, length, chunk_size))
    groups = {index: module.config.num_attention_heads // _kv_heads(module) for index, module in attentions.items()}
    pools = {index: [list[int]() for _ in range(_kv_heads(module))] for index, module in attentions.items()}
    seen: dict[int, list[list[list[int]]]] = {index: [] for index in attentions}
    history: History = []
    for start, end in zip([*starts, length], [*starts[1:], length, len(prompt_T)], strict=True):
        for index, pool in pools.items():
            seen[index].extend([[*kept, *range(start, token + 1)] for kept in pool] for token in range(start, end))
        scores, logits = _pass(model, heads, prompt_T[:end], attentions, seen, groups)
        if start < length:
            for index, pool in pools.items():
                for head, kept in enumerate(pool):
                    units = [*kept, *range(start, end)]
                    guard = 0 if end == length else stabilizers
                    newest = set(range(max(len(units) - guard, 0), len(units)))
                    slots = select_kept([float(scores[index][p, head]) for p in units], budget, newest)
                    pool[head] = [units[slot] for slot in slots]
            history.append([[list(kept) for kept in pool] for pool in pools.values()])
    return history, logits[-1]


def _kv_heads(attention: Any) -> int:
    return int(attention.config.num_key_value_heads)


def _pass(
    model: Any,
    heads: Any,
    ids_T: Tensor,
    attentions: dict[int, Any],
    seen: dict[int, list[list[list[int]]]],
    groups: dict[int, int],
) -> tuple[dict[int, Tensor], Tensor]:
    """Return (T, K) scores of each governed layer, and (T, vocabulary) logits."""
    scores: dict[int, Tensor] = {}

    def masked(index: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hidden_TE = (args[0] if args else kwargs["hidden_states"])[0]
            parts = [part.flatten(1) for part in split_projections(module, hidden_TE)]
            scores[index] = heads[index](torch.cat(parts, dim=-1))
            visible = torch.full((len(seen[index][0]), len(ids_T), len(ids_T)), -torch.inf)
            for token, by_head in enumerate(seen[index]):
                for head, units in enumerate(by_head):
                    visible[head, token, units] = 0
            return args, {**kwargs, "attention_mask": visible.repeat_interleave(groups[index], dim=0)[None]}

        return hook

    hooks = [module.register_forward_pre_hook(masked(i), with_kwargs=True) for i, module in attentions.items()]
    try:
        return scores, model(ids_T[None], use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
