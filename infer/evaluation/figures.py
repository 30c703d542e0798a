"""Pictures of an evaluation: score against budget, share, stabilizers and chunk size, and where needles were found.

Every mean carries its standard error as a bar. The numbers are those of results.json and samples.jsonl.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from locret.data import tasks
from locret.infer.evaluation.allotment import amount, percent
from locret.pictures import INK, require_matplotlib, save

AXES = {
    "budget": ("budget", "budget (units per KV head)"),
    "budget_share": ("share", "budget (share of the prompt)"),
    "chunk_size": ("chunk", "chunk size (tokens)"),
    "stabilizers": ("stabilizers", "stabilizers (units)"),
}
"""Settings that a figure can have on its x-axis, in a line's label and on the axis; the others tell lines apart."""
# Okabe and Ito's palette without its yellow, which is hard to see as a line on white.
_COLORS, _MARKERS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"), "osDv^<>"
_EVEN_ROWS, _MOST_ROWS = 10, 12
"""Rows of a heat map where depths were drawn, and the most where they were chosen."""
_LETTER = 0.09
"""Inches that a letter of a title takes, more than on average."""

Point = tuple[float, float, float]
"""A value of the x-axis, the mean score there, 0 to 100, and its standard error."""


class Line(NamedTuple):
    """One line of a panel; a method that keeps everything is one point for the whole of it."""

    label: str
    points: list[Point]
    everywhere: bool


def panels(cells: Iterable[dict[str, Any]], axis: str) -> dict[tuple[str, int], list[Line]]:
    """Return the lines of each task and length, of those in which some line has two points.

    A method that was run with several values of another setting gets a line for each; where that setting merely follows
    the one on the x-axis (stabilizers derived from the budget), it stays one line.
    """
    grouped: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in cells:
        grouped.setdefault((cell["task"], cell["tokens"]), []).append(cell)
    made = {place: _lines(group, axis) for place, group in grouped.items()}
    return {place: lines for place, lines in made.items() if any(len(line.points) > 1 for line in lines)}


def _lines(cells: list[dict[str, Any]], axis: str) -> list[Line]:
    lines: list[Line] = []
    for method in dict.fromkeys(cell["method"] for cell in cells):
        own = [cell for cell in cells if cell["method"] == method]
        if all(_whole(cell) for cell in own):
            lines.append(Line(method, [_point(own[0], 0)], True))
            continue
        own = [cell for cell in own if cell.get(axis) is not None]  # a share has no budget in units
        apart = _telling_apart(own, axis)
        splits: dict[tuple[Any, ...], list[Point]] = {}
        for cell in own:
            splits.setdefault(tuple(cell.get(name) for name in apart), []).append(_point(cell, cell[axis]))
        for values, points in splits.items():
            words = [f"{AXES[name][0]} {_said(name, value)}" for name, value in zip(apart, values, strict=True)]
            lines.append(Line(", ".join([method, *words]), sorted(points), False))
    return lines


def _whole(found: dict[str, Any]) -> bool:
    return found.get("budget") is None and found.get("budget_share") is None


def _telling_apart(cells: list[dict[str, Any]], axis: str) -> list[str]:
    """Return the other settings that differ among cells with the same x; without them a line would fold back.

    Budgets are never joined by a line over another setting, not even where that setting follows the budget.
    """
    apart = []
    for name in AXES:
        seen: dict[Any, set[Any]] = {}
        for cell in cells:
            seen.setdefault(cell[axis], set()).add(cell.get(name))
        several = name.startswith("budget") and len({cell.get(name) for cell in cells}) > 1
        if name != axis and (any(len(values) > 1 for values in seen.values()) or several):
            apart.append(name)
    return apart


def _said(axis: str, value: float | None) -> str:
    return "unset" if value is None else percent(value) if axis == "budget_share" else f"{value:,}"


def _point(cell: dict[str, Any], x: float) -> Point:
    return x, float(cell["score"]), float(cell.get("standard_error") or 0)


class HeatMap(NamedTuple):
    """Mean scores by depth and length: `scores[row][column]`, 0 to 100, None where nothing was read."""

    depths: list[float]
    """Edges of the rows, from the start of the text (0) to its end (1)."""
    lengths: list[int]
    scores: list[list[float | None]]


