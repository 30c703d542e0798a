"""Pictures of what a cache kept. matplotlib is imported only when one is drawn (extra: locret[eval])."""

# K KV heads, C kept units, W columns

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locret.base.files import written_whole

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache

INK = "#222222"
BARS = " ▁▂▃▄▅▆▇█"
COLUMNS = 400
"""Most columns of a map: one column stands for several neighbouring positions of a longer text."""


@dataclass(frozen=True)
class Retention:
    """What one cache held of a text when it had been read."""

    title: str
    kept: dict[int, list[Tensor]]
    """For every full-attention layer, and in it for every KV head, the (C,) int64 original positions held."""
    prompt_tokens: int


def retention_of(cache: RetentionCache, title: str) -> Retention:
    """Take down which positions a cache holds now (its first row, in a batch)."""
    kept = {
        layer: [head[head >= 0] for head in cache.kept_everywhere(layer)[0].cpu()] for layer in cache.backbone.layers
    }
    return Retention(title, kept, cache.seen)


def as_lines(retention: Retention, width: int = 60) -> list[str]:
    """Return a line of bars per layer: how much of each stretch of the text its KV heads kept."""
    shares = kept_shares(retention, min(width, retention.prompt_tokens))
    by_layer = [part.mean(0) for part in shares.split([len(heads) for heads in retention.kept.values()])]
    top = max(float(share.max()) for share in by_layer) or 1.0
    # A square root as in the map, where a single kept position would not show otherwise.
    levels = [(share / top).sqrt().mul(len(BARS) - 1).ceil().long().tolist() for share in by_layer]
    bars = ["".join(BARS[level] for level in one) for one in levels]
    return [f"{layer:>5} |{bar}|" for layer, bar in zip(retention.kept, bars, strict=True)]


def require_matplotlib(setting: str) -> None:
    """Make sure that pictures can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{setting} needs matplotlib; install it with `pip install 'locret[eval]'`")


def can_draw(setting: str) -> bool:
    """Return whether pictures can be drawn; if not, warn with what to install."""
    try:
        require_matplotlib(setting)
    except ValueError as error:
        warnings.warn(f"{error}; everything but the pictures is written", stacklevel=2)
        return False
    return True


def kept_shares(retention: Retention, columns: int) -> Tensor:
    """Return (rows, columns) float32: the share of positions kept in each stretch of the text, a row per KV head."""
    edges = column_edges(retention.prompt_tokens, columns)
    rows = []
    for heads in retention.kept.values():
        for positions_C in heads:
            counts = torch.histogram(positions_C.to(torch.float64), edges).hist
            rows.append(counts / edges.diff())
    return torch.stack(rows).float()


def column_edges(prompt_tokens: int, columns: int) -> Tensor:
    """Return (columns + 1,) float64 integer borders between the columns; position p lies in [edge, next edge)."""
    return torch.linspace(0, prompt_tokens, columns + 1, dtype=torch.float64).round()


def retention_map(retentions: Sequence[Retention], path: str | Path) -> None:
    """Draw which positions each layer and KV head kept, of one cache or of several one below the other.

    Args:
        retentions: What to draw, from top to bottom.
        path: PNG file to write; an existing one is replaced.
    """
    require_matplotlib("a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    # Figure without pyplot: no window system is looked for, and nothing is left behind in the process.
    rows = [sum(len(heads) for heads in retention.kept.values()) for retention in retentions]
    heights = [min(6.0, max(1.2, 0.22 * count)) for count in rows]
    figure = Figure(figsize=(10, sum(heights) + 0.75 * len(retentions) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    columns = min(COLUMNS, max(r.prompt_tokens for r in retentions))
    shares = [kept_shares(retention, columns) for retention in retentions]
    highest = max(float(share.max()) for share in shares)
    for axis, retention, share in zip(axes, retentions, shares, strict=True):
        image = _draw(axis, share, retention, highest)
    axes[-1].set_xlabel("position in the text (tokens)")
    axes[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.colorbar(image, ax=list(axes), label="share of positions kept (%)", fraction=0.03, pad=0.015, shrink=0.6)
    save(figure, path)


def _draw(axis: Any, share: Tensor, retention: Retention, highest: float) -> Any:
    # A square root shows a single kept position of a long column, which a linear scale would leave white.
    from matplotlib.colors import PowerNorm

    heads = [len(heads) for heads in retention.kept.values()]
    units = max(len(positions) for heads in retention.kept.values() for positions in heads)
    axis.set_title(
        f"{retention.title}: {units:,} of {retention.prompt_tokens:,} positions kept per KV head",
        fontsize=10,
        loc="left",
        color=INK,
    )
    image = axis.imshow(
        100 * share.numpy(),
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        norm=PowerNorm(0.5, 0, 100 * highest),
        extent=(0, retention.prompt_tokens, sum(heads), 0),
    )
    borders = [sum(heads[:index]) for index in range(len(heads))]
    for border in borders[1:]:
        axis.axhline(border, color=INK, linewidth=1 if len(heads) <= 12 else 0.4)
    step = math.ceil(len(heads) / 12)
    middles = [border + count / 2 for border, count in zip(borders, heads, strict=True)]
    axis.set_yticks(middles[::step], [str(layer) for layer in list(retention.kept)[::step]])
    axis.set_ylabel(f"layer\n({heads[0]} KV heads each)")
    axis.tick_params(axis="y", length=0)
    return image


def save(figure: Any, path: str | Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    with written_whole(path) as fresh:
        figure.savefig(fresh, format="png", dpi=150)
