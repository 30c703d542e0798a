"""The pictures of the world's page: score against bytes, and a map of methods and tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from locret.infer.evaluation.figures import new_figure
from locret.infer.evaluation.methods import knows_answers
from locret.infer.evaluation.presses import PREFIX
from locret.infer.evaluation.protocols import AGNOSTIC, AWARE
from locret.infer.evaluation.summary import size
from locret.infer.evaluation.tiers import Held, frontier
from locret.infer.evaluation.world import record as records
from locret.infer.methods import FULL
from locret.pictures import INK, save

FRONTIER, MAP, CAPACITY = "world_frontier.png", "world_map_{}.png", "world_capacity.png"
_OURS, _THEIRS, _YARDSTICK, _STEPS = "#0072B2", "#D55E00", "#7F7F7F", "#BBBBBB"
PARTS = {
    AGNOSTIC: ("field", "presses", "best_presses"),
    AWARE: ("field_aware", "presses_aware", "best_presses_aware"),
}
"""The parts that the table and a map show: one budget, all methods; of a method that is in several, the last."""
_APART, _BEST_APART = (3.5, 3.5), (0.5, 1.5)
"""Octaves of bytes or points of the scale by which a point must be apart from those named so far to be named as well,
and the same for one that is not beaten."""


def write(record: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what a record allows, and return the names of the files.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If a file cannot be written.
    """
    names = []
    if points := of_bytes(record):
        draw_frontier(points, folder / FRONTIER)
        names.append(FRONTIER)
    if record.get("capacity"):
        from locret.infer.evaluation.capacity_figure import draw

        draw(record["capacity"], folder / CAPACITY)
        names.append(CAPACITY)
    for protocol, parts in PARTS.items():
        rows = records.last_rows(record, parts)
        if rows:
            draw_map(rows, protocol, folder / MAP.format(protocol))
            names.append(MAP.format(protocol))
    return names


def of_bytes(record: Mapping[str, Any]) -> dict[str, list[Held]]:
    """Return, for the bytes that are kept and those of the peak, what each method and budget holds and scores.

    Scores are means over the table's tasks, agnostic, on the questions that all were asked; empty where none was.
    """
    found = []
    for (method, budget), one in records.means(record, [records.FRONTIER]).items():
        amount = "all" if budget is None else f"{budget:,}"
        found.append(
            [
                Held(method, amount, held, 0, 0.0, one["score"], one["error"])
                for held in (one["kept"], one["peak_bytes"] + one["host_bytes"])
            ]
        )
    columns = zip(*found, strict=True)
    return {what: list(own) for what, own in zip(("bytes kept", "peak bytes"), columns, strict=False)}


def best_of(points: Sequence[Held]) -> list[Held]:
    """Return the methods that no other one beats, from few bytes to many; an oracle is none that could be run."""
    return frontier([one for one in points if not knows_answers(one.method)], "total")


