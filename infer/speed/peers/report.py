"""A comparison as a Markdown table: ours and others' in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locret.infer.speed.peers.tasks import BASELINE, OURS
from locret.tables import Columns, Row, number, of_rows

_MIB = 2**20


def _total(row: Row) -> str:
    seconds = row["seconds"].get("total")
    return f"{seconds['p50']:.2f} ({seconds['p20']:.2f} to {seconds['p80']:.2f})" if seconds else "failed"


_COLUMNS: Columns = {
    "side": lambda row: str(row["side"]),
    "method": lambda row: str(row["method"]),
    "prompt": number("tokens", ","),
    "held units": number("held", ","),
    "first token s": number("seconds.first_token.p50", ".2f"),
    "later token ms": number("seconds.later.p50", ".1f", 1e-3),
    "end to end s (p20 to p80)": _total,
    "seconds over ours": number("ratios.total.p50", ".2f"),
    "allocated MiB": number("peak_bytes.allocated", ",.1f", _MIB),
    "allocated over ours": number("ratios.allocated", ".2f"),
    "process MiB": number("peak_bytes.process", ",.1f", _MIB),
}


def lines(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of a page's section: what was measured, the table, versions, and what failed."""
    job, rows = record["job"], record["rows"]
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
        *of_rows(_COLUMNS, rows),
        "",
        *(failed and [*failed, ""]),
        *_version_lines(record["versions"]),
        "",
    ]


def _version_lines(versions: Mapping[str, Mapping[str, str]]) -> list[str]:
    result = []
    for side, packages in versions.items():
        words = ", ".join(f"{name} {number}" for name, number in packages.items())
        result.append(f"* {side}: {words}")
    torches = {packages["torch"] for packages in versions.values()}
    if len(torches) > 1:
        result.append(f"* The sides run different versions of torch ({', '.join(sorted(torches))}).")
    return result
