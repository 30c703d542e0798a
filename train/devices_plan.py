"""Which ways of loading a backbone fit on given cards: `locret-train --dry-run --model MODEL --devices 8x80GB`.

Every number comes from the memory plan: weights are counted on the meta device, module by module, and what a row works
with is what the plan of one process says, for its share of the row or of the heads.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from locret.backbone.adapters import describe
from locret.distributed.tensor_parallel import part_of
from locret.heads.gates import LOCRET
from locret.policy.budget import parse_bytes
from locret.tables import markdown
from locret.train.memory_plan import gibibytes, memory_plan, sketch
from locret.weights.shares import WeightCount

USABLE = 0.95
"""Share of a card that is planned with: the rest is for the device's own context, and what the allocator rounds up."""
_MOST_DEVICES = 2**20


@dataclass(frozen=True)
class Devices:
    """Cards of one machine that are alike."""

    count: int
    each: int
    """Bytes of one."""
    text: str
    """As the user wrote them."""

    @classmethod
    def parse(cls, text: str) -> Devices:
        """Read `8x80GB`, `2x80GiB` or `24GB`.

        Raises:
            ValueError: For anything else.
        """
        # A number without a unit is no card of so many bytes, but most likely how many cards there are.
        found = re.fullmatch(r"\s*(?:(\d{1,9})\s*[x*])?\s*(\d[^x]*[a-z]\s*)", text, re.IGNORECASE)
        try:
            if found is None:
                raise ValueError
            count, each = int(found[1] or 1), parse_bytes(found[2])
        except ValueError:
            raise ValueError(f"--devices {text} is not a number of cards and what each holds; use 8x80GB") from None
        if not 1 <= count <= _MOST_DEVICES:
            raise ValueError(f"--devices {text} is not from 1 to {_MOST_DEVICES:,} cards; use such as 8x80GB")
        return cls(count, each, text.strip())


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """What is trained on, as far as memory depends on it; see `memory_plan`."""

    config: Any
    hidden_dim: int
    neighbours: int = 0
    gate: str = LOCRET
    dtype: torch.dtype
    autocast: bool
    tokens: int
    trained_tokens: int
    kept_features: bool = False
    asked_apart: bool = False
    weighed_labels: bool = False

    def parts(self, head_ranks: int = 1, row_ranks: int = 1) -> dict[str, int]:
        """Return the bytes that one process needs besides the backbone, by purpose."""
        numbers = {name: value for name, value in vars(self).items() if name != "config"}
        plan = memory_plan(self.config, 0, **numbers, head_ranks=head_ranks, row_ranks=row_ranks)
        return {name: count for name, count in plan.items() if name not in ("backbone", "total")}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way of loading the backbone, and what it takes."""

    name: str
    flags: str
    """What `locret-train` is given for it."""
    processes: int = 1
    parts: dict[str, int] = field(default_factory=dict)
    """Bytes of one card, by purpose."""
    host: int = 0
    """Bytes of the machine's own memory."""
    why: str = ""
    """What speaks for it where it is taken."""
    obstacle: str | None = None
    """Why it cannot be done with these cards and this backbone."""

    @property
    def total(self) -> int:
        """Bytes of one card."""
        return sum(self.parts.values())

    def shortage(self, devices: Devices, host: int | None) -> str | None:
        """Return what it lacks; None if it fits.

        Args:
            devices: The cards.
            host: Bytes of the machine's own memory; None if unknown.
        """
        if self.obstacle is not None:
            return self.obstacle
        if self.total > USABLE * devices.each:
            return f"more than {USABLE:.0%} of {gibibytes(devices.each)}"
        if host is not None and self.host > host:
            return f"more than {gibibytes(host)} of host memory"
        return None

    def command(self, model: str) -> str:
        """Return how it is started for a backbone."""
        program = "locret-train"
        if self.processes > 1:
            program = f"torchrun --standalone --nproc-per-node {self.processes} -m locret.train.command"
        return " ".join([program, "--model", shlex.quote(model), *([self.flags] if self.flags else [])])