def draw_frontier(points: Mapping[str, Sequence[Held]], path: Path) -> None:
    """Draw score against bytes, a line per method over its budgets; the best ones are named.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    figure = new_figure(13, 6)
    for axes, (what, own) in zip(
        figure.subplots(1, len(points), squeeze=False, sharey=True)[0], points.items(), strict=True
    ):
        _draw_points(axes, own)
        axes.set_xlabel(f"{what}, in all tiers")
    figure.axes[0].set_ylabel("mean score of the table's tasks (0 to 100)")
    figure.suptitle(
        "blue: ours; orange: kvpress; grey: what bounds them; bars: one standard error; wide line: not beaten",
        fontsize=9,
        color=INK,
    )
    save(figure, path)


def _draw_points(axes: Any, points: Sequence[Held]) -> None:
    for method in dict.fromkeys(one.method for one in points):
        own = sorted((one for one in points if one.method == method), key=lambda one: one.total)
        yardstick = method == FULL or knows_answers(method)
        color = _YARDSTICK if yardstick else _THEIRS if method.startswith(PREFIX) else _OURS
        x, y = [one.total for one in own], [one.score for one in own]
        low, high = ([one.score + sign * (one.error or 0.0) for one in own] for sign in (-1, 1))
        axes.vlines(x, low, high, color=color, alpha=0.3, linewidth=1)
        axes.plot(x, y, color=color, marker="s" if yardstick else "o", markersize=4.5, linewidth=1, alpha=0.8)
    best = best_of(points)
    x, y = [one.total for one in best], [one.score for one in best]
    axes.step(x, y, where="post", color=_STEPS, linewidth=4, zorder=0)
    for one in named(points):
        # To the left what is not beaten, to the right the others.
        side, offset = ("right", (-3, 5)) if one in best else ("left", (6, 2))
        label, place = f"{one.method} {one.amount}", (one.total, one.score)
        axes.annotate(label, place, xytext=offset, textcoords="offset points", ha=side, fontsize=7, color=INK)
    axes.set_xscale("log", base=2)
    least, most = min(one.total for one in points), max(one.total for one in points)
    ticks = [tick for tick in (2**power for power in range(10, 50)) if least / 2 < tick < 2 * most]
    axes.set_xticks(ticks, [size(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(left=least / (most / least) ** 0.35)  # room for names
    axes.set_ylim(-3, 105)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def named(points: Sequence[Held]) -> list[Held]:
    """Return the points that have room for a name: first those that no other method beats, then others from the top."""
    best = best_of(points)
    rest = sorted((one for one in points if one not in best), key=lambda one: -one.score)
    found: list[Held] = []
    for one in (*best, *rest):
        octaves, score = _BEST_APART if one in best else _APART
        if all(
            abs(math.log2(one.total / other.total)) > octaves or abs(one.score - other.score) > score for other in found
        ):
            found.append(one)
    return found


def draw_map(rows: Sequence[Mapping[str, Any]], protocol: str, path: Path) -> None:
    """Draw the score of every method on every task as a map, the best method first.

    Names of methods that were asked fewer texts than others are grey, with how many of a task.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    tasks = list(dict.fromkeys((row["task"], row["tokens"]) for row in rows))
    cells = {(row["method"], row["task"], row["tokens"]): row["score"] for row in rows}
    methods = list(dict.fromkeys(row["method"] for row in rows))
    means = {name: _mean([cells[(name, *task)] for task in tasks if (name, *task) in cells]) for name in methods}
    order = sorted(methods, key=lambda name: -means[name])
    values = [[cells.get((name, *task), math.nan) for task in tasks] for name in order]
    figure = new_figure(0.34 * len(tasks) + 3.6, 0.2 * len(order) + 2.2)
    axes = figure.subplots()
    axes.set_facecolor("#D0D0D0")
    image = axes.imshow(values, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0, vmax=100)
    several = len({tokens for _, tokens in tasks}) > 1
    labels = [f"{name} @ {tokens:,}" if several else name for name, tokens in tasks]
    axes.set_xticks(range(len(tasks)), labels, rotation=60, ha="right", fontsize=7)
    texts = {name: max(row["texts"] for row in rows if row["method"] == name) for name in methods}
    most = max(texts.values())
    few = {name: f" ({texts[name]} of {most} texts)" for name in order if texts[name] < most}
    labels = [f"{name}{few.get(name, '')}  {means[name]:.0f}" for name in order]
    axes.set_yticks(range(len(order)), labels, fontsize=7)
    for name, label in zip(order, axes.get_yticklabels(), strict=True):
        label.set_color(_YARDSTICK if name in few else INK)
    axes.tick_params(length=0)
    figure.colorbar(image, ax=axes, label="score (0 to 100)", fraction=0.03, pad=0.015)
    budget = next((f"budget {row['budget']:,}" for row in rows if row["budget"] is not None), "nothing evicted")
    also = "; grey names: fewer texts" if few else ""
    axes.set_title(f"{protocol}, {budget}; behind each name its mean{also}", fontsize=9, loc="left", color=INK)
    save(figure, path)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
