"""What a context file has kept of its text: as shares, and as the passages that most heads hold.

Only the positions of its units are read.
"""

# K KV heads, U units

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from locret.conversation.text import decode

WIDTH = 12
"""Tokens of a passage."""
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


def passages(positions: list[Tensor], tokens: int, ids: Path, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Return the passages that most heads hold, in their order, as JSON has them."""
    heads = torch.cat(positions)
    held = heads[(heads >= 0) & (heads < tokens)].long()
    places, counts = torch.unique(held // WIDTH, return_counts=True)
    best = counts.topk(min(count, len(counts))).indices
    found = []
    with open(ids, "rb") as file:
        for nth in best[places[best].argsort()].tolist():
            start, block = int(places[nth]) * WIDTH, array("I")
            end = min(start + WIDTH, tokens)
            file.seek(start * block.itemsize)
            block.frombytes(file.read((end - start) * block.itemsize))
            share = round(float(counts[nth]) / (len(heads) * len(block)), 4)
            where = {"start": start, "end": end, "place": round(start / tokens, 4)}
            found.append({**where, "share": share, "text": decode(tokenizer, block.tolist())})
    return found
