"""What a backbone computes when its layers forget: one pass over the whole text in its own eager attention.

Nothing of the engine is used: the model builds its masks, rotates and attends with its own code. Its attention function
is called chunk by chunk with the units that are still there; each layer then keeps, per KV head, the units whose values
begin with the largest numbers. With compact positions the model's own rotary function is given the un-rotated states
again, at their ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import select_kept
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

NAME = "replay"
_ROTARY = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb")


@dataclass
class Replay:
    """How layers forget, and what has come of it."""

    budget: int
    chunk_size: int
    stabilizers: int
    local_len: int
    prompt: int
    compact: bool
    layers: tuple[int, ...]
    """Layers that forget; the others attend as the model says."""
    kept: dict[int, list[list[int]]] = field(default_factory=dict)
    """Per layer and KV head the kept positions of the prompt, ascending."""
    raw: tuple[Any, tuple[Tensor, ...]] | None = None
    """The model's rotation of states at given places, and the queries and keys that it was asked for last."""
    lent: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys of each layer and what they were before their rotation, for the layers that borrow them."""
    latent: Tensor | None = None
    """What the layer at hand makes all heads' keys and values from (DeepSeek)."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Tensor:
        """Return (1, T, N, D), having read the text in chunks."""
        rotate, query, key = self._unrotated(query, key)
        kv_heads, total = key.shape[1:3]
        group = query.shape[1] // kv_heads
        rating, latent = value[0, ..., 0], self.latent is not None
        if self.latent is not None:  # of all heads; it is their unit
            rating, self.latent = self.latent[..., 0].expand(kv_heads, -1), None
        held: list[list[int]] = [[] for _ in range(kv_heads)]
        parts = []
        length = max(self.prompt - self.local_len, 0)
        starts = list(range(0, length, self.chunk_size))
        for start, end in zip([*starts, length], [*starts[1:], length, total], strict=True) if starts else [(0, total)]:
            seen = torch.tensor([[*positions, *range(start, end)] for positions in held])
            keys, values = (
                torch.stack([states[0, k, seen[k]] for k in range(kv_heads)])[None] for states in (key, value)
            )
            rows = torch.stack([mask[0, 0, start:end, seen[k]] for k in range(kv_heads)])
            asking = query[:, :, start:end]
            if rotate is not None:
                asking, keys = rotate(asking, len(held[0])), rotate(keys, 0)
            eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", eager_attention_forward)
            parts.append(eager(module, asking, keys, values, rows.repeat_interleave(group, 0)[None], **options)[0])
            if end <= length and start < length:
                newest = 0 if end == length else self.stabilizers
                held = [
                    [
                        seen[k][slot].item()
                        for slot in select_kept(
                            rating[k, seen[k]].tolist(),
                            self.budget,
                            set(range(seen.shape[1] - newest, seen.shape[1])),
                        )
                    ]
                    for k in range(kv_heads)
                ]
        self.kept[module.layer_idx] = held[:1] if latent else held
        return torch.cat(parts, dim=1)

    def _unrotated(self, query: Tensor, key: Tensor) -> tuple[Any, Tensor, Tensor]:
        """Return how states are rotated from a place on, and queries and keys before that; None where they are not."""
        raw, self.raw = self.raw, None
        if not self.compact or raw is None:
            return None, query, key
        rotation, (raw_query, *raw_keys) = raw
        raw_key = raw_keys[0] if raw_keys else next(own for rotated, own in self.lent if torch.equal(rotated, key))
        self.lent.append((key, raw_key))
        if raw_key.shape[2] != key.shape[2]:  # heads behind tokens
            raw_query, raw_key = raw_query.transpose(1, 2), raw_key.transpose(1, 2)
            behind = rotation

            def rotation(states: Tensor, at: slice) -> Tensor:
                return behind(states.transpose(1, 2), at).transpose(1, 2)

        width, again = raw_key.shape[-1], rotation(raw_key, slice(None))
        places = (slice(0, width), slice(key.shape[-1] - width, key.shape[-1]))
        place = next(
            (place for place in places if torch.equal(again.expand_as(key[..., place]), key[..., place])), None
        )
        if place is None:
            raise NotImplementedError("keys are changed after their rotation")

        def rotate(states: Tensor, first: int) -> Tensor:
            turned = states.clone()
            turned[..., place] = rotation(states[..., place], slice(first, first + states.shape[2]))
            return turned

        query, key = query.clone(), key.clone()
        query[..., place], key[..., place] = raw_query, raw_key.expand_as(key[..., place])
        return rotate, query, key


_REPLAYS: list[Replay] = []


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any) -> Any:
    replay = _REPLAYS[-1]
    if module.layer_idx in replay.layers:
        return replay.attend(module, query, key, value, attention_mask, **options), None
    replay.raw = replay.latent = None
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", eager_attention_forward)
    return eager(module, query, key, value, attention_mask, **options)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, eager_mask)


@contextmanager
def _recorded(model: PreTrainedModel, replay: Replay) -> Iterator[None]:
    """Let the rotary functions of the model's files tell what they are given."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    found = [(module, name, getattr(module, name)) for module in modules for name in _ROTARY if hasattr(module, name)]

    def recorder(function: Any) -> Any:
        names = list(inspect.signature(function).parameters)
        states = 2 if {"k", "xk"} & set(names) else 1
        tables = states + (1 if "freqs_cis" in names else 2)

        def record(*args: Any, **options: Any) -> Any:
            earlier = () if replay.raw is None or states == 2 else replay.raw[1]

            def rotate(raw: Tensor, at: slice) -> Tensor:
                cut = [table[:, at] for table in args[states:tables]]
                turned = function(*[raw] * states, *cut, *args[tables:], **options)
                return turned[0] if states == 2 else turned

            out = function(*args, **options)
            replay.raw = rotate, (*earlier, *args[:states])
            return out

        return record

    def note(_module: Any, _inputs: Any, latent: Tensor) -> None:
        replay.latent = latent

    hooks = [
        part.register_forward_hook(note) for name, part in model.named_modules() if name.endswith("kv_a_layernorm")
    ]
    for module, name, function in found:
        setattr(module, name, recorder(function))
    try:
        yield
    finally:
        for module, name, function in found:
            setattr(module, name, function)
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def replayed(model: PreTrainedModel, ids: Tensor, replay: Replay) -> Tensor:
    """Return the (T, vocabulary) logits of a whole text, prompt and answer, read and forgotten as `replay` says."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _REPLAYS.append(replay)
    try:
        with _recorded(model, replay):
            return model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    finally:
        _REPLAYS.pop()
        model.set_attn_implementation(before)
