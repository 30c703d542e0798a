"""What a context file has kept of its text: as shares, as a picture in SVG, and as the passages that most heads hold.

Only the positions of its units are read. The picture needs no plotting library: a map of small cells is one PNG in it.
"""

# K KV heads, U units

from __future__ import annotations

import base64
import struct
import zlib
from array import array
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from locret.conversation.text import decode

WIDTH = 12
"""Tokens of a passage."""
COLUMNS = 50
"""Stretches of a text for which is said how much of them is kept."""
_COLUMNS = 400
_BLUE = (0, 114, 178)
"""Of Okabe and Ito's palette, whose colours differ for every kind of colour vision."""


def positions_of(path: Path) -> list[Tensor]:
    """Return for each layer the (K, U) positions in the text of the units that a saved context holds."""
    with safe_open(path, framework="pt") as file:
        names = sorted((name for name in file.keys() if name.endswith(".positions")), key=_layer)  # noqa: SIM118
        return [file.get_tensor(name)[0] for name in names]


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def shares(positions: list[Tensor], tokens: int, columns: int) -> Tensor:
    """Return (heads of all layers, columns): which share of each stretch of the text a head holds, 0 to 1."""
    columns = min(columns, tokens)
    found = []
    for head in (head for layer in positions for head in layer):
        held = head[(head >= 0) & (head < tokens)].long()
        found.append(torch.bincount(held * columns // tokens, minlength=columns))
    return (torch.stack(found) * (columns / tokens)).clamp(max=1)


def mean_shares(positions: list[Tensor], tokens: int) -> tuple[float, ...]:
    """Return for equal stretches of a text which share of each is kept, as the mean over all heads."""
    return tuple(round(share, 4) for share in shares(positions, tokens, COLUMNS).mean(0).tolist())


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


def picture(name: str, positions: list[Tensor], tokens: int) -> str:
    """Return an SVG: over the text from left to right, how much is kept, and below it the same for every head."""
    cells = shares(positions, tokens, _COLUMNS)
    mean = cells.mean(0)
    top, units = float(mean.max()) or 1.0, max(layer.shape[1] for layer in positions)
    width, curve, rows = 800, 120, max(80, min(320, 4 * len(cells)))
    step = width / len(mean)
    line = " ".join(
        f"{nth * step:.1f},{curve * (1 - float(one) / top):.1f} h{step:.2f}" for nth, one in enumerate(mean)
    )
    ticks = "".join(
        f'<text x="{60 + width * part / 4:.0f}" y="{curve + rows + 75}" text-anchor="middle">'
        f"{tokens * part // 4:,}</text>"
        for part in range(5)
    )
    # A square root shows a single kept position of a long stretch, which a linear scale would leave white.
    png = base64.b64encode(_png((cells / cells.max()).sqrt().numpy())).decode()
    title = escape(f"{name}: {units:,} of {tokens:,} tokens kept per KV head")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 90} {curve + rows + 105}" '
        f'font-family="sans-serif" font-size="13" role="img" aria-label="{escape(title, {chr(34): "&quot;"})}">'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="60" y="22" font-size="15">{title}</text>'
        f'<g transform="translate(60,40)"><path d="M0,{curve} L{line} V{curve} Z" fill="rgb{_BLUE}"/>'
        f'<image y="{curve + 10}" width="{width}" height="{rows}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{png}"/></g>'
        f'<text x="54" y="52" text-anchor="end">{top:.0%}</text>'
        f'<text x="54" y="{curve + 40}" text-anchor="end">0%</text>'
        f'<text x="54" y="{curve + 62}" text-anchor="end">heads</text>{ticks}'
        f'<text x="{60 + width / 2}" y="{curve + rows + 95}" text-anchor="middle">position in the text (tokens)</text>'
        "</svg>"
    )


def _png(shade: np.ndarray) -> bytes:
    """Return an image with a pixel for each number: 0 is white, 1 blue."""
    pixels = 255 - shade[..., None] * (255 - np.array(_BLUE))
    rows = b"".join(b"\0" + row.astype(np.uint8).tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", shade.shape[1], shade.shape[0], 8, 2, 0, 0, 0)
    parts = {b"IHDR": header, b"IDAT": zlib.compress(rows, 9), b"IEND": b""}
    chunks = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts.items())
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
