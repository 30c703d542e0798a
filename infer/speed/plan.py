"""What a benchmark is about to measure, resolved to the last number: all methods read the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from locret.base.method_spec import parse
from locret.base.tables import Columns, number, of_rows
from locret.infer.chunk_size import ChunkChoice
from locret.infer.speed.cost import Cost, Pass, Sizes, cost, sizes_of
from locret.infer.speed.methods import BenchMethod
from locret.loading.options import BackboneSource
from locret.loading.plan import plan_weights
from locret.policy.policy import RetentionPolicy


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes known before anything is allocated."""

    weights: int
    """The backbone's, and those of retaining heads where a method has them."""
    cache: int
    """The cache at its largest, from the first chunk to the last generated token."""
    host: int
    """The second tier at its largest."""


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Every setting of a benchmark."""

    shape: str | None
    """Name in `shapes.SHAPES`; None for weights from a folder or the Hub."""
    model: str | None
    """That folder or Hub id."""
    config: Any = field(repr=False)
    """The backbone's, of transformers."""
    methods: tuple[BenchMethod, ...]
    lengths: tuple[int, ...]
    """Prompt tokens, N."""
    policy: RetentionPolicy
    chunk_choice: ChunkChoice | None
    """Why its chunk size, where that was left to the machine."""
    hidden_dim: int
    """d_R of the heads."""
    heads: str | None
    """Trained heads, a folder or a Hub id."""
    new_tokens: int
    """Tokens generated after every prompt."""
    repeats: int
    threads: int
    dtype: torch.dtype
    device: torch.device | None
    """None: a GPU is asked for that is not here, so nothing is measured."""
    seed: int
    """Of random weights, fresh heads and prompts."""
    memory_cap: int | None
    """Bytes of device memory that the process may take."""
    source: BackboneSource | None
    """How the weights of `model` are loaded."""

    @property
    def dtype_name(self) -> str:
        """The dtype as users type it."""
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def sizes(self) -> Sizes:
        """The backbone's weights, counted."""
        return sizes_of(self.config, self.dtype)

    @cached_property
    def weight_bytes(self) -> int:
        """The bytes of the backbone's weights on the device."""
        if self.source is None or not self.source.given():
            return self.sizes.weight_bytes
        device = self.device or torch.device("cuda")
        return plan_weights(self.source, self.config, device, self.dtype).on(device)

    def planned_bytes(self, method: BenchMethod, length: int) -> PlannedBytes:
        """Return what a method will hold."""
        weights = self.weight_bytes + method.extra_weight_bytes(self.config, self.hidden_dim, self.heads)
        cache = method.planned_cache_bytes(self.sizes, self.policy, length, self.new_tokens)
        host = method.planned_host_bytes(self.sizes, self.policy, length, self.new_tokens)
        return PlannedBytes(weights, cache, host)

    def base(self, method: BenchMethod) -> str | None:
        """Return the measured method that has the most of a method's modifiers, but not all; None if there is none."""
        spec, names = parse(method.name), {one.name for one in self.methods}
        fewer = (str(replace(spec, modifiers=spec.modifiers[:most])) for most in reversed(range(len(spec.modifiers))))
        return next((name for name in fewer if name in names), None)

    def cost(self, method: BenchMethod, length: int) -> dict[str, Cost]:
        """Return the least work of reading a prompt, and of generating after it."""
        passes = method.reading(self.sizes, self.policy, length)
        most = method.recalled(self.policy)
        # Of what was evicted no more can be recalled than there is.
        first = [u + min(most, length - u) for u in method.units_after(self.sizes, self.policy, length)]
        writing = [Pass(1, tuple(units + step for units in first), length + step, 1) for step in range(self.new_tokens)]
        return {"prefill": cost(self.sizes, passes), "decode": cost(self.sizes, writing)}

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data."""
        return {
            "shape": self.shape,
            "model": self.model,
            **(self.source.given() if self.source else {}),
            "methods": [method.name for method in self.methods],
            "lengths": list(self.lengths),
            "policy": self.policy.to_dict(),
            "chunk_choice": None if self.chunk_choice is None else self.chunk_choice.to_dict(),
            "hidden_dim": self.hidden_dim,
            "heads": self.heads,
            "new_tokens": self.new_tokens,
            "repeats": self.repeats,
            "threads": self.threads,
            "dtype": self.dtype_name,
            "device": None if self.device is None else str(self.device),
            "seed": self.seed,
            "memory_cap": self.memory_cap,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per method and length: planned bytes and counted work."""
        return [self.row(method, length) for length in self.lengths for method in self.methods]

    def row(self, method: BenchMethod, length: int) -> dict[str, Any]:
        """Return what is known of one method and length."""
        planned, work = self.planned_bytes(method, length), self.cost(method, length)
        return {
            "method": method.name,
            "length": length,
            "base": self.base(method),
            "planned_bytes": {"weights": planned.weights, "cache": planned.cache, "host": planned.host},
            "flops": {part: work[part].flops for part in work},
            "bytes": {part: work[part].bytes for part in work},
        }


_COLUMNS: Columns = {
    "method": lambda row: str(row["method"]),
    "tokens": number("length", ","),
    "planned weights MiB": number("planned_bytes.weights", ",.1f", 2**20),
    "planned cache MiB": number("planned_bytes.cache", ",.2f", 2**20),
    "planned host MiB": number("planned_bytes.host", ",.2f", 2**20),
    "prefill TFLOP": number("flops.prefill", ",.3f", 1e12),
    "decode GB": number("bytes.decode", ",.3f", 1e9),
}


def plan_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return rows of a plan as a Markdown table."""
    return of_rows(_COLUMNS, rows)
