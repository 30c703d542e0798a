"""The picture of what heads lose: units in common with the oracle, answers that come back, and kinds of lost tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from locret.infer.evaluation.figures import new_figure
from locret.infer.evaluation.lost_units import KINDS
from locret.pictures import INK, KEPT, NEEDLE, save


def draw(record: Mapping[str, Any], path: str | Path) -> None:
    """Draw a row of three panels per task.

    Args:
        record: What `lost_units.measure` returned.
        path: PNG file to write; an existing one is replaced.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    found = record["tasks"]
    figure = new_figure(13.0, 3.2 * len(found) + 0.6)
    grid = figure.subplots(len(found), 3, squeeze=False, width_ratios=[1.0, 1.2, 1.6])
    for row, (task, one) in zip(grid, found.items(), strict=True):
        _common(row[0], task, one)
        _answers(row[1], one)
        _kinds(row[2], one)
    budget, tokens = record["policy"]["budget"], record["options"]["tokens"]
    title = f"Heads against the agnostic oracle: {tokens:,} tokens, {budget} units per KV head"
    figure.suptitle(title, fontsize=11, color=INK)
    save(figure, path)


def _common(axes: Any, task: str, found: Mapping[str, Any]) -> None:
    """Show the share of the oracle's units that heads keep too, by layer and KV head."""
    widest = max(map(len, found["in_common"].values()))
    shares = np.full((len(found["in_common"]), widest), np.nan)
    for nth, row in enumerate(found["in_common"].values()):
        shares[nth, : len(row)] = row
    axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for (nth, head), share in np.ndenumerate(shares):
        if not np.isnan(share) and shares.size <= 64:
            axes.text(head, nth, f"{100 * share:.0f}", ha="center", va="center", fontsize=8, color="white")
    axes.set_yticks(range(len(shares)), [f"layer {layer}" for layer in found["in_common"]], fontsize=8)
    axes.set_xlabel("KV head", fontsize=9)
    axes.set_title(f"{task}: units in common (%)", fontsize=10, loc="left", color=INK)


def _answers(axes: Any, found: Mapping[str, Any]) -> None:
    """Show which answers are right where one layer, or head, is that of the other."""
    right = found["right"]
    for start, end, color in (("heads", "oracle", NEEDLE), ("oracle", "heads", KEPT)):
        names = [name for name in right if name.startswith(f"{start}, ")]
        labels = [name.removeprefix(f"{start}, ").removesuffix(f" of the {end}") for name in names]
        axes.plot([100 * right[name] for name in names], range(len(names)), "o", color=color, markersize=4)
        axes.axvline(100 * right[start], color=color, linewidth=1.2, label=f"{start} (dots: one of the {end})")
        axes.set_yticks(range(len(labels)), labels, fontsize=8 if len(labels) < 12 else 5)
    axes.invert_yaxis()
    axes.set_xlim(-4, 104)
    _legend_below(axes, 2)
    axes.set_title("right answers (%)", fontsize=10, loc="left", color=INK)


def _legend_below(axes: Any, columns: int) -> None:
    axes.legend(
        fontsize=7, frameon=False, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -0.08),
        columnspacing=1.0, handletextpad=0.4,
    )  # fmt: skip


def _kinds(axes: Any, found: Mapping[str, Any]) -> None:
    """Show the units that only one side keeps, by layer and kind of token."""
    layers = list(found["missed"])
    for name, sign in (("missed", -1), ("spare", 1)):
        left = np.zeros(len(layers))
        for nth, kind in enumerate(KINDS):
            counts = np.array([found[name][layer][kind] for layer in layers])
            label = kind if sign < 0 else None
            axes.barh(range(len(layers)), sign * counts, left=sign * left, color=f"C{nth}", label=label, height=0.7)
            left += counts
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(layers)), [f"layer {layer}" for layer in layers], fontsize=8)
    axes.invert_yaxis()
    _legend_below(axes, len(KINDS))
    axes.set_title("units per head that only the oracle keeps | only the heads", fontsize=10, loc="left", color=INK)
