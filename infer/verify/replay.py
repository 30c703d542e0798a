"""Reading with eviction once more, plainly: one pass of the backbone in which every token sees what was kept for it.

The backbone computes all but the attention, which is written out here: per layer and KV head, the queries of a chunk
attend to the units that were kept before it, wherever they stand, and to the chunk itself. Nothing is evicted and no
cache exists, so none of the engine's bookkeeping can be wrong in the same way.
"""

# N query heads, K KV heads, G query heads of a group, T tokens, L tokens of a block, S units, D head dim

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from locret.backbone.adapters import attention_modules, describe, find_decoder, unwrap
from locret.infer.verify.noise import recorded, run_backbone
from locret.infer.verify.rotation import Turn

NAME = "locret_verify"
_ROWS = 256


@dataclass(frozen=True)
class Block:
    """Tokens that were read in one pass, and what their queries saw besides the block itself."""

    start: int
    end: int
    kept: list[list[Tensor]]
    """Per governed layer and KV head, (S,) original positions, ascending."""


@dataclass
class Replayed:
    """What the pass computed."""

    states: Tensor
    """(T, E) last hidden states."""
    queries: dict[int, Tensor] = field(default_factory=dict)
    """Per governed layer, (N, T, D), rotated to true positions, on the CPU."""
    keys: dict[int, Tensor] = field(default_factory=dict)
    """(K, T, D) likewise."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """(K, T, D)."""


@dataclass
class _Running:
    layers: dict[nn.Module, int]
    sources: Sequence[int]
    """The layer whose units each layer attends to."""
    nth: dict[int, int]
    blocks: Sequence[Block]
    bases: Sequence[int]
    """Rotary position of the first token of each block."""
    where: Tensor
    """(T,) rotary positions of all tokens."""
    turns: Mapping[int, Turn] | None
    found: Replayed


_RUNNING: ContextVar[_Running | None] = ContextVar("locret_verify", default=None)


def replay(
    model: nn.Module,
    ids: Tensor,
    blocks: Sequence[Block],
    turns: Mapping[int, Turn] | None = None,
    *,
    shift: int = 0,
) -> Replayed:
    """Run the backbone over (1, T) ids as the blocks say; gradients are off and rotary frequencies settled.

    Args:
        model: The backbone.
        ids: Prompt and answer, where the backbone wants them.
        blocks: All tokens, in order.
        turns: What turns the keys of each governed layer, if kept units stand right in front of their block; None: they
            stand where they were.
        shift: Position of the first token, where units stand where they were.
    """
    decoder, found = find_decoder(model), Replayed(torch.empty(0))
    backbone = describe(model)
    # As far as the fullest head reaches; where some layers slide, positions stay true.
    ranked = turns is not None and not backbone.slides
    bases = [_longest(block) if ranked else block.start + shift for block in blocks]
    where = torch.cat([base + torch.arange(b.end - b.start) for base, b in zip(bases, blocks, strict=True)])
    running = _Running(
        layers={module: index for index, module in enumerate(attention_modules(model))},
        sources=backbone.sources or range(backbone.num_layers),
        nth={index: nth for nth, index in enumerate(backbone.layers)},
        blocks=blocks,
        bases=bases,
        where=where,
        turns=turns,
        found=found,
    )
    with _attending(unwrap(model), running), recorded(decoder) as states:
        run_backbone(model, input_ids=ids, use_cache=False, position_ids=where.to(ids.device)[None])
    found.states = states[0][0]
    return found


def _longest(block: Block) -> int:
    return max(len(head) for heads in block.kept for head in heads)


@contextmanager
def _attending(base: Any, running: _Running) -> Iterator[None]:
    before, token = base.config._attn_implementation, _RUNNING.set(running)
    base.set_attn_implementation(NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(before)
        _RUNNING.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as the blocks say; the signature is that of a transformers attention."""
    running = _RUNNING.get()
    assert running is not None
    layer = running.layers[module]
    index = running.sources[layer]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = (scaling, softcap, None if s_aux is None else s_aux.float().flatten())
    queries, keys, values = query[0].float(), key[0].float(), value[0].float()
    if index in running.nth:
        out = _by_blocks(queries, keys, values, running, index, options)
        if layer == index:
            running.found.queries[index], running.found.keys[index] = queries.cpu(), keys.cpu()
            running.found.values[index] = values.cpu()
    else:
        out = _all(queries, keys, values, sliding_window, options)
    return out.to(query.dtype).transpose(0, 1)[None].contiguous(), None


_Options = tuple[float, float | None, Tensor | None]


def _by_blocks(
    queries: Tensor, keys: Tensor, values: Tensor, running: _Running, index: int, options: _Options
) -> Tensor:
    group = queries.shape[0] // keys.shape[0]
    out = queries.new_empty(*queries.shape[:2], values.shape[-1])
    turn = None if running.turns is None else running.turns[index]
    for block, base in zip(running.blocks, running.bases, strict=True):
        held = block.kept[running.nth[index]]
        span, length = slice(block.start, block.end), block.end - block.start
        causal = torch.ones(length, length, dtype=torch.bool, device=queries.device).tril()
        for head in range(keys.shape[0]):
            # All heads of latent attention attend to the same units.
            kept = held[head * len(held) // keys.shape[0]].to(queries.device).long()
            old = keys[head, kept]
            if turn is not None and len(kept):
                now = base - len(kept) + torch.arange(len(kept), device=kept.device)
                old = turn(old, now - running.where.to(kept.device)[kept])
            seen = torch.cat([causal.new_ones(length, len(kept)), causal], dim=1)
            asking = slice(head * group, (head + 1) * group)
            both = torch.cat([old, keys[head, span]]), torch.cat([values[head, kept], values[head, span]])
            out[asking, span] = _softmax(queries[asking, span], *both, seen, _of(options, asking))
    return out


def _all(queries: Tensor, keys: Tensor, values: Tensor, window: int | None, options: _Options) -> Tensor:
    """Attend to everything before, or to a window of it."""
    group, tokens = queries.shape[0] // keys.shape[0], queries.shape[1]
    out = queries.new_empty(*queries.shape[:2], values.shape[-1])
    for start in range(0, tokens, _ROWS):
        rows = torch.arange(start, min(start + _ROWS, tokens), device=queries.device)
        distance = rows[:, None] - torch.arange(tokens, device=queries.device)
        seen = (distance >= 0) & (distance < (window or tokens))
        for head in range(keys.shape[0]):
            asking = slice(head * group, (head + 1) * group)
            out[asking, rows] = _softmax(queries[asking, rows], keys[head], values[head], seen, _of(options, asking))
    return out


def _of(options: _Options, heads: slice) -> _Options:
    scaling, softcap, sinks = options
    return scaling, softcap, None if sinks is None else sinks[heads]


def _softmax(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, options: _Options) -> Tensor:
    """Return (G, L, D) of one KV head: queries (G, L, D), keys and values (S, D), `seen` (L, S)."""
    scaling, softcap, sinks = options
    logits = queries @ keys.T * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:2], 1)], dim=-1)
    weights = logits.softmax(-1)
    return weights[..., : len(keys)] @ values


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Build no mask."""


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)
