"""The picture of score against bytes: above those of the fast tier, below those of all tiers; a column per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locret.infer.evaluation.figures import new_figure, style
from locret.infer.evaluation.summary import size
from locret.infer.evaluation.tiers import MEAN, Held, by_task, frontier
from locret.pictures import INK, save

_TITLES = {"fast": "bytes in the fast tier", "total": "bytes in all tiers"}
_MOST_PANELS = 5


def write(output: Path, cells: Sequence[dict[str, Any]]) -> list[str]:
    """Draw a picture for every length, and return the names of the files.

    Args:
        output: Folder of the evaluation.
        cells: The cells of results.json.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If a file cannot be written.
    """
    names = []
    for tokens in dict.fromkeys(cell["tokens"] for cell in cells):
        name = f"score_by_bytes_{tokens}.png"
        draw(by_task(cells, tokens), tokens, output / name)
        names.append(name)
    return names


def draw(found: Mapping[str, Sequence[Held]], tokens: int, path: str | Path) -> None:
    """Draw what `by_task` returned: a line per method over its budgets, and the frontier as steps.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    tasks = sorted(found, key=lambda task: task != MEAN)[:_MOST_PANELS]
    figure = new_figure(3.6 * len(tasks) + 3.2, 6.6)
    grid = figure.subplots(len(_TITLES), len(tasks), squeeze=False, sharey=True, sharex="row")
    methods = list(dict.fromkeys(one.method for task in tasks for one in found[task]))
    styles = {method: style(index) for index, method in enumerate(methods)}
    legend: dict[str, Any] = {}
    for row, tier in zip(grid, _TITLES, strict=True):
        for axes, task in zip(row, tasks, strict=True):
            for method in reversed(methods):
                own = sorted((one for one in found[task] if one.method == method), key=lambda one: getattr(one, tier))
                if own:
                    legend.setdefault(method, _line(axes, own, tier, *styles[method]))
            legend.setdefault("frontier", _frontier(axes, found[task], tier))
            axes.set_title(f"{'mean of all tasks' if task == MEAN else task}", fontsize=10, loc="left", color=INK)
            axes.set_ylim(-5, 105)
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlabel(_TITLES[tier], fontsize=9)
        _byte_axis(row, [getattr(one, tier) for task in tasks for one in found[task]])
        row[0].set_ylabel("score (0 to 100)")
    labels = ["frontier", *methods]
    figure.legend([legend[label] for label in labels], labels, loc="outside right upper", frameon=False, fontsize=8)
    note = f"{tokens:,} tokens; bars: one standard error; rings: no other method beats it"
    figure.supxlabel(note, fontsize=10, color=INK)
    save(figure, path)


def _line(axes: Any, own: Sequence[Held], tier: str, color: str, marker: str) -> Any:
    x, y = [getattr(one, tier) for one in own], [one.score for one in own]
    errors = [one.error or 0.0 for one in own]
    low, high = ([score + sign * error for score, error in zip(y, errors, strict=True)] for sign in (-1, 1))
    axes.vlines(x, low, high, color=color, alpha=0.45, linewidth=1.1)
    return axes.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.2)[0]


def _frontier(axes: Any, found: Sequence[Held], tier: str) -> Any:
    best = frontier(found, tier)
    x, y = [getattr(one, tier) for one in best], [one.score for one in best]
    axes.plot(x, y, "o", markersize=11, markerfacecolor="none", markeredgecolor="#999999", linewidth=0, zorder=0)
    return axes.step(x, y, where="post", color="#BBBBBB", linewidth=3, zorder=0)[0]


def _byte_axis(row: Sequence[Any], sizes: Sequence[int]) -> None:
    """Set powers of four as ticks, which people read as KiB and MiB."""
    low, high = min(sizes), max(sizes)
    ticks = [tick for tick in (4**power for power in range(2, 25)) if low / 4 < tick < 4 * high]
    for axes in row:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.3, high * 1.3)
        inside = [tick for tick in ticks if low / 1.3 <= tick <= high * 1.3] or [low]
        axes.set_xticks(inside, [size(tick) for tick in inside], fontsize=8)
        axes.minorticks_off()