def heat_map(records: Sequence[dict[str, Any]]) -> HeatMap:
    """Return the mean scores of samples of one task, read one way, by the depth of their needle and their length.

    Depths that were chosen (at most twelve different ones) get a row each; drawn ones fall into ten even rows.
    """
    depths = sorted({float(record["depth"]) for record in records})
    edges = [0.0, *((left + right) / 2 for left, right in zip(depths, depths[1:], strict=False)), 1.0]
    if len(depths) > _MOST_ROWS:
        edges = [row / _EVEN_ROWS for row in range(_EVEN_ROWS + 1)]
    lengths = sorted({int(record["tokens"]) for record in records})
    boxes: list[list[list[float]]] = [[[] for _ in lengths] for _ in edges[1:]]
    for record in records:
        row = sum(float(record["depth"]) >= edge for edge in edges[1:-1])
        boxes[row][lengths.index(int(record["tokens"]))].append(100 * float(record["score"]))
    return HeatMap(edges, lengths, [[math.fsum(box) / len(box) if box else None for box in row] for row in boxes])


class Reading(NamedTuple):
    """One way of reading: what a heat map is of."""

    method: str
    amount: str
    """The budget for people, with other settings where a method and budget were run with several."""
    whole: bool = False
    """Whether all units are kept."""


def readings(records: Iterable[dict[str, Any]]) -> dict[Reading, dict[str, list[dict[str, Any]]]]:
    """Group the samples of tasks with a single needle by the way they were read, then by task."""
    known = {name: tasks.get(name) for name in tasks.names(None)}
    found = [r for r in records if r.get("depth") is not None and r["task"] in known and known[r["task"]].single_needle]
    settings: dict[tuple[str, str], set[tuple[Any, Any]]] = {}
    for record in found:
        settings.setdefault((record["method"], amount(record)), set()).add(_reading_chunks(record))
    grouped: dict[Reading, dict[str, list[dict[str, Any]]]] = {}
    for record in found:
        whole = _whole(record)
        words = ["all units" if whole else f"budget {amount(record)}"]
        if not whole and len(settings[record["method"], amount(record)]) > 1:
            words += [
                f"{word} {value}" for word, value in zip(("chunk", "stabilizers"), _reading_chunks(record), strict=True)
            ]
        reading = Reading(record["method"], ", ".join(words), whole)
        grouped.setdefault(reading, {}).setdefault(record["task"], []).append(record)
    return grouped


def _reading_chunks(record: dict[str, Any]) -> tuple[Any, Any]:
    return record.get("chunk_size"), record.get("stabilizers")


def write_all(output: str | Path, records: Sequence[dict[str, Any]], cells: Sequence[dict[str, Any]]) -> list[str]:
    """Draw every figure that an evaluation's numbers allow, each into a file of its own, and return the files' names.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If a file cannot be written.
    """
    require_matplotlib("--figures all")
    drawn: dict[str, Any] = {}
    for axis in AXES:
        if found := panels(cells, axis):
            drawn[f"accuracy_by_{axis}.png"] = draw_panels(found, axis)
    own = readings(records)
    for task in dict.fromkeys(task for by_task in own.values() for task in by_task):
        maps = {reading: heat_map(by_task[task]) for reading, by_task in own.items() if task in by_task}
        drawn[f"heat_map_{task.replace('/', '_')}.png"] = draw_heat_maps(maps, task)
    for name, figure in drawn.items():
        save(figure, Path(output) / name)
    return list(drawn)


