"""How a backbone's layers rotate keys, found by looking at its own keys, and keys turned further in the same way."""

# S units, D head dim, R rotated dims, H pairs of them

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locret.backbone.adapters import rotary_module
from locret.backbone.rotary import FULL_ATTENTION


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
