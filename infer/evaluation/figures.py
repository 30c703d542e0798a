"""Pictures of an evaluation: score against budget or share, and where needles were found.

Every mean carries its standard error as a bar. The numbers are those of results.json and samples.jsonl.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from locret.infer.evaluation.records import amount, percent
from locret.pictures import INK, require_matplotlib, save

AXES = {
    "budget": "budget (units per KV head)",
    "budget_share": "budget (share of the prompt)",
}
"""What a figure can have on its x-axis."""
_APART = ("chunk_size", "stabilizers")
"""Settings that tell lines apart where a budget was run with several of them; what follows the budget does not."""
# Okabe and Ito's palette without its yellow, which is hard to see as a line on white.
_COLORS, _MARKERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"), "osDv^<>"
_ROWS = 10
"""Even rows of a heat map."""

Line = list[tuple[float, float, float]]
"""Values of the x-axis, the mean score there, 0 to 100, and its standard error; a single one for the whole axis is of a
method that keeps everything."""


def lines(cells: Iterable[dict[str, Any]], axis: str) -> dict[tuple[str, int], dict[str, Line]]:
    """Return the lines of each task and length by what they are called, of those in which some line has two points."""
    found: dict[tuple[str, int], dict[str, Line]] = {}
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["task"], cell["tokens"], cell["method"]), []).append(cell)
    for (task, tokens, method), own in groups.items():
        panel, budgets = found.setdefault((task, tokens), {}), {cell.get(axis) for cell in own}
        apart = [n for n in _APART if len({(cell.get(axis), cell.get(n)) for cell in own}) > len(budgets)]
        for cell in own:
            x = math.nan if amount(cell) == "all" else cell.get(axis)
            if x is not None:
                said = [f"{name.replace('_', ' ')} {cell[name]:,}" for name in apart if cell[name] is not None]
                point = float(x), float(cell["score"]), float(cell["standard_error"] or 0)
                panel.setdefault(", ".join([method, *said]), []).append(point)
    return {place: panel for place, panel in found.items() if any(len(line) > 1 for line in panel.values())}


def said_of(axis: str, value: float) -> str:
    """Return a value of an axis for people."""
    return percent(value) if axis == "budget_share" else f"{value:,}"


def heat_map(records: Sequence[dict[str, Any]]) -> tuple[list[int], list[list[float | None]]]:
    """Return the lengths, and by even shares of the text from its start on a row of mean scores, 0 to 100, of each."""
    lengths = sorted({int(record["tokens"]) for record in records})
    boxes: list[list[list[float]]] = [[[] for _ in lengths] for _ in range(_ROWS)]
    for record in records:
        row = min(int(record["depth"] * _ROWS), _ROWS - 1)
        boxes[row][lengths.index(int(record["tokens"]))].append(100 * float(record["score"]))
    return lengths, [[statistics.fmean(box) if box else None for box in row] for row in boxes]


def write_all(output: str | Path, records: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> list[str]:
    """Draw every figure that the numbers allow, each into a file of its own, and return the files' names."""
    require_matplotlib("--figures all")
    drawn = {f"accuracy_by_{axis}.png": _draw_lines(found, axis) for axis in AXES if (found := lines(cells, axis))}
    needles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        if record.get("depth") is not None:
            reading = f"{record['method']}, {amount(record)}"
            needles.setdefault(record["task"], {}).setdefault(reading, []).append(record)
    for task, readings in needles.items():
        drawn[f"heat_map_{task.replace('/', '_')}.png"] = _draw_heat_maps(readings, task)
    for name, figure in drawn.items():
        save(figure, Path(output) / name)
    return list(drawn)


def _grid(count: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """Return a figure, and as many axes of it, without pyplot: no window system is looked for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns + 1.8, height * rows + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flatten())
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def _draw_lines(found: dict[tuple[str, int], dict[str, Line]], axis: str) -> Any:
    """Return a figure with a panel per task and length, a line per method; `full` is a dashed line across."""
    figure, grid = _grid(len(found), 4.2, 3.0)
    labels = list(dict.fromkeys(label for panel in found.values() for label in panel))
    legend: dict[str, Any] = {}
    for axes, ((task, tokens), panel) in zip(grid, found.items(), strict=True):
        axes.set_title(f"{task}, {tokens:,} tokens", fontsize=10, loc="left", color=INK)
        for label, line in panel.items():
            x, scores, errors = zip(*sorted(line), strict=True)
            if math.isnan(x[0]):
                axes.axhspan(scores[0] - errors[0], scores[0] + errors[0], color=INK, alpha=0.08, linewidth=0)
                legend[label] = axes.axhline(scores[0], color=INK, linestyle="--", linewidth=1.2)
                continue
            place = labels.index(label)
            color, marker = _COLORS[place % len(_COLORS)], _MARKERS[(place + place // len(_COLORS)) % len(_MARKERS)]
            legend[label] = axes.errorbar(x, scores, errors, color=color, marker=marker, markersize=4.5, linewidth=1.4)
        ticks = sorted({x for line in panel.values() for x, _, _ in line if not math.isnan(x)})
        if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [said_of(axis, tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(-5, 105)
        axes.grid(alpha=0.25, linewidth=0.6)
    figure.legend(legend.values(), legend, loc="outside right upper", frameon=False, fontsize=9)
    figure.supxlabel(f"{AXES[axis]}\nbars: one standard error", fontsize=10, color=INK)
    figure.supylabel("score (0 to 100)", fontsize=10, color=INK)
    return figure


def _draw_heat_maps(readings: dict[str, list[dict[str, Any]]], task: str) -> Any:
    """Return a figure with the mean score by depth and length for each method and budget."""
    figure, grid = _grid(len(readings), 3.2, 2.6)
    image = None
    for axes, (reading, records) in zip(grid, readings.items(), strict=True):
        lengths, scores = heat_map(records)
        values = [[math.nan if score is None else score for score in row] for row in scores]
        axes.set_facecolor("#D0D0D0")
        edges = [100 * row / _ROWS for row in range(_ROWS + 1)]
        image = axes.pcolormesh(range(len(lengths) + 1), edges, values, cmap="viridis", vmin=0, vmax=100)
        axes.set_title(reading, fontsize=9, loc="left", color=INK, wrap=True)
        axes.set_xticks([place + 0.5 for place in range(len(lengths))], [f"{tokens:,}" for tokens in lengths])
        axes.set_ylim(100, 0)  # the text starts at the top
    figure.colorbar(image, ax=grid, label="mean score (0 to 100); grey: not read", fraction=0.05, pad=0.02)
    figure.supxlabel("prompt (tokens)", fontsize=10, color=INK)
    figure.supylabel("depth of the needle (%)", fontsize=10, color=INK)
    figure.suptitle(task, fontsize=11, color=INK)
    return figure
