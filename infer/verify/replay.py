"""Reading with eviction once more, plainly: one pass of the backbone in which every token sees what was kept for it.

The backbone computes all but the attention, which is written out here: per layer and KV head, the queries of a chunk
attend to the units that were kept before it, wherever they stand, and to the chunk itself. Nothing is evicted and no
cache exists, so none of the engine's bookkeeping can be wrong in the same way. How a layer rotates its keys is taken
from the library; with nothing evicted that is compared with the backbone itself.
"""

# N query heads, K KV heads, G query heads of a group, T tokens, L tokens of a block, S units, D head dim, E hidden size

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from locret.backbone.adapters import attention_modules, describe, find_decoder, latents, unwrap
from locret.backbone.instrument import attending_by
from locret.backbone.passes import run_decoder, unrotated_layers
from locret.backbone.rotary import Rotary, rotate

Kept = list[list[Tensor]]
"""Per governed layer and KV head, (S,) original positions of units, ascending, on the CPU."""


class Block(NamedTuple):
    """Tokens that were read in one pass, and what their queries saw besides the block itself."""

    start: int
    end: int
    kept: Kept


class _Replay:
    def __init__(self, model: nn.Module, blocks: Sequence[Block], compact: bool, detour: int) -> None:
        modules, self.backbone = attention_modules(model), describe(model)
        self.layers, self.latents = {module: index for index, module in enumerate(modules)}, latents(model, modules)
        self.rotary = Rotary(find_decoder(model), unrotated_layers(model, self.backbone)) if compact else None
        self.blocks, self.detour, self.bases = blocks, detour, [block.start for block in blocks]
        if compact and not self.backbone.slides:  # as far as the fullest head reaches
            self.bases = [max(len(head) for heads in block.kept for head in heads) for block in blocks]
        spans = zip(self.bases, blocks, strict=True)
        self.where = torch.cat([base + torch.arange(block.end - block.start) for base, block in spans])

    def turned(self, index: int, keys: Tensor, distances: Tensor) -> Tensor:
        """Return (S, D) keys of a layer rotated further by (S,) whole distances, float32."""
        if self.rotary is None or not len(keys):
            return keys
        rotary, latent = self.rotary.of(index), self.latents.get(index)
        start = 0 if latent is None else keys.shape[-1] - latent.rotated
        adjacent = rotary.adjacent if latent is None else latent.paired
        for far in (torch.full_like(distances, self.detour), distances - self.detour) if self.detour else (distances,):
            cos, sin = rotary.at(torch.cat([far.new_zeros(1), far.abs()]), keys)
            scale, sign = cos[0], far.sign()[:, None]  # keys have the factor of YaRN already
            turned = rotate(keys[:, start:], cos[1:] / scale, sign * sin[1:] / scale, adjacent=adjacent)
            keys = torch.cat([keys[:, :start], turned], dim=-1)
        return keys

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        """Attend as the blocks say; called as an attention of transformers."""
        index, governed = self.layers[module], self.backbone.layers
        index = self.backbone.sources[index] if self.backbone.sources else index
        nth = governed.index(index) if index in governed else None
        queries, keys, values = query[0].float(), key[0].float(), value[0].float()
        softcap, sinks = options.get("softcap"), options.get("s_aux")
        scaling = query.shape[-1] ** -0.5 if options.get("scaling") is None else options["scaling"]
        window = (options.get("sliding_window") if nth is None else None) or queries.shape[1]
        group = queries.shape[0] // keys.shape[0]
        out = queries.new_empty(*queries.shape[:2], values.shape[-1])
        for block, base in zip(self.blocks, self.bases, strict=True):
            new = torch.arange(block.start, block.end, device=keys.device)
            for head in range(keys.shape[0]):
                kept = torch.arange(max(0, block.start - window), block.start)
                if nth is not None:  # all heads of latent attention attend to the same units
                    kept = block.kept[nth][head * len(block.kept[nth]) // keys.shape[0]].long()
                asking, there = slice(head * group, (head + 1) * group), torch.cat([kept.to(new), new])
                old, distance = keys[head, kept], new[:, None] - there
                if nth is not None:
                    old = self.turned(
                        index, old, (base - len(kept) + torch.arange(len(kept)) - self.where[kept]).to(new)
                    )
                logits = queries[asking, new] @ torch.cat([old, keys[head, new]]).T * scaling
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                logits = logits.masked_fill((distance < 0) | (distance >= window), -torch.inf)
                if sinks is not None:
                    own = sinks.float().flatten()[asking, None, None]
                    logits = torch.cat([logits, own.expand(*logits.shape[:2], 1)], dim=-1)
                out[asking, new] = logits.softmax(-1)[..., : len(there)] @ values[head, there]
        return out.to(query.dtype).transpose(0, 1)[None].contiguous(), None


def replay(model: nn.Module, ids: Tensor, blocks: Sequence[Block], *, compact: bool, detour: int = 0) -> Tensor:
    """Run the backbone over (1, T) ids as the blocks say; gradients are off and rotary frequencies settled.

    `compact` units stand right in front of their block, not where they were. By a `detour` keys turn too far, and back.

    Returns:
        (T, E) last hidden states, on the CPU.
    """
    _RUNNING.append(run := _Replay(model, blocks, compact, detour))
    try:
        with attending_by(unwrap(model), _NAME), recorded(find_decoder(model)) as states:
            run_decoder(model, ids, position_ids=run.where.to(ids.device)[None])
    finally:
        _RUNNING.pop()
    return states[0][0]


@contextmanager
def recorded(decoder: nn.Module) -> Iterator[list[Tensor]]:
    """Record the last hidden states of all passes until the block ends, (B, L, E) each, float32 on the CPU."""
    states: list[Tensor] = []
    handle = decoder.register_forward_hook(lambda _module, _args, out: states.append(out[0].detach().float().cpu()))
    try:
        yield states
    finally:
        handle.remove()


_NAME = "locret_verify"
_RUNNING: list[_Replay] = []

AttentionInterface.register(_NAME, lambda *args, **options: _RUNNING[-1].attend(*args, **options))
AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
