"""Pictures of an evaluation: score against budget, stabilizers and chunk size, and the needle heat map.

Every line carries the standard error of its means as a band. The numbers are those of `series`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locret.infer.evaluation import series
from locret.infer.evaluation.series import HeatMap, Line, Panel
from locret.infer.pictures import INK, require_matplotlib, save

# Okabe and Ito's palette without its yellow, which is hard to see as a line on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osDv^<>"
AXIS_LABELS = {
    "budget": "budget (units per KV head)",
    "budget_share": "budget (share of the prompt)",
    "chunk_size": "chunk size (tokens)",
    "stabilizers": "stabilizers (units)",
}
FILES = {
    "budget": "accuracy_by_budget.png",
    "budget_share": "accuracy_by_budget_share.png",
    "chunk_size": "accuracy_by_chunk_size.png",
    "stabilizers": "accuracy_by_stabilizers.png",
}


def write_all(output: str | Path, records: Sequence[dict[str, Any]], results: dict[str, Any]) -> list[str]:
    """Draw every figure that an evaluation's numbers allow, each into a file of its own.

    Args:
        output: Folder of the evaluation; existing pictures of the same name are replaced.
        records: Lines of samples.jsonl.
        results: Content of results.json; its `cells` are drawn.

    Returns:
        Names of the files written, in the order of the README.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If a file cannot be written.
    """
    require_matplotlib("--figures all")
    folder, written = Path(output), []
    for axis in series.AXES:
        if drawn := series.panels(results["cells"], axis):
            draw_panels(drawn, axis, folder / FILES[axis])
            written.append(FILES[axis])
    for reading, by_task in series.readings(records).items():
        maps = {task: series.heat_map(own) for task, own in by_task.items()}
        name = f"heat_map_{reading.name}.png"
        draw_heat_maps(maps, reading.title, folder / name)
        written.append(name)
    return written


def new_figure(width: float, height: float) -> Any:
    """Return a figure of that many inches, without pyplot: no window system is looked for.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    require_matplotlib("a picture")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_panels(panels: Sequence[Panel], axis: str, path: str | Path) -> None:
    """Draw one panel per task and length, one line per method; `full` is a dashed line across.

    Args:
        panels: What `series.panels` returned.
        axis: What is on the x-axis, one of `series.AXES`.
        path: PNG file to write.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    lengths, named = {panel.tokens for panel in panels}, {panel.task for panel in panels}
    even = len(panels) == len(lengths) * len(named) and 1 < len(lengths) <= 4
    columns = len(lengths) if even else min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(4.2 * columns + 1.8, 3.0 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    styles = _styles([line for panel in panels for line in panel.lines])
    legend: dict[str, Any] = {}
    for axes, panel in zip(grid, panels, strict=False):
        axes.set_title(f"{panel.task}, {panel.tokens:,} tokens", fontsize=10, loc="left", color=INK)
        # Backwards: where lines cover each other, the method that was named first stays visible.
        for line in reversed(panel.lines):
            legend.setdefault(line.label, _draw_line(axes, line, *styles[line.label]))
        _x_axis(axes, panel, axis)
        axes.set_ylim(-3, 103)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel("score (0 to 100)")
    labels = [label for label in styles if label in legend]
    figure.legend([legend[label] for label in labels], labels, loc="outside right upper", frameon=False, fontsize=9)
    figure.supxlabel(f"{AXIS_LABELS[axis]}; bands: one standard error", fontsize=10, color=INK)
    save(figure, path)


def style(index: int) -> tuple[str, str]:
    """Return the colour and the marker of the index-th line of a figure; no two of the first 49 are the same."""
    rounds = index // len(COLORS)
    return COLORS[index % len(COLORS)], MARKERS[(index + rounds) % len(MARKERS)]


def _styles(lines: Sequence[Line]) -> dict[str, tuple[str, str]]:
    """Return a colour and a marker per label, the same in every panel."""
    labels = list(dict.fromkeys(line.label for line in lines if not line.everywhere))
    everywhere = {line.label: (INK, "") for line in lines if line.everywhere}
    return everywhere | {label: style(index) for index, label in enumerate(labels)}


def _draw_line(axes: Any, line: Line, color: str, marker: str) -> Any:
    if line.everywhere:
        point = line.points[0]
        axes.axhspan(point.score - point.error, point.score + point.error, color=color, alpha=0.08, linewidth=0)
        return axes.axhline(point.score, color=color, linestyle="--", linewidth=1.4)
    x, y = [point.x for point in line.points], [point.score for point in line.points]
    low, high = [p.score - p.error for p in line.points], [p.score + p.error for p in line.points]
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    return axes.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.8)[0]


def _x_axis(axes: Any, panel: Panel, axis: str) -> None:
    ticks = sorted({point.x for line in panel.lines if not line.everywhere for point in line.points})
    if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
        axes.set_xscale("log", base=2)
    elif axis != "budget_share" and ticks[-1] >= 8 * max(ticks[1], 1):
        axes.set_xscale("symlog", base=2, linthresh=max(ticks[1], 1))
    axes.set_xticks(ticks, [series.label(axis, tick) for tick in ticks])
    axes.minorticks_off()


def draw_heat_maps(maps: dict[str, HeatMap], title: str, path: str | Path) -> None:
    """Draw the mean score by depth and length, one panel per task.

    Args:
        maps: By task.
        title: How the texts were read.
        path: PNG file to write.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    from_lengths = max(len(heat.lengths) for heat in maps.values())
    figure = new_figure((1.5 + max(2.2, 0.8 * from_lengths)) * len(maps) + 1.2, 4.6)
    grid = figure.subplots(1, len(maps), squeeze=False)[0]
    for axes, (task, heat) in zip(grid, maps.items(), strict=True):
        image = _draw_heat_map(axes, heat)
        axes.set_title(task, fontsize=10, loc="left", color=INK)
        axes.set_xlabel("prompt (tokens)")
    grid[0].set_ylabel("depth of the needle (%)")
    figure.colorbar(image, ax=list(grid), label="mean score (0 to 100); grey: not read", fraction=0.05, pad=0.02)
    figure.suptitle(title, fontsize=11, color=INK)
    save(figure, path)


def _draw_heat_map(axes: Any, heat: HeatMap) -> Any:
    values = [[math.nan if score is None else score for score in row] for row in heat.scores]
    edges = [100 * edge for edge in heat.depths]
    axes.set_facecolor("#D0D0D0")
    image = axes.pcolormesh(
        range(len(heat.lengths) + 1), edges, values, cmap="viridis", vmin=0, vmax=100, edgecolors="white", linewidth=0.8
    )
    for row, scores in enumerate(heat.scores):
        for column, score in enumerate(scores):
            if score is not None:
                # Viridis is dark below, bright above.
                color = "white" if score < 60 else "black"
                middle = (edges[row] + edges[row + 1]) / 2
                axes.text(column + 0.5, middle, f"{score:.0f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks([i + 0.5 for i in range(len(heat.lengths))], [f"{tokens:,}" for tokens in heat.lengths])
    axes.tick_params(axis="x", labelrotation=30 if len(heat.lengths) > 4 else 0)
    # The text starts at the top.
    axes.invert_yaxis()
    return image
