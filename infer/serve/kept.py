"""What a context file has kept of its text, of which only the positions of its units are read."""

# K KV heads, U units

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

COLUMNS = 50
"""Stretches of a text for which is said how much of them is kept."""


def positions_of(path: Path) -> list[Tensor]:
    """Return for each layer the (K, U) positions in the text of the units that a saved context holds."""
    with safe_open(path, framework="pt") as file:
        names = sorted(
            (name for name in file.keys() if name.endswith(".positions")),  # noqa: SIM118
            key=lambda name: int(name.split(".")[1]),
        )
        return [file.get_tensor(name)[0] for name in names]


def mean_shares(positions: list[Tensor], tokens: int) -> tuple[float, ...]:
    """Return for equal stretches of a text which share of each is kept, 0 to 1, as the mean over all heads."""
    columns, found = min(COLUMNS, tokens), []
    for head in (head for layer in positions for head in layer):
        held = head[(head >= 0) & (head < tokens)].long()
        found.append(torch.bincount(held * columns // tokens, minlength=columns))
    shares = (torch.stack(found) * (columns / tokens)).clamp(max=1).mean(0)
    return tuple(round(share, 4) for share in shares.tolist())
