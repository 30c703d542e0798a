"""What was tried beside what is used, in the same rounds: ratios, and the page that keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from locret.environment import versions
from locret.heads.head import RetainingHead
from locret.infer.speed.record import device_name
from locret.infer.speed.side_by_side import interleave, quantiles, ratio, table


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """A layer's attention and its retaining head, and how often they are measured."""

    heads: int = 8
    """Query heads."""
    kv_heads: int = 2
    """KV heads."""
    head_dim: int = 64
    """Dimensions of a head."""
    hidden_dim: int = 64
    """Width between a retaining head's two layers, d_R."""
    repeats: int = 10
    """Rounds in which everything is measured once."""
    threads: int = 1
    """CPU threads."""
    output: str | None = None
    """Write the record to this path, once as .json and once as .md."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} is too small; give 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads} is no multiple of --kv-heads {self.kv_heads}; groups must be equal")

    def fresh_head(self) -> RetainingHead:
        """Return a retaining head of the layer with random weights."""
        return RetainingHead((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden_dim, self.kv_heads)


def measure_choices(
    sides: Mapping[str, Callable[[], object]], used: Mapping[str, str], options: LayerOptions
) -> dict[str, Any]:
    """Return the ratios of what was tried to what is used, seconds, and where they were taken.

    Args:
        sides: What to time; "a" is used, and "a, b" was tried in its place.
        used: How each "a" does it, in words.
        options: The sizes, how often, and with how many threads.
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
