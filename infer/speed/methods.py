"""The ways of reading a prompt that are measured, and what each plans: its forward passes and its cache.

They are the methods of `locret.infer.methods`, and `floor`, which reads the same chunks as a bounded cache does but
neither scores nor evicts. `full` is fed with chunks here, as all others are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from locret import RetainingHeads, scorers
from locret.base import method_spec
from locret.cache.limits import Limits, planned_bytes, planned_host_bytes
from locret.infer.methods import FULL, Method, find
from locret.infer.methods import names as shared_names
from locret.infer.speed.cost import Pass, Sizes
from locret.policy.policy import RetentionPolicy
from locret.policy.schedule import Schedule
from locret.scorers import RetainingHeadScorer, Scorer

FLOOR = "floor"


class BenchMethod(ABC):
    """A way of reading a prompt, before any backbone is there."""

    name: str

    @abstractmethod
    def reading(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> list[Pass]:
        """Return the forward passes of a prompt."""

    @abstractmethod
    def units_after(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> tuple[int, ...]:
        """Return the units per KV head that the first generating pass finds in each full-attention layer."""

    @abstractmethod
    def planned_cache_bytes(self, sizes: Sizes, policy: RetentionPolicy, length: int, new_tokens: int) -> int:
        """Return the bytes of the cache at its largest."""

    def planned_host_bytes(self, sizes: Sizes, policy: RetentionPolicy, length: int, new_tokens: int) -> int:
        """Return the bytes of the second tier at its largest."""
        return 0

    def recalled(self, policy: RetentionPolicy) -> int:
        """Return the most units of the second tier that a generating pass attends to, per KV head."""
        return 0

    def extra_weight_bytes(self, config: Any, hidden_dim: int, heads: str | None) -> int:
        """Return the bytes of weights that are not the backbone's."""
        return 0


