"""A record as tables for people. What was not measured is "unknown", never estimated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from locret.infer.speed.peers import lines as peer_lines
from locret.tables import markdown

UNKNOWN = "unknown"
COMPILED = (
    "Compiled rows write by one program per token, which was made before the rounds; `full` and `floor` run as "
    "written, so the decode ratios of compiled rows hold what compiling gains as well as what forgetting does."
)
_MIB = 2**20
Row = Mapping[str, Any]


def page(record: Mapping[str, Any], command: str) -> str:
    """Return a record as a Markdown page: what was measured, tables, and how to repeat it."""
    config = record["config"]
    lines = [
        f"# How fast {config['shape'] or config['model']} reads and writes",
        "",
        *_setting(record),
        "",
        *tables(record),
        *_origin(record, command),
    ]
    return "\n".join(lines) + "\n"


def numbers(config: Row) -> str:
    """Return the numbers of a resolved config in one sentence."""
    policy = config["policy"]
    chosen = "" if config["chunk_choice"] is None else " (auto)"
    return (
        f"Budget {policy['budget']:,}, chunks of {policy['chunk_size']:,}{chosen}, {policy['stabilizers']:,} "
        f"stabilizers, {policy['local_len']:,} local tokens; {config['new_tokens']} new tokens; {config['repeats']} "
        "rounds."
    )


def tables(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of all tables, each with a line that says how to read it."""
    rows = record["results"]
    lines = [
        "Speed, p20 / p50 / p80. Ratios are medians of ratios within a round: how many times faster than `full`, and "
        "how many times the time of `floor`.",
        "",
        *markdown(_SPEED, [_speed(row) for row in rows]),
        "",
        *([COMPILED, ""] if record["config"]["compile"] else []),
        "Work done per second, counted from the shape, and its share of what the machine did at best in the same run.",
        "",
        *_machine_lines(record["machine"]),
        "",
        *markdown(_WORK, [_work(row) for row in rows]),
        "",
        "Peak memory in MiB, planned and measured. Workspace is all that is neither weights nor cache; process is what "
        "was taken from the system or the device, free blocks included.",
        "",
        *markdown(_MEMORY, [_memory(row) for row in rows]),
        "",
    ]
    if record["growth"]:
        lines += ["How prefill seconds grow with the prompt.", ""]
        lines += [*markdown(_GROWTH, [_growth(row) for row in record["growth"]]), ""]
    if record.get("peers") is not None:
        lines += [*peer_lines(record["peers"])]
    missing = [
        f"* {row['method']}, {row['length']:,} tokens: {row['error']}." for row in rows if row["error"] is not None
    ]
    return [*lines, *missing, *([""] if missing else [])]


_SPEED = (
    "method",
    "tokens",
    "first token s",
    "prefill tokens/s",
    "x `full`",
    "of `floor`",
    "decode tokens/s",
    "x `full`",
    "of `floor`",
)
_WORK = ("method", "tokens", "prefill GFLOP/s", "of matmul", "prefill GB/s", "decode GFLOP/s", "decode GB/s", "of copy")
_MEMORY = (
    "method",
    "tokens",
    "weights planned",
    "weights",
    "cache planned",
    "cache",
    "workspace",
    "peak of prefill",
    "peak of decode",
    "process",
)
_GROWTH = ("method", "tokens", "x tokens", "x seconds p20", "p50", "p80")


def _speed(row: Row) -> list[str]:
    name = row["method"] + (", compiled" if row["compiled"] else "")
    cells = [name, f"{row['length']:,}", _three(row["prefill"], "seconds", ".3g")]
    for part in ("prefill", "decode"):
        ratios = row["ratios"][part]
        cells.append(_three(row[part], "tokens_per_second", ",.4g"))
        own = {"full": "full/this", "floor": "this/floor"}
        for other, name in own.items():
            known = UNKNOWN if row[part] is None else ""
            cells.append("1" if row["method"] == other and row[part] else _middle(ratios, name, ".2f") or known)
    return cells


def _work(row: Row) -> list[str]:
    prefill, decode = row["prefill"], row["decode"]
    return [
        row["method"],
        f"{row['length']:,}",
        _scaled(prefill, "flops_per_second", 1e9),
        _percent(prefill, "share_of_matmul"),
        _scaled(prefill, "bytes_per_second", 1e9),
        _scaled(decode, "flops_per_second", 1e9),
        _scaled(decode, "bytes_per_second", 1e9),
        _percent(decode, "share_of_copy"),
    ]


def _memory(row: Row) -> list[str]:
    planned, peaks = row["planned_bytes"], row["peak_bytes"]
    prefill = None if peaks is None else peaks["prefill"]
    measured = [prefill and prefill[name] for name in ("weights", "cache", "workspace", "total")]
    weights, cache, workspace, total = (_mib(value) for value in measured)
    decode, process = _mib(peaks and peaks["decode"]["total"]), _mib(peaks and peaks["process"])
    named = [row["method"], f"{row['length']:,}"]
    expected = _mib(planned["weights"]), _mib(planned["cache"])
    return [*named, expected[0], weights, expected[1], cache, workspace, total, decode, process]


def _growth(row: Row) -> list[str]:
    seconds = row["seconds"] or {}
    grown = [f"{seconds[name]:.2f}" if seconds else UNKNOWN for name in ("p20", "p50", "p80")]
    return [row["method"], f"{row['from']:,} to {row['to']:,}", f"{row['tokens']:.3g}", *grown]


def _machine_lines(machine: Row) -> list[str]:
    rates = machine["matmul_flops_per_second"], machine["copy_bytes_per_second"]
    if None in rates:
        return ["Matrix product: unknown. Copy: unknown."]
    product, copy = (
        [f"{rate['p50'] / 1e9:,.4g}", f"({rate['p20'] / 1e9:,.4g} to {rate['p80'] / 1e9:,.4g})"] for rate in rates
    )
    return [
        f"Matrix product of {machine['matmul_size']:,} rows and columns: {product[0]} GFLOP/s {product[1]}. "
        f"Copy of {machine['copied'] / _MIB:,.0f} MiB, read and written: {copy[0]} GB/s {copy[1]}."
    ]


def _setting(record: Mapping[str, Any]) -> list[str]:
    config, machine = record["config"], record["machine"]
    place = machine["name"] or "no CUDA device, so nothing was measured"
    threads = f", {config['threads']} CPU threads" if machine["device"] == "cpu" else ""
    cap = f", {config['memory_cap']:,} bytes of device memory" if config["memory_cap"] else ""
    return [f"{place}{threads}{cap}, {config['dtype']}. {numbers(config)}"]


def _origin(record: Mapping[str, Any], command: str) -> list[str]:
    found = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return [f"`{command}`", "", f"{found[:1].upper()}{found[1:]}."]


def _three(speed: Row | None, name: str, form: str) -> str:
    return UNKNOWN if speed is None else " / ".join(format(speed[name][key], form) for key in ("p20", "p50", "p80"))


def _middle(values: Row, name: str, form: str) -> str:
    return format(values[name]["p50"], form) if name in values else ""


def _scaled(speed: Row | None, name: str, unit: float) -> str:
    return UNKNOWN if speed is None else f"{speed[name]['p50'] / unit:,.4g}"


def _percent(speed: Row | None, name: str) -> str:
    return UNKNOWN if speed is None else f"{100 * speed[name]['p50']:.0f} %"


def _mib(count: int | None) -> str:
    return UNKNOWN if count is None else f"{count / _MIB:,.2f}"
