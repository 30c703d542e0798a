"""A record as tables for people. What was not measured is "unknown", never estimated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locret.base.tables import UNKNOWN, Columns, Row, number, of_rows

_BASE = "; of base: how many times that of the same method with fewer modifiers"
_MIB = 2**20


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
        f"how many times the time of `floor`{_BASE if any(row['base'] for row in rows) else ''}.",
        "",
        *of_rows({**_SPEED, **(_OF_BASE if any(row["base"] for row in rows) else {})}, rows),
        "",
        "Work done per second, counted from the shape, and its share of what the machine did at best in the same run.",
        "",
        *_machine_lines(record["machine"]),
        "",
        *of_rows(_WORK, rows),
        "",
        "Peak memory in MiB, planned and measured. Workspace is all that is neither weights nor cache.",
        "",
        *of_rows(_MEMORY, rows),
        "",
        *_tiers(rows),
    ]
    if record["growth"]:
        lines += ["How prefill seconds grow with the prompt.", ""]
        lines += [*of_rows(_GROWTH, record["growth"]), ""]
    missing = [
        f"* {row['method']}, {row['length']:,} tokens: {row['error']}." for row in rows if row["error"] is not None
    ]
    return [*lines, *missing, *([""] if missing else [])]


def _tiers(rows: Sequence[Row]) -> list[str]:
    """Return the table of the second tiers; empty without any."""
    own = [row for row in rows if row["planned_bytes"]["host"]]
    if not own:
        return []
    about = "The second tier in host memory, beside that: planned and counted MiB, and what each new token fetches."
    return [about, "", *of_rows(_TIERS, own), ""]


def _ratio(part: str, name: str) -> Callable[[Row], str]:
    """Return what writes a ratio to another method: 1 for itself, nothing where that was not measured."""
    other, write = {"full/this": "full", "this/floor": "floor"}.get(name), number(f"ratios.{part}.{name}.p50", ".2f")

    def shown(row: Row) -> str:
        if row[part] is None:
            return UNKNOWN
        return "1" if row["method"] == other else write(row) if name in row["ratios"][part] else ""

    return shown


def _quantiles(path: str, form: str) -> Callable[[Row], str]:
    points = [number(f"{path}.{point}", form) for point in ("p20", "p50", "p80")]
    return lambda row: UNKNOWN if points[0](row) == UNKNOWN else " / ".join(write(row) for write in points)


_NAMED: Columns = {"method": lambda row: str(row["method"]), "tokens": number("length", ",")}
_SPEED: Columns = {
    **_NAMED,
    "first token s": _quantiles("prefill.seconds", ".3g"),
    "prefill tokens/s": _quantiles("prefill.tokens_per_second", ",.4g"),
    "prefill x `full`": _ratio("prefill", "full/this"),
    "prefill of `floor`": _ratio("prefill", "this/floor"),
    "decode tokens/s": _quantiles("decode.tokens_per_second", ",.4g"),
    "decode x `full`": _ratio("decode", "full/this"),
    "decode of `floor`": _ratio("decode", "this/floor"),
}
_WORK: Columns = {
    **_NAMED,
    "prefill GFLOP/s": number("prefill.flops_per_second.p50", ",.4g", 1e9),
    "of matmul": number("prefill.share_of_matmul.p50", ".0%"),
    "prefill GB/s": number("prefill.bytes_per_second.p50", ",.4g", 1e9),
    "decode GFLOP/s": number("decode.flops_per_second.p50", ",.4g", 1e9),
    "decode GB/s": number("decode.bytes_per_second.p50", ",.4g", 1e9),
    "of copy": number("decode.share_of_copy.p50", ".0%"),
}
_MEMORY: Columns = {
    **_NAMED,
    "weights planned": number("planned_bytes.weights", ",.2f", _MIB),
    "weights": number("peak_bytes.prefill.weights", ",.2f", _MIB),
    "cache planned": number("planned_bytes.cache", ",.2f", _MIB),
    "cache": number("peak_bytes.prefill.cache", ",.2f", _MIB),
    "workspace": number("peak_bytes.prefill.workspace", ",.2f", _MIB),
    "peak of prefill": number("peak_bytes.prefill.total", ",.2f", _MIB),
    "peak of decode": number("peak_bytes.decode.total", ",.2f", _MIB),
}
_OF_BASE: Columns = {f"{part} of base": _ratio(part, "this/base") for part in ("prefill", "decode")}
_TIERS: Columns = {
    **_NAMED,
    "host planned": number("planned_bytes.host", ",.2f", _MIB),
    "host": number("peak_bytes.decode.host", ",.2f", _MIB),
    "moved KiB / new token": number("moved_bytes_per_token", ",.1f", 2**10),
    "decode ms / token": number("decode.seconds_per_token.p50", ",.3g", 1e-3),
}
_GROWTH: Columns = {
    "method": _NAMED["method"],
    "tokens": lambda row: f"{row['from']:,} to {row['to']:,}",
    "x tokens": number("tokens", ".3g"),
    "x seconds": _quantiles("seconds", ".2f"),
}


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
