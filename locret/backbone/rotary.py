"""Rotary positions of cached keys: turn un-rotated keys to their slots, and back, exactly as the backbone does."""

# B batch, K KV heads, S slots, D head dim, R rotated dims

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from locret.backbone.adapters import rotary_module
from locret.base.fields import shown

FULL_ATTENTION = "full_attention"


class Rotary:
    """Cosines and sines of a backbone's full-attention layers, remembered for the positions asked for last.

    Tables have a column per rotated dimension, those of the first halves of the pairs before those of the second ones,
    whatever the backbone's own tables look like.

    Args:
        decoder: The backbone's stack of layers.
        still: Layers that do not rotate, see `locret.backbone.passes`.
    """

    def __init__(self, decoder: Any, still: frozenset[int] = frozenset()) -> None:
        self.still = still
        """The layers whose keys it leaves as they are."""
        self._module: Any = rotary_module(decoder)
        by_type = self._module is not None and "layer_type" in inspect.signature(self._module.forward).parameters
        self._extra = {"layer_type": FULL_ATTENTION} if by_type else {}
        prefix = f"{FULL_ATTENTION}_" if by_type else ""
        frequencies: Tensor | None = getattr(self._module, f"{prefix}inv_freq", None)
        self._pairs = None if frequencies is None else frequencies.shape[-1]
        self.adjacent = adjacent_pairs(decoder)
        """Whether neighbours form the pairs, rather than the two halves of the rotated dimensions."""
        self._last: tuple[tuple[object, ...], tuple[Tensor, Tensor]] | None = None

    def of(self, layer: int) -> Rotary:
        """Return the rotation of one layer; of one that does not rotate, that of no module."""
        return Rotary(nn.Module()) if layer in self.still else self

    def table(self, start: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (length, R) in the dtype and on the device of `like`, for consecutive positions.

        All layers of equal length share the positions of a chunk, so the last table is kept. Copies of a cache share
        it too, in several threads, so it is read and replaced as one.
        """
        key, last = (start, length, like.dtype, like.device), self._last
        if last is None or last[0] != key:
            last = self._last = (key, self.at(torch.arange(start, start + length, device=like.device), like))
        return last[1]

    def at(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each (..., S, R) in the dtype and on the device of `like`, for any positions (..., S).

        Where the backbone has no rotary embedding they are those of no angle, which change nothing.
        """
        if self._module is None:
            still = like.new_ones((*positions.shape, 2))
            return still, torch.zeros_like(still)
        if self._extra and FULL_ATTENTION not in self._module.rope_type:
            raise ValueError(
                "layers of full attention have no rotary positions here, so no rank can be given to their keys; use "
                'positions="original"'
            )
        flat = positions.to(like.device).reshape(1, -1)
        # Of text, positions in time, height and width are the same.
        grid = flat.expand(3, 1, -1) if hasattr(self._module, "mrope_section") else flat
        table = self._module(like, grid, **self._extra)
        if isinstance(table, Tensor):  # complex numbers (DeepSeek-V2)
            cos, sin = (torch.cat([part, part], dim=-1).to(like.dtype) for part in (table.real, table.imag))
        else:
            cos, sin = table
        return self._halves(cos).view(*positions.shape, -1), self._halves(sin).view(*positions.shape, -1)

    def _halves(self, table: Tensor) -> Tensor:
        """Bring a table of the backbone into the layout of ours."""
        if table.shape[-1] == self._pairs:  # gpt-oss has one column per pair, where others have one per dimension
            return torch.cat([table, table], dim=-1)
        if self.adjacent and self._columns_adjacent:
            return torch.cat([table[..., ::2], table[..., ::2]], dim=-1)
        return table

    @cached_property
    def _columns_adjacent(self) -> bool:
        """Whether the backbone's tables have the columns of a pair side by side (Cohere) rather than apart (GLM)."""
        frequencies = next(self._module.buffers())
        one = torch.ones(1, 1, dtype=torch.long, device=frequencies.device)
        cos, _ = self._module(frequencies.float(), one, **self._extra)
        return torch.equal(cos[..., ::2], cos[..., 1::2])

    def turn(self, keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
        """Rotate keys as the backbone does; see `rotate`."""
        return rotate(keys, cos, sin, out, adjacent=self.adjacent)

    def turn_back(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo `turn`; see `unrotate`."""
        return unrotate(keys, cos, sin, adjacent=self.adjacent)

    def forget(self) -> None:
        """Drop the remembered table."""
        self._last = None


def adjacent_pairs(decoder: Any) -> bool:
    """Return whether a backbone rotates neighbouring dimensions together, as its own code does with (1, 2, 3, 4)."""
    if (function := getattr(sys.modules[type(decoder).__module__], "rotate_half", None)) is None:
        return False
    turned: Tensor = function(torch.arange(1.0, 5.0)[None, None, None])
    return turned.flatten().tolist() == [-2.0, 1.0, -4.0, 3.0]


def rotate(keys: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None, *, adjacent: bool = False) -> Tensor:
    """Rotate the first R dims of keys (..., S, D) by cos and sin (..., S, R); the other dims pass through.

    The two halves of R form the pairs (the Llama layout), or with `adjacent` neighbours do (GLM); the columns of the
    tables are by halves either way. Written into `out` if given, which must not overlap `keys`.
    """
    rotated, half = cos.shape[-1], cos.shape[-1] // 2
    out = torch.empty_like(keys) if out is None else out
    ones, others = (slice(0, rotated, 2), slice(1, rotated, 2)) if adjacent else (slice(half), slice(half, rotated))
    first, second = keys[..., ones], keys[..., others]
    torch.mul(first, cos[..., :half], out=out[..., ones]).addcmul_(second, sin[..., :half], value=-1)
    torch.mul(second, cos[..., half:], out=out[..., others]).addcmul_(first, sin[..., half:])
    if rotated < keys.shape[-1]:
        out[..., rotated:] = keys[..., rotated:]
    return out


def unrotate(keys: Tensor, cos: Tensor, sin: Tensor, *, adjacent: bool = False) -> Tensor:
    """Undo `rotate` in float32. Scaled tables (LongRoPE, YaRN) carry a factor m in cos and sin: it is divided out."""
    # Rounded tables have a factor of their own at every angle, which would add up over many moves.
    pairs = slice(0, 1) if cos.dtype == torch.float32 else slice(None)
    cos, sin = cos.float(), sin.float()
    magnitude_squared = cos[..., pairs] ** 2 + sin[..., pairs] ** 2
    turned = rotate(keys.float(), cos / magnitude_squared, -sin / magnitude_squared, adjacent=adjacent)
    return turned.to(keys.dtype)


class RotationCheck:
    """Compares our rotation with the backbone's once per layer, so that another kind of embedding is never mistaken."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self._checked: set[int] = set()
        self._wrong: list[Tensor] = []

    def compare(self, layer_idx: int, rotary: Rotary, start: int, raw_keys: Tensor, key_states: Tensor) -> None:
        """Compare (B, K, L, D) keys, before and after the backbone rotated them to `start` and on; wait for nothing."""
        length = raw_keys.shape[-2]
        if layer_idx in self._checked or start + length == 1:  # position 0 is never rotated, so it tells nothing
            return
        cos, sin = rotary.table(start, length, key_states)
        ours, theirs = rotary.turn(raw_keys, cos, sin).float(), key_states.float()
        self._wrong.append((ours - theirs).abs().max() > 0.02 * theirs.abs().max())
        self._checked.add(layer_idx)

    def report(self) -> None:
        """Raise what `compare` has found, with one look at the device for all layers."""
        wrong, self._wrong = self._wrong, []
        if wrong and torch.stack([found.to(wrong[0].device) for found in wrong]).any():
            self._checked.clear()
            raise ValueError(
                f"{self.model_type} gives keys their positions in a way that cannot be repeated at another rank; use "
                'positions="original"'
            )


def _rope_types(decoder: Any) -> list[str]:
    if rotary_module(decoder) is None:
        return []
    rope_type = rotary_module(decoder).rope_type
    return list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type]


def rotary_parameters(decoder: Any) -> dict[str, Any]:
    """Return how a backbone rotates keys, as plain data; nothing where it does not."""
    if rotary_module(decoder) is None:
        return {}
    parameters = json.loads(json.dumps(decoder.config.rope_parameters or {}, default=str))
    return parameters | ({"pairs": "adjacent"} if adjacent_pairs(decoder) else {})  # type: ignore[no-any-return]


_FROM_PARAMETERS = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies follow from their parameters alone, whatever the length."""


def rotary_from(parameters: Mapping[str, Any], head_dim: int, max_positions: int) -> Rotary:
    """Return the rotation that `rotary_parameters` describes, without the backbone."""
    # Models' files, which few callers need.
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3Config, Phi3RotaryEmbedding

    kind = parameters.get("rope_type", "default")
    if kind not in _FROM_PARAMETERS or {"pairs", "still"} & parameters.keys():
        raise ValueError(f"the rotary embedding {shown(kind)} follows from more than its parameters")
    shape = {"hidden_size": head_dim, "num_attention_heads": 1, "num_key_value_heads": 1}
    given = {**shape, "max_position_embeddings": max_positions, "rope_parameters": dict(parameters)}
    module: Any
    try:
        # Of all embeddings with these parameters only Phi-3's plain one rotates a share of the dimensions.
        if kind == "default":
            module = Phi3RotaryEmbedding(Phi3Config(**given))
        else:
            module = LlamaRotaryEmbedding(LlamaConfig(**given))
        cos, sin = module(torch.empty(0), torch.tensor([[0, 1]]))
        if not bool((cos.isfinite() & sin.isfinite()).all() and (cos[0, 0] > 0).all()):
            raise ValueError("it has no finite angles")
    except Exception as error:  # whatever the parameters of somebody's file do to it
        why = " ".join(str(error).split())
        raise ValueError(f"the rotary parameters {shown(parameters)} describe no rotation ({why})") from error
    return Rotary(SimpleNamespace(rotary_emb=module))


def different_rotation(saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return which of two backbones' rotary parameters differ, shown with both values; None: none that both have."""
    for name in sorted(saved.keys() & here.keys()):
        ours, theirs = saved[name], here[name]
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            if found := different_rotation(ours, theirs):
                return f"{name}.{found}"
        elif ours != theirs:
            return f"{name} {shown(ours)} in the file, {shown(theirs)} in the model"
    return None


def uses_long_factors(decoder: Any) -> bool:
    """Return whether any layer's rotary embedding is LongRoPE."""
    return "longrope" in _rope_types(decoder)


def fixed_reach(decoder: Any) -> int | None:
    """Return how many positions have the same frequencies whatever follows; None: all.

    With dynamic NTK the frequencies of all positions change beyond the original context, and keys that were rotated
    before the change disagree with queries after it.
    """
    dynamic = any("dynamic" in rope_type for rope_type in _rope_types(decoder))
    return rotary_module(decoder).original_max_seq_len if dynamic else None


@contextmanager
def long_factors(decoder: nn.Module) -> Iterator[None]:
    """Make a LongRoPE backbone use its long factors at every length.

    transformers changes from short to long factors when a position passes the original context length; keys cached
    before the change would then disagree with queries after it. The original implementation uses the long ones always.
    """
    module: Any = rotary_module(decoder)
    if module is None:
        yield
        return
    replaced = []
    types = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
    for layer_type, rope_type in types.items():
        if rope_type != "longrope":
            continue
        prefix = f"{layer_type}_" if layer_type else ""
        parameters = module.config.rope_parameters
        original = (parameters[layer_type] if layer_type else parameters)["original_max_position_embeddings"]
        current = getattr(module, f"{prefix}inv_freq")
        extra = {"layer_type": layer_type} if layer_type else {}
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, current.device, seq_len=original + 1, **extra)
        # Both names may be one tensor (transformers 5.17 makes them so), hence copies, and nothing written in place.
        for name in (f"{prefix}original_inv_freq", f"{prefix}inv_freq"):
            replaced.append((name, getattr(module, name).clone()))
            setattr(module, name, long.to(current.dtype).clone())
    try:
        yield
    finally:
        for name, tensor in replaced:
            setattr(module, name, tensor)