def _new_figure(width: float, height: float) -> Any:
    """Return a figure of that many inches, without pyplot: no window system is looked for."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_panels(found: dict[tuple[str, int], list[Line]], axis: str) -> Any:
    """Return a figure with a panel per task and length, a line per method; `full` is a dashed line across."""
    columns = min(3, len(found))
    rows = math.ceil(len(found) / columns)
    figure = _new_figure(4.2 * columns + 1.8, 3.0 * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    labels = list(dict.fromkeys(line.label for lines in found.values() for line in lines if not line.everywhere))
    legend: dict[str, Any] = {}
    for axes, ((task, tokens), lines) in zip(grid, found.items(), strict=False):
        axes.set_title(f"{task}, {tokens:,} tokens", fontsize=10, loc="left", color=INK)
        for line in lines:
            x, scores, errors = zip(*line.points, strict=True)
            if line.everywhere:
                low, high = scores[0] - errors[0], scores[0] + errors[0]
                axes.axhspan(low, high, color=INK, alpha=0.08, linewidth=0)
                legend[line.label] = axes.axhline(scores[0], color=INK, linestyle="--", linewidth=1.2)
                continue
            place = labels.index(line.label)
            color, marker = _COLORS[place % len(_COLORS)], _MARKERS[(place + place // len(_COLORS)) % len(_MARKERS)]
            axes.vlines(x, *_ends(scores, errors), color=color, alpha=0.55, linewidth=1.2)
            legend[line.label] = axes.plot(x, scores, color=color, marker=marker, markersize=4.5, linewidth=1.4)[0]
        ticks = sorted({x for line in lines if not line.everywhere for x, _, _ in line.points})
        if ticks[0] > 0 and ticks[-1] >= 4 * ticks[0]:
            axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [_said(axis, tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(-5, 105)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[len(found) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel("score (0 to 100)")
    figure.legend(legend.values(), legend, loc="outside right upper", frameon=False, fontsize=9)
    figure.supxlabel(f"{AXES[axis][1]}\nbars: one standard error", fontsize=10, color=INK)
    return figure


def _ends(scores: Sequence[float], errors: Sequence[float]) -> tuple[list[float], list[float]]:
    pairs = list(zip(scores, errors, strict=True))
    return [score - error for score, error in pairs], [score + error for score, error in pairs]


def draw_heat_maps(maps: dict[Reading, HeatMap], title: str) -> Any:
    """Return a figure with the mean score by depth and length as one grid: a row per method, a column per budget."""
    methods = list(dict.fromkeys(reading.method for reading in maps))
    bounded = [reading.amount for reading in maps if not reading.whole]
    columns = list(dict.fromkeys(bounded or [reading.amount for reading in maps]))
    wide = max(1.9, 0.52 * max(len(heat.lengths) for heat in maps.values()))
    # A title that is wider than its map would be written over the next one, or narrow all of them.
    titles = {one: textwrap.wrap(f"{one.method}, {one.amount}", int(wide / _LETTER)) for one in maps}
    high = 2.1 + 0.15 * (max(map(len, titles.values())) - 1)
    figure = _new_figure(wide * len(columns) + 2.0, high * len(methods) + 1.1)
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
    label = "mean score (0 to 100); grey: not read"
    figure.colorbar(image, ax=list(grid.flatten()), label=label, fraction=0.05, pad=0.02)
    figure.supxlabel("prompt (tokens)", fontsize=10, color=INK)
    figure.supylabel("depth of the needle (%)", fontsize=10, color=INK)
    figure.suptitle(title, fontsize=11, color=INK)
    return figure


def _draw_heat_map(axes: Any, heat: HeatMap) -> Any:
    values = [[math.nan if score is None else score for score in row] for row in heat.scores]
    edges = [100 * edge for edge in heat.depths]
    axes.set_facecolor("#D0D0D0")
    look = {"cmap": "viridis", "vmin": 0, "vmax": 100, "edgecolors": "white", "linewidth": 0.8}
    image = axes.pcolormesh(range(len(heat.lengths) + 1), edges, values, **look)
    for row, scores in enumerate(heat.scores):
        for column, score in enumerate(scores):
            if score is not None:
                # Viridis is dark below, bright above.
                color, middle = "white" if score < 60 else "black", (edges[row] + edges[row + 1]) / 2
                axes.text(column + 0.5, middle, f"{score:.0f}", ha="center", va="center", fontsize=7, color=color)
    axes.set_xticks([i + 0.5 for i in range(len(heat.lengths))], [f"{tokens:,}" for tokens in heat.lengths])
    axes.tick_params(axis="x", labelrotation=90 if len(heat.lengths) > 3 else 0, labelsize=8)
    axes.set_ylim(100, 0)  # the text starts at the top
    return image