def choices(row: PlannedRow, devices: Devices) -> list[Choice]:
    """Return the ways of loading a backbone, in the order in which they are preferred where they fit.

    Raises:
        ValueError: For a backbone that retaining heads cannot work on.
    """
    weights, count = WeightCount(sketch(row.config), row.dtype), devices.count
    whole = Choice(
        name="data parallel" if count > 1 else "whole",
        flags="",
        processes=count,
        parts={"backbone": weights.total, **row.parts()},
        why="each card holds the whole backbone and nothing is exchanged but the heads' gradients",
    )
    return [
        whole,
        *_sharded(row, weights, count),
        *_quantised_choices(row, weights, count),
        *_from_host(row, weights, devices),
    ]


def _sharded(row: PlannedRow, weights: WeightCount, count: int) -> Iterator[Choice]:
    """Yield the choices that need several cards."""
    if count == 1:
        return
    shard = {"backbone": weights.shard(count), "gathered": weights.gathered()}
    ranks = sequence_ranks(row.config, count)
    obstacle, over, size = None, f"Ulysses over {ranks}", f"--sp-size {ranks}"
    if describe(row.config).recurrent:
        obstacle, over, size = "layers carry a state from token to token", "Ulysses", "--sp-size"
    elif ranks == 1:
        obstacle = f"no number of ranks up to {count} divides {count} cards and the KV heads"
        over, size = "Ulysses", "--sp-size"
    split = {} if obstacle else row.parts(row_ranks=ranks)
    yield Choice(
        name=over,
        flags=size,
        processes=count,
        parts={} if obstacle else {"backbone": weights.total, **split},
        obstacle=obstacle,
        why="each card holds the whole backbone, and a share of the row",
    )
    yield Choice(
        name=f"FSDP or ZeRO-3 over {count}",
        flags="--shard fsdp",
        processes=count,
        parts={**shard, **row.parts()},
        why="each card holds a share of the backbone and gathers a layer while it runs, with the same results",
    )
    yield Choice(
        name=f"FSDP and {over}",
        flags=f"--shard fsdp {size}",
        processes=count,
        parts={} if obstacle else {**shard, **split},
        obstacle=obstacle,
        why="each card holds a share of the backbone and of the row",
    )
    yield _tensor_parallel(row, weights, count)


def _tensor_parallel(row: PlannedRow, weights: WeightCount, count: int) -> Choice:
    shape = describe(row.config).shape(describe(row.config).layers[0])
    own = weights.split(count)
    obstacle: str | None = None
    parts: dict[str, int] = {}
    if own is None:
        obstacle = "transformers has no plan for this backbone"
    elif shape.num_kv_heads % count:
        obstacle = f"{count} cards do not divide {shape.num_kv_heads} KV heads"
    else:
        try:
            shared = part_of(row.config, count) != describe(row.config)  # else a process has all heads, as in Phi-3
            parts = {"backbone": own, **row.parts(head_ranks=count if shared else 1)}
        except ValueError as error:
            obstacle = str(error)
    return Choice(
        name=f"tensor parallel over {count}",
        flags="--shard tp",
        processes=count,
        parts=parts,
        obstacle=obstacle,
        why="each card holds a share of the backbone, its heads and theirs, and all work on the same row",
    )


def _quantised_choices(row: PlannedRow, weights: WeightCount, count: int) -> Iterator[Choice]:
    for bits, name in ((8, "8-bit (LLM.int8)"), (4, "4-bit (NF4)")):
        held, unpacked = weights.quantised(bits)
        yield Choice(
            name=f"{name} on each card" if count > 1 else name,
            flags=f"--load-in-{bits}bit",
            processes=count,
            parts={"backbone": held, **({"gathered": unpacked} if bits == 4 else {}), **row.parts()},
            why="it is the most exact that fits on the cards themselves; the heads learn from the quantised backbone",
        )


