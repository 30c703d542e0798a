"""Pictures of an evaluation: score against budget, stabilizers and chunk size, and the needle heat map.

Every mean carries its standard error as a bar. Lines that coincide run side by side, a few points apart, and markers
of one value of the x-axis stand next to each other. The numbers are those of `series`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from locret.infer.evaluation import series
from locret.infer.evaluation.series import HeatMap, Line, Panel, Reading
from locret.pictures import INK, require_matplotlib, save

# Okabe and Ito's palette without its yellow, which is hard to see as a line on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osDv^<>"
_MARKER_STEP, _LINE_STEP = 3.0, 2.4
"""Points between neighbouring markers, and between lines that would hide each other."""
_LETTER = 0.09
"""Inches that a letter of a title takes, more than on average."""
_CLOSE = 0.75
"""Scores that a picture cannot tell apart."""
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
    readings = series.readings(records)
    for task in dict.fromkeys(task for by_task in readings.values() for task in by_task):
        maps = {reading: series.heat_map(own[task]) for reading, own in readings.items() if task in own}
        name = f"heat_map_{task.replace('/', '_')}.png"
        draw_heat_maps(maps, task, folder / name)
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
        shifts = side_by_side(panel.lines)
        # Backwards: where lines cross each other, the method that was named first is on top.
        for line, shift in reversed([*zip(panel.lines, shifts, strict=True)]):
            legend.setdefault(line.label, _draw_line(axes, line, *styles[line.label], shift))
        _x_axis(axes, panel, axis)
        axes.set_ylim(-5, 105)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel("score (0 to 100)")
    labels = [label for label in styles if label in legend]
    figure.legend([legend[label] for label in labels], labels, loc="outside right upper", frameon=False, fontsize=9)
    note = "bars: one standard error; lines that coincide run side by side"
    figure.supxlabel(f"{AXIS_LABELS[axis]}\n{note}", fontsize=10, color=INK)
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


def side_by_side(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """Return by how many points each line is moved to the right and up, so that none hides another.

    To the right all lines differ, which sets their markers side by side; up, those that share a stretch of their way.
    """
    groups = [{index} for index in range(len(lines))]
    for first, one in enumerate(lines):
        for second in range(first):
            if _share_a_stretch(one, lines[second]) and groups[first] is not groups[second]:
                groups[first] |= groups[second]
                for index in groups[first]:
                    groups[index] = groups[first]
    curves = [index for index, line in enumerate(lines) if not line.everywhere]
    shifts = []
    for index, line in enumerate(lines):
        right = 0.0 if line.everywhere else _MARKER_STEP * (curves.index(index) - (len(curves) - 1) / 2)
        together = sorted(groups[index])
        # What was named first is above.
        shifts.append((right, _LINE_STEP * ((len(together) - 1) / 2 - together.index(index))))
    return shifts


def _share_a_stretch(one: Line, other: Line) -> bool:
    """Return whether two lines are at the same scores at two neighbouring values of the x-axis."""
    if one.everywhere and other.everywhere:
        return abs(one.points[0].score - other.points[0].score) < _CLOSE
    axis = sorted({point.x for line in (one, other) if not line.everywhere for point in line.points})
    apart = [abs(_score_at(one, x) - _score_at(other, x)) < _CLOSE for x in axis]
    return any(left and right for left, right in pairwise(apart)) or apart == [True]


def _score_at(line: Line, x: float) -> float:
    """Return a line's score at a value of the x-axis; nan where it has none."""
    if line.everywhere:
        return line.points[0].score
    return next((point.score for point in line.points if point.x == x), math.nan)


