"""The roofline: what was computed per second against the machine's limits, at each method's operations per byte.

Reading lies right, where the matrix rate is the limit; generating lies left, where the copy rate is.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from locret.infer.evaluation.figures import COLORS, MARKERS, new_figure
from locret.pictures import INK, save


def points(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one point per method, length and part: operations per byte, and operations per second (p50)."""
    return [
        {
            "method": row["method"],
            "length": row["length"],
            "part": part,
            "intensity": row["flops"][part] / row["bytes"][part],
            "flops_per_second": row[part]["flops_per_second"]["p50"],
        }
        for row in record["results"]
        for part in ("prefill", "decode")
        if row[part] is not None
    ]


def draw(record: Mapping[str, Any], path: str | Path) -> None:
    """Draw the picture of a record.

    Args:
        record: What `record.make_record` returned, with something measured.
        path: PNG file to write; an existing one is replaced.

    Raises:
        ValueError: If matplotlib is not installed.
        OSError: If the file cannot be written.
    """
    found, machine = points(record), record["machine"]
    top, slope = machine["matmul_flops_per_second"]["p50"], machine["copy_bytes_per_second"]["p50"]
    figure = new_figure(8, 5)
    axes = figure.subplots()
    intensities = [point["intensity"] for point in found]
    left, right = min([*intensities, top / slope]) / 2, max([*intensities, top / slope]) * 2
    axes.plot([left, top / slope, right], [left * slope, top, top], color=INK, linewidth=1.5)
    axes.text(right, top * 1.05, f"matrix product {top / 1e9:,.4g} GFLOP/s", ha="right", va="bottom", color=INK)
    axes.text(left * 2, left * slope * 1.8, f"copy {slope / 1e9:,.4g} GB/s", ha="left", va="top", color=INK)
    methods = list(dict.fromkeys(point["method"] for point in found))
    lengths = list(dict.fromkeys(point["length"] for point in found))
    for place, method in enumerate(methods):
        color = COLORS[place % len(COLORS)]
        for point in (point for point in found if point["method"] == method):
            axes.plot(
                point["intensity"],
                point["flops_per_second"],
                linestyle="none",
                color=color,
                marker=MARKERS[lengths.index(point["length"]) % len(MARKERS)],
                fillstyle="full" if point["part"] == "prefill" else "none",
                markersize=8,
            )
        axes.plot([], [], linestyle="none", marker="s", color=color, label=method)
    for place, length in enumerate(lengths):
        axes.plot([], [], linestyle="none", marker=MARKERS[place % len(MARKERS)], color=INK, label=f"{length:,} tokens")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=1.6 * top)  # room for the line's name
    axes.set_xlabel("operations per byte (counted)")
    axes.set_ylabel("operations per second (p50)")
    axes.set_title(f"{record['config']['shape'] or record['config']['model']}: filled reads, hollow generates")
    axes.legend(loc="lower right")
    axes.grid(True, which="major", alpha=0.3)
    save(figure, path)