def _from_host(row: PlannedRow, weights: WeightCount, devices: Devices) -> Iterator[Choice]:
    """Yield the choices whose weights are in the machine's own memory."""
    count, beside = devices.count, row.parts()
    if count > 1:
        yield Choice(
            name=f"FSDP over {count}, weights in host memory",
            flags="--shard fsdp --shard-offload cpu",
            processes=count,
            parts={"gathered": weights.gathered(), **beside},
            host=count * weights.shard(count),
            why="each card gathers a layer from host memory while it runs, with the same results",
        )
    moved = max(weights.largest_layer, *map(weights.of, (weights.embedding, weights.output)))
    room = max(moved, USABLE * devices.each - sum(beside.values()))  # what is left over holds layers that stay
    limits = f"{{0: {room / 2**30:.1f}GiB, cpu: {-(-weights.total // 2**30)}GiB}}"
    yield Choice(
        name="one card, layers in host memory",
        flags=f"--device-map auto --max-memory {shlex.quote(limits)}",
        parts={"gathered": moved, **beside},
        host=weights.total,
        why="the card need hold no more than a layer at a time, which comes from host memory for every row",
    )


def sequence_ranks(config: Any, devices: int) -> int:
    """Return the most cards of these that can share a row: their number divides that of the cards, and the KV heads."""
    backbone = describe(config)
    return math.gcd(devices, *(backbone.shape(layer).num_kv_heads for layer in backbone.layers))


def taken(options: Sequence[Choice], devices: Devices, host: int | None) -> Choice | None:
    """Return the first that fits."""
    return next((choice for choice in options if choice.shortage(devices, host) is None), None)


def record(options: Sequence[Choice], devices: Devices, host: int | None, model: str) -> dict[str, Any]:
    """Return the comparison as plain data."""
    best = taken(options, devices, host)
    return {
        "devices": {"count": devices.count, "bytes": devices.each, "usable_share": USABLE, "host_bytes": host},
        "choices": [
            {
                "name": choice.name,
                "flags": choice.flags,
                "processes": choice.processes,
                "bytes_per_card": {**choice.parts, "total": choice.total} if choice.parts else None,
                "host_bytes": choice.host,
                "fits": choice.shortage(devices, host) is None,
                "shortage": choice.shortage(devices, host),
            }
            for choice in options
        ],
        "takes": best and best.name,
        "why": _reason(options, devices, host),
        "command": best and best.command(model),
    }


def _reason(options: Sequence[Choice], devices: Devices, host: int | None) -> str:
    best = taken(options, devices, host)
    if best is None:
        least = min((choice for choice in options if choice.parts), key=lambda choice: choice.total)
        return (
            f"none fits: {least.name} takes least, {gibibytes(least.total)} of a card and {gibibytes(least.host)} of "
            "the host's memory; lower --hidden-dim or --max-prompt-tokens, or take larger cards"
        )
    before = list(options)[: list(options).index(best)]
    lacking = [f"{choice.name}: {choice.shortage(devices, host)}" for choice in before]
    needs = f", if the host has {gibibytes(best.host)}" if best.host and host is None else ""
    return best.why + needs + (f" ({'; '.join(lacking)})" if lacking else "")


def table(options: Sequence[Choice], devices: Devices, host: int | None) -> list[str]:
    """Return the comparison for people, one line for each choice, in GiB."""
    names = list(dict.fromkeys(name for choice in options for name in choice.parts))
    rows = []
    for choice in options:
        cells = [_gib(choice.parts[name]) if name in choice.parts else "" for name in names]
        total = _gib(choice.total) if choice.parts else ""
        shortage = choice.shortage(devices, host)
        fits = "fits, if the host has as much" if choice.host and host is None else "fits"
        rows.append([choice.name, *cells, total, _gib(choice.host) if choice.host else "", shortage or fits])
    titles = ["GiB per card", *(name.replace("_", " ") for name in names), "total", "host memory", ""]
    return markdown(titles, rows)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.2f}"