def _draw_line(axes: Any, line: Line, color: str, marker: str, shift: tuple[float, float]) -> Any:
    from matplotlib.transforms import offset_copy

    def moved(base: Any) -> Any:
        return offset_copy(base, axes.figure, x=shift[0], y=shift[1], units="points")

    if line.everywhere:
        point, across = line.points[0], moved(axes.get_yaxis_transform())
        axes.axhspan(point.score - point.error, point.score + point.error, color=color, alpha=0.08, linewidth=0)
        return axes.plot([0, 1], [point.score] * 2, color=color, linestyle="--", linewidth=1.2, transform=across)[0]
    x, y = [point.x for point in line.points], [point.score for point in line.points]
    low, high = [p.score - p.error for p in line.points], [p.score + p.error for p in line.points]
    place = moved(axes.transData)
    axes.vlines(x, low, high, color=color, alpha=0.55, linewidth=1.2, transform=place)
    return axes.plot(x, y, color=color, marker=marker, markersize=4.5, linewidth=1.4, transform=place)[0]


def _x_axis(axes: Any, panel: Panel, axis: str) -> None:
    ticks = sorted({point.x for line in panel.lines if not line.everywhere for point in line.points})
    if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
        axes.set_xscale("log", base=2)
    elif axis != "budget_share" and ticks[-1] >= 8 * max(ticks[1], 1):
        axes.set_xscale("symlog", base=2, linthresh=max(ticks[1], 1))
    axes.set_xticks(ticks, [series.label(axis, tick) for tick in ticks])
    axes.minorticks_off()
    # What is moved by points says nothing of the limits that it needs.
    if axes.get_xscale() == "log":
        axes.set_xlim(ticks[0] / 1.25, ticks[-1] * 1.25)
    else:
        margin = 0.06 * (ticks[-1] - ticks[0])
        axes.set_xlim(ticks[0] - margin, ticks[-1] * (1.25 if axes.get_xscale() == "symlog" else 1) + margin)


def draw_heat_maps(maps: dict[Reading, HeatMap], title: str, path: str | Path) -> None:
    """Draw the mean score by depth and length as one grid: a row per method, a column per budget.

    Args:
        maps: By the way of reading.
        title: The task.
        path: PNG file to write.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    methods = list(dict.fromkeys(reading.method for reading in maps))
    bounded = [reading.amount for reading in maps if not reading.whole]
    columns = list(dict.fromkeys(bounded or [reading.amount for reading in maps]))
    lengths = max(len(heat.lengths) for heat in maps.values())
    wide = max(1.9, 0.52 * lengths)
    # A title that is wider than its map would be written over the next one, or narrow all of them.
    titles = {reading: textwrap.wrap(reading.title, int(wide / _LETTER)) for reading in maps}
    high = 2.1 + 0.15 * (max(map(len, titles.values())) - 1)
    figure = new_figure(wide * len(columns) + 2.0, high * len(methods) + 1.1)
    grid = figure.subplots(len(methods), len(columns), squeeze=False, sharex=True, sharey=True)
    for axes in grid.flatten():
        axes.set_visible(False)
    # The plain cache has no budget: its map stands alone in its row.
    spots = {r: (methods.index(r.method), 0 if r.whole else columns.index(r.amount)) for r in maps}
    image = None
    for reading, (row, column) in spots.items():
        axes = grid[row, column]
        axes.set_visible(True)
        image = _draw_heat_map(axes, maps[reading])
        axes.set_title("\n".join(titles[reading]), fontsize=9, loc="left", color=INK)
        below, left = ((row + 1, column) in spots.values(), (row, column - 1) in spots.values())
        axes.tick_params(labelbottom=not below, labelleft=not left)
    figure.colorbar(
        image, ax=list(grid.flatten()), label="mean score (0 to 100); grey: not read", fraction=0.05, pad=0.02
    )
    figure.supxlabel("prompt (tokens)", fontsize=10, color=INK)
    figure.supylabel("depth of the needle (%)", fontsize=10, color=INK)
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
                axes.text(column + 0.5, middle, f"{score:.0f}", ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks([i + 0.5 for i in range(len(heat.lengths))], [f"{tokens:,}" for tokens in heat.lengths])
    axes.tick_params(axis="x", labelrotation=90 if len(heat.lengths) > 3 else 0, labelsize=8)
    # The text starts at the top.
    axes.set_ylim(100, 0)
    return image
