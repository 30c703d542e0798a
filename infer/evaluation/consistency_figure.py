"""The picture of top-10 % consistency (Locret, Figure 1), and its numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from locret.files import write_text
from locret.infer.evaluation.consistency import CURVES, Consistency
from locret.infer.evaluation.figures import new_figure, style
from locret.pictures import INK, save

_TITLES = {
    "itself": "prefix against whole text, within the prefix",
    "everywhere": "prefix against whole text, over the whole text",
    "oracle": "prefix against the labels of the true answer",
    "eviction": "bounded read against unbounded read",
}


def write_consistency(output: str | Path, result: Consistency) -> list[str]:
    """Write consistency.png and consistency.json.

    Args:
        output: Folder that exists.
        result: What was measured.

    Returns:
        Names of the files written.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If a file cannot be written.
    """
    folder = Path(output)
    draw_consistency(result, folder / "consistency.png")
    write_text(folder / "consistency.json", json.dumps(asdict(result), indent=2) + "\n")
    return ["consistency.png", "consistency.json"]


def draw_consistency(result: Consistency, path: str | Path) -> None:
    """Draw a panel per curve and a line per method, with a band of one standard error over texts.

    Args:
        result: What was measured.
        path: PNG file to write; an existing one is replaced.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    figure = new_figure(11.5, 6.6)
    grid = figure.subplots(2, 2, sharex=True, sharey=True)
    legend: dict[str, Any] = {}
    for axes, curve in zip(grid.flatten(), CURVES, strict=True):
        # Backwards: where lines cover each other, the method that was named first stays visible.
        for index, name in reversed(list(enumerate(result.means))):
            line = _draw_line(axes, result, name, curve, *style(index))
            if line is not None:
                legend.setdefault(name, line)
        # Two choices of the same share at random agree on that share of themselves.
        legend["chance"] = axes.axhline(100 * result.share, color="#7F7F7F", linestyle=":", linewidth=1.2)
        axes.set_title(_TITLES[curve], fontsize=10, loc="left", color=INK)
        axes.set_ylim(-3, 103)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    labels = [label for label in (*result.means, "chance") if label in legend]
    figure.legend([legend[label] for label in labels], labels, loc="outside right upper", frameon=False, fontsize=9)
    figure.supxlabel("length of the prefix (tokens); bands: one standard error over texts", fontsize=10, color=INK)
    figure.supylabel(f"units of the top {result.share:.0%} in common (%)", fontsize=10, color=INK)
    number = "1 text" if result.texts == 1 else f"{result.texts} texts"
    figure.suptitle(f"Top-{result.share:.0%} consistency, {number}", fontsize=11, color=INK)
    save(figure, path)


def _draw_line(axes: Any, result: Consistency, name: str, curve: str, color: str, marker: str) -> Any:
    """Draw one method's curve and return its line; None where it is not defined."""
    points = [
        (n, 100 * mean, 100 * error)
        for n, mean, error in zip(result.prefixes, result.means[name][curve], result.errors[name][curve], strict=True)
        if mean is not None and error is not None
    ]
    if not points:
        return None
    x, y = [n for n, _, _ in points], [mean for _, mean, _ in points]
    low, high = [mean - error for _, mean, error in points], [mean + error for _, mean, error in points]
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    return axes.plot(x, y, color=color, marker=marker, markersize=4.5, linewidth=1.6)[0]