@dataclass(frozen=True)
class Full(BenchMethod):
    """transformers' own cache, fed chunk by chunk: every unit stays."""

    name: str = FULL

    def reading(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> list[Pass]:
        layers, size = len(sizes.backbone.layers), policy.chunk_size
        starts = range(0, length, size)
        last = starts[-1]
        return [Pass(min(size, length - start), (start,) * layers, start, int(start == last)) for start in starts]

    def units_after(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> tuple[int, ...]:
        return (length,) * len(sizes.backbone.layers)

    def planned_cache_bytes(self, sizes: Sizes, policy: RetentionPolicy, length: int, new_tokens: int) -> int:
        backbone, units = sizes.backbone, length + new_tokens
        short = min(units, (backbone.window or 1) - 1)
        held = (
            (units if index in backbone.layers else short, backbone.shape(index))
            for index, kind in enumerate(backbone.kinds)
            if kind not in ("recurrent", "none")
        )
        units_held = sum(count * shape.num_kv_heads * shape.unit_dim for count, shape in held)
        return sizes.element_size * units_held + backbone.state_bytes(sizes.element_size) // 2


@dataclass(frozen=True)
class Floor(BenchMethod):
    """The least that bounded reading costs: the same chunks against a static cache, without scores and eviction."""

    name: str = FLOOR

    def reading(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> list[Pass]:
        _check_uniform(sizes)
        return _passes(Limits(policy, scorers.get("random"), sizes.backbone.num_layers).plan(length))

    def units_after(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> tuple[int, ...]:
        return (min(length, policy.budget + policy.local_len),) * sizes.backbone.num_layers

    def planned_cache_bytes(self, sizes: Sizes, policy: RetentionPolicy, length: int, new_tokens: int) -> int:
        _check_uniform(sizes)
        slots = policy.budget + max(policy.chunk_size, policy.local_len + new_tokens)
        return slots * sizes.element_size * sum(s.num_kv_heads * s.unit_dim for s in sizes.backbone.full_shapes)


@dataclass(frozen=True)
class Bounded(BenchMethod):
    """A cache of ours."""

    method: Method
    chosen: frozenset[str] = frozenset()
    """Names of the numbers of the policy that the user set."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """Its one spelling."""
        return self.method.name

    @property
    def has_heads(self) -> bool:
        """Whether the scorer is one of trained weights."""
        return self.method.needs_heads

    @property
    def scorer(self) -> type[Scorer]:
        """The kind of what rates the units."""
        return RetainingHeadScorer if self.method.scorer is None else type(self.method.scorer)

    def policy(self, policy: RetentionPolicy) -> RetentionPolicy:
        """Return the policy with what the method changes.

        Raises:
            ValueError: If they contradict each other.
        """
        return self.method.policy(policy, self.chosen)

    def make_scorer(self, heads: RetainingHeads | None) -> Scorer:
        """Return a scorer for one cache."""
        return scorers.get("retaining_heads", heads=heads) if self.method.scorer is None else self.method.scorer

    def reading(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> list[Pass]:
        return _passes(self._limits(sizes, policy).plan(length))

    def units_after(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> tuple[int, ...]:
        # The prompt's last token is taken back and fed again.
        return tuple(units - 1 for units in self._limits(sizes, policy).plan(length).last.kept)

    def planned_cache_bytes(self, sizes: Sizes, policy: RetentionPolicy, length: int, new_tokens: int) -> int:
        own = self.policy(policy)
        return planned_bytes(sizes.backbone, self._placeholder(), own, sizes.element_size, length, new_tokens)

    def planned_host_bytes(self, sizes: Sizes, policy: RetentionPolicy, length: int, new_tokens: int) -> int:
        own = self.policy(policy)
        return planned_host_bytes(sizes.backbone, self._placeholder(), own, sizes.element_size, length, new_tokens)

    def recalled(self, policy: RetentionPolicy) -> int:
        return self.policy(policy).recall

    def extra_weight_bytes(self, config: Any, hidden_dim: int, heads: str | None) -> int:
        if not self.has_heads:
            return 0
        if heads is not None:
            return _bytes_of(RetainingHeads.from_pretrained(heads))
        with torch.device("meta"):
            return _bytes_of(RetainingHeads.for_model(config, hidden_dim))

    def _placeholder(self) -> Scorer:
        # Heads are like random scores as far as the plan goes: rated once, none kept by right.
        return self.method.scorer or scorers.get("random")

    def _limits(self, sizes: Sizes, policy: RetentionPolicy) -> Limits:
        return Limits(self.policy(policy), self._placeholder(), len(sizes.backbone.layers))


def names() -> list[str]:
    """Return the names that `get` knows."""
    return [FULL, FLOOR, *(name for name in shared_names() if name != FULL)]


def get(method: str | Mapping[str, Any], chosen: Collection[str] = ()) -> BenchMethod:
    """Return the method that a text or a mapping of YAML names, such as `snapkv:kernel=7+pyramid`.

    Args:
        method: What somebody wrote.
        chosen: Names of the numbers of the policy that the user set.

    Raises:
        ValueError: If there is none (the message lists the nearest names), or an option or modifier is unfit.
    """
    spec = method_spec.parse(method, "--methods")
    if spec.name == FLOOR:
        if unfit := [*spec.options, *(f"+{modifier.name}" for modifier in spec.modifiers)]:
            raise ValueError(f'--methods "{spec}": {FLOOR} neither scores nor evicts; drop {unfit[0]}')
        return Floor()
    found = find(spec, "--methods", names())
    return Full() if found.plain else Bounded(found, frozenset(chosen))


def _passes(schedule: Schedule) -> list[Pass]:
    found: list[Pass] = []
    held: Sequence[int] = schedule.held
    seen = 0
    for step in (*schedule.steps, schedule.last):
        if step.tokens:
            found.append(Pass(step.tokens, tuple(held), seen, int(step is schedule.last)))
        held, seen = step.kept, seen + step.tokens
    return found


def _bytes_of(heads: RetainingHeads) -> int:
    return sum(parameter.nbytes for parameter in heads.parameters())


def _check_uniform(sizes: Sizes) -> None:
    if sizes.backbone.recurrent:
        raise ValueError(
            "--methods floor: some layers of this backbone carry a recurrent state, for which there is no floor; leave "
            "it out of --methods"
        )
    if not sizes.backbone.uniform:
        raise ValueError(
            f"--methods floor: some layers of this backbone slide over a window of {sizes.backbone.window} tokens, "
            "for which there is no floor; leave it out of --methods"
        )
