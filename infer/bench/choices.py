"""What was tried beside what is used, in the same rounds: ratios, and the page that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from locret.environment import versions
from locret.infer.bench.record import device_name
from locret.infer.bench.side_by_side import interleave, quantiles, ratio, table


def measure_choices(sides: Mapping[str, Callable[[], object]], used: Mapping[str, str], options: Any) -> dict[str, Any]:
    """Return the ratios of what was tried to what is used, seconds, and where they were taken.

    Args:
        sides: What to time; "a" is used, and "a, b" was tried in its place.
        used: How each "a" does it, in words.
        options: A dataclass with `repeats`, `threads` and the sizes.
    """
    torch.set_num_threads(options.threads)
    seconds = interleave(sides, options.repeats)
    tried = {name: name.partition(",")[0] for name in sides if "," in name}
    return {
        "ratios": {f"{name} / {used[base]}": ratio(seconds, name, base) for name, base in tried.items()},
        "seconds": {name: quantiles(values) for name, values in seconds.items()},
        "options": asdict(options),
        "versions": versions(),
        "device": device_name(torch.device("cpu")),
    }


def choices_page(record: Mapping[str, Any], title: str, module: str) -> str:
    """Return the record as a page for people."""
    options = record["options"]
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items() if name != "output")
    made = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    end = [f"`python -m {module} {flags}`", "", f"{made}, {record['device']}.", ""]
    return "\n".join([f"# {title}", "", *table(record["ratios"]), "", *end])
