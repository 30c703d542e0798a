"""Reading with eviction once more, plainly: one pass of the backbone in which every token sees what was kept for it.

The backbone computes all but the attention, which is written out here: per layer and KV head, the queries of a chunk
attend to the units that were kept before it, wherever they stand, and to the chunk itself. Nothing is evicted and no
cache exists, so none of the engine's bookkeeping can be wrong in the same way.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from locret.backbone.adapters import attention_modules, describe, find_decoder, rotary_module, unwrap
from locret.backbone.passes import gathering_root
from locret.backbone.rotary import FULL_ATTENTION


def run_backbone(model: nn.Module, **arguments: Any) -> None:
    """Run the decoder layers, from the root where weights come together from there on."""
    if gathering_root(model) is not None:
        unwrap(model)(logits_to_keep=1, **arguments)
    else:
        find_decoder(model)(**arguments)


@contextmanager
def recorded(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """Record the last hidden states of all passes until the block ends, (B, L, E) each, float32 on the CPU."""
    states: list[Tensor] = []

    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        states.append(output[0].detach().float().cpu())

    handle = decoder.register_forward_hook(hook)
    try:
        yield states
    finally:
        handle.remove()


class Layout(NamedTuple):
    """Which dims of its keys a layer rotates."""

    rotates: bool = True
    adjacent: bool = False
    """Whether neighbours form the pairs, rather than the two halves of R."""
    behind: bool = False
    """Whether the rotated dims are the last ones."""


LAYOUTS = (
    Layout(rotates=False),
    Layout(),
    Layout(adjacent=True),
    Layout(behind=True),
    Layout(adjacent=True, behind=True),
)


class Turn:
    """Rotates keys by distances, with the frequencies of the backbone's own module.

    Args:
        decoder: The backbone's.
        layout: What the layer rotates.
        detour: Rotate this much too far, and back: equal in mathematics, with the rounding of larger angles.
    """

    def __init__(self, decoder: Any, layout: Layout, detour: int = 0) -> None:
        self.layout, self._detour = layout, detour
        self._module: Any = rotary_module(decoder) if layout.rotates else None
        by_type = self._module is not None and "layer_type" in inspect.signature(self._module.forward).parameters
        self._extra = {"layer_type": FULL_ATTENTION} if by_type else {}
        if self._module is not None and by_type and FULL_ATTENTION not in self._module.rope_type:
            self._module = None
        frequencies = getattr(self._module, f"{FULL_ATTENTION}_inv_freq" if by_type else "inv_freq", None)
        self._pairs = None if frequencies is None else frequencies.shape[-1]

    def __call__(self, keys: Tensor, distances: Tensor) -> Tensor:
        """Return keys (..., S, D) rotated further by (S,) whole distances, float32."""
        if self._detour:
            return self._turned(self._turned(keys, distances + self._detour), torch.full_like(distances, -self._detour))
        return self._turned(keys, distances)

    def _turned(self, keys: Tensor, distances: Tensor) -> Tensor:
        keys = keys.float()
        if self._module is None:
            return keys
        cos, sin = self._tables(keys, torch.cat([distances.new_zeros(1), distances.abs()]))
        scale, sign = cos[0], distances.sign().to(keys.device)[:, None]
        cos, sin = cos[1:] / scale, sign * sin[1:] / scale
        rotated = 2 * cos.shape[-1]
        start = keys.shape[-1] - rotated if self.layout.behind else 0
        before, part, rest = keys.split([start, rotated, keys.shape[-1] - rotated - start], dim=-1)
        one, two = (part[..., ::2], part[..., 1::2]) if self.layout.adjacent else part.chunk(2, dim=-1)
        pair = one * cos - two * sin, two * cos + one * sin
        turned = torch.stack(pair, dim=-1).flatten(-2) if self.layout.adjacent else torch.cat(pair, dim=-1)
        return torch.cat([before, turned, rest], dim=-1)

    def _tables(self, keys: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return (S, H) cosines and sines of positions (S,)."""
        grid = at[None].to(keys.device)
        if hasattr(self._module, "mrope_section"):  # positions of text in time, height and width are the same
            grid = grid.expand(3, 1, -1)
        table: Any = self._module(keys, grid, **self._extra)  # type: ignore[misc]
        if isinstance(table, Tensor):  # complex numbers
            return table.real[0], table.imag[0]
        cos, sin = (part[0] for part in table)
        if cos.shape[-1] == self._pairs:  # one column per pair rather than per dimension
            return cos, sin
        if torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
            return cos[:, ::2], sin[:, ::2]
        half = cos.shape[-1] // 2
        return cos[:, :half], sin[:, :half]


def layout_of(decoder: Any, keys: Tensor, further: Tensor, distance: int) -> tuple[Layout, float]:
    """Return the layout that makes keys those of the same tokens further on, and how far apart they are with it.

    Args:
        decoder: The backbone's.
        keys: (K, S, D), rotated by the backbone.
        further: (K, S, D) likewise, with every token that many positions further on.
        distance: How many.
    """
    found: dict[Layout, float] = {}
    for layout in LAYOUTS:
        turned = Turn(decoder, layout)(keys, torch.full(keys.shape[-2:-1], distance))
        found[layout] = float(((turned - further).norm(dim=-1) / further.norm(dim=-1)).median())
    best = min(found, key=lambda layout: found[layout])
    return best, found[best]


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
