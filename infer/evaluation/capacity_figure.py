"""The picture of capacity: facts recalled against facts stated, and below the share of what was possible."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locret.infer.evaluation.allotment import amount
from locret.infer.evaluation.figures import COLORS, new_figure, style
from locret.infer.evaluation.protocols import shown
from locret.pictures import INK, save


def draw(record: Mapping[str, Any], path: str | Path) -> None:
    """Draw a column per budget; what keeps everything stands in all of them.

    Args:
        record: Of `capacity.measure`.
        path: PNG file to write.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    rows = shown(record["rows"])
    budgets = list(dict.fromkeys(amount(row) for row in rows if amount(row) != "all")) or ["all"]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = new_figure(4.2 * len(budgets) + 2.6, 6.2)
    grid = figure.subplots(2, len(budgets), squeeze=False, sharex=True, sharey="row")
    legend: dict[str, Any] = {}
    for (above, below), budget in zip(grid.T, budgets, strict=True):
        bounded = [row for row in rows if amount(row) == budget]
        for index, method in enumerate(methods):
            own = [row for row in rows if row["method"] == method and amount(row) in (budget, "all")]
            if own:
                dashes = "-" if index < len(COLORS) else "--"
                legend[method] = _curves(above, below, own, *style(index), dashes)
        line = sorted({(row["facts"], row["possible"]) for row in bounded})
        possible = above.plot(*zip(*line, strict=True), color=INK, linestyle="--", linewidth=1.2, zorder=0)[0]
        legend["possible"] = possible
        below.axhline(1, color=INK, linestyle="--", linewidth=1.2, zorder=0)
        above.set_title(f"budget {budget}", fontsize=10, loc="left", color=INK)
        _axes(above, below, [row["facts"] for row in rows])
    grid[0][0].set_ylabel("facts recalled")
    grid[1][0].set_ylabel("recalled / possible")
    figure.legend(legend.values(), legend.keys(), loc="outside right upper", frameon=False, fontsize=9)
    note = f"facts in {record['tokens']:,} tokens ({record['task']}); bars: one standard error over texts"
    figure.supxlabel(note, fontsize=10, color=INK)
    save(figure, path)


def _curves(above: Any, below: Any, own: list[dict[str, Any]], color: str, marker: str, dashes: str) -> Any:
    facts = [row["facts"] for row in own]
    for axes, name, scale in ((above, "recalled", lambda row: 1.0), (below, "ratio", lambda row: row["possible"])):
        values = [row[name] for row in own]
        errors = [(row["standard_error"] or 0.0) / scale(row) for row in own]
        low, high = ([y + sign * e for y, e in zip(values, errors, strict=True)] for sign in (-1, 1))
        axes.vlines(facts, low, high, color=color, alpha=0.5, linewidth=1.1)
        drawn = axes.plot(facts, values, color=color, marker=marker, markersize=4.5, linewidth=1.3, linestyle=dashes)[0]
    return drawn


def _axes(above: Any, below: Any, facts: list[int]) -> None:
    ticks = sorted(set(facts))
    for axes in (above, below):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    above.set_yscale("symlog", base=2, linthresh=1)
    above.set_ylim(bottom=-0.1)
    above.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    below.set_ylim(-0.05, None)
