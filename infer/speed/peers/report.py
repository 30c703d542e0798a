"""A comparison as a Markdown table: ours and others' in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locret.infer.speed.peers.tasks import BASELINE, OURS
from locret.tables import markdown

_HEADS = (
    "side",
    "method",
    "prompt",
    "held units",
    "first token s",
    "later token ms",
    "end to end s (p20 to p80)",
    "over ours",
    "allocated MiB",
    "over ours",
    "process MiB",
)


def lines(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of a page's section: what was measured, the table, versions, and what failed."""
    job, rows = record["job"], record["rows"]
    table = markdown(_HEADS, map(_cells, rows))
    failed = [
        f"* {row['side']} {row['method']}, {row['tokens']:,} tokens: {row['error']}" for row in rows if row["error"]
    ]
    return [
        f"Greedy answers of {job['new_tokens']} tokens; nothing is compiled. What forgets keeps {job['budget']:,} "
        f"units, the last {job['local_len']} prompt tokens and what it generates. Ratios are to our retaining heads, "
        f"{OURS} {BASELINE}, in the median of {len(rows[0]['rounds'])} rounds; above 1, the row is slower, or larger. "
        "Bytes are peaks beyond the weights and all else that a process held before it read: what torch allocated, and "
        "what the process took from the system.",
        "",
        *table,
        "",
        *(failed and [*failed, ""]),
        *_version_lines(record["versions"]),
        "",
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    seconds, ratios, peaks = row["seconds"], row["ratios"], row["peak_bytes"]
    total = seconds.get("total")
    return [
        row["side"],
        row["method"],
        f"{row['tokens']:,}",
        "unknown" if row["held"] is None else f"{row['held']:,}",
        f"{seconds['first_token']['p50']:.2f}" if total else "unknown",
        f"{seconds['later']['p50'] * 1000:.1f}" if "later" in seconds else "unknown",
        f"{total['p50']:.2f} ({total['p20']:.2f} to {total['p80']:.2f})" if total else "failed",
        f"{ratios['total']['p50']:.2f}" if "total" in ratios else "unknown",
        _mib(peaks["allocated"]),
        f"{ratios['allocated']:.2f}" if "allocated" in ratios else "unknown",
        _mib(peaks["process"]),
    ]


def _mib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**20:,.1f}"


def _version_lines(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    result = []
    for side, packages in versions.items():
        words = ", ".join(f"{name} {number}" for name, number in packages.items())
        result.append(f"* {side}: {words}")
    torches = {packages["torch"] for packages in versions.values()}
    if len(torches) > 1:
        result.append(f"* The sides run different versions of torch ({', '.join(sorted(torches))}).")
    return result
