"""The ways of reading a prompt that are measured, and what each plans: its forward passes and its cache.

`full` keeps every unit (transformers' own cache and attention, the prompt in chunks), `floor` reads the same chunks as
a bounded cache does but neither scores nor evicts, and every scorer is a method of its name, `locret` that of
retaining heads. Options and modifiers are written as in `locret.method_spec`: `snapkv:kernel=7+pyramid`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from locret import RetainingHeads, method_spec, plugins, scorers
from locret.cache.limits import Limits, check_pair, planned_bytes
from locret.infer.speed.cost import Pass, Sizes
from locret.method_spec import MethodSpec
from locret.nearest import nearest
from locret.policy.policy import RetentionPolicy
from locret.policy.schedule import Schedule
from locret.scorers import Scorer

_UNTIMED = ("oracle", "retaining_heads")
"""One needs the true answer, the other is called `locret`."""


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

    def extra_weight_bytes(self, config: Any, hidden_dim: int, heads: str | None) -> int:
        """Return the bytes of weights that are not the backbone's."""
        return 0


@dataclass(frozen=True)
class Full(BenchMethod):
    """transformers' own cache, fed chunk by chunk: every unit stays."""

    name: str = "full"

    def reading(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> list[Pass]:
        layers, size = len(sizes.backbone.layers), policy.chunk_size
        starts = range(0, length, size)
        last = starts[-1]
        return [Pass(min(size, length - start), (start,) * layers, start, int(start == last)) for start in starts]

    def units_after(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> tuple[int, ...]:
        return (length,) * len(sizes.backbone.layers)

    def planned_cache_bytes(self, sizes: Sizes, policy: RetentionPolicy, length: int, new_tokens: int) -> int:
        backbone, units = sizes.backbone, length + new_tokens
        sliding = backbone.num_layers - len(backbone.layers)
        held = len(backbone.layers) * units + sliding * min(units, (backbone.window or 1) - 1)
        return held * _unit_bytes(sizes)


@dataclass(frozen=True)
class Floor(BenchMethod):
    """The least that bounded reading costs: the same chunks against a static cache, without scores and eviction."""

    name: str = "floor"

    def reading(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> list[Pass]:
        _check_uniform(sizes)
        return _passes(Limits(policy, scorers.get("random"), sizes.backbone.num_layers).plan(length))

    def units_after(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> tuple[int, ...]:
        return (min(length, policy.budget + policy.local_len),) * sizes.backbone.num_layers

    def planned_cache_bytes(self, sizes: Sizes, policy: RetentionPolicy, length: int, new_tokens: int) -> int:
        _check_uniform(sizes)
        slots = policy.budget + max(policy.chunk_size, policy.local_len + new_tokens)
        return sizes.backbone.num_layers * slots * _unit_bytes(sizes)


@dataclass(frozen=True)
class Bounded(BenchMethod):
    """A bounded cache whose units a scorer rates."""

    name: str
    scorer: str = "retaining_heads"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of the scorer."""
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Of the policy."""

    @property
    def has_heads(self) -> bool:
        """Whether the scorer is one of trained weights."""
        return self.scorer == "retaining_heads"

    def policy(self, policy: RetentionPolicy) -> RetentionPolicy:
        """Return the policy in the positions of the scorer's paper, with what the modifiers change.

        Raises:
            ValueError: If they contradict the policy.
        """
        try:
            made = replace(policy, **{"positions": scorers.find(self.scorer).positions, **self.changes})
            check_pair(self._placeholder(), made)
            return made
        except ValueError as error:
            raise ValueError(f"method {self.name}: {error}") from error

    def make_scorer(self, heads: RetainingHeads | None) -> Scorer:
        """Return a scorer for one cache."""
        return scorers.get(self.scorer, heads=heads) if self.has_heads else self._scorer()

    def reading(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> list[Pass]:
        return _passes(self._limits(sizes, policy).plan(length))

    def units_after(self, sizes: Sizes, policy: RetentionPolicy, length: int) -> tuple[int, ...]:
        # The prompt's last token is taken back and fed again.
        return tuple(units - 1 for units in self._limits(sizes, policy).plan(length).last.kept)

    def planned_cache_bytes(self, sizes: Sizes, policy: RetentionPolicy, length: int, new_tokens: int) -> int:
        own = self.policy(policy)
        return planned_bytes(sizes.backbone, self._placeholder(), own, sizes.element_size, length, new_tokens)

    def extra_weight_bytes(self, config: Any, hidden_dim: int, heads: str | None) -> int:
        if not self.has_heads:
            return 0
        if heads is not None:
            return _bytes_of(RetainingHeads.from_pretrained(heads))
        with torch.device("meta"):
            return _bytes_of(RetainingHeads.for_model(config, hidden_dim))

    def _placeholder(self) -> Scorer:
        # Heads are like random scores as far as the plan goes: rated once, none kept by right.
        return scorers.get("random") if self.has_heads else self._scorer()

    def _scorer(self) -> Scorer:
        return scorers.make(MethodSpec(self.scorer, self.options))

    def _limits(self, sizes: Sizes, policy: RetentionPolicy) -> Limits:
        return Limits(self.policy(policy), self._placeholder(), len(sizes.backbone.layers))


def names() -> list[str]:
    """Return the names that `get` knows."""
    return ["full", "floor", "locret", *(name for name in scorers.names() if name not in _UNTIMED)]


def get(method: str | Mapping[str, Any]) -> BenchMethod:
    """Return the method that a text or a mapping of YAML names, such as `snapkv:kernel=7+pyramid`.

    Raises:
        ValueError: If there is none (the message lists the nearest names), or an option or modifier is unfit.
    """
    spec = method_spec.parse(method, "--methods")
    base = spec.name
    if base in _UNTIMED or not (base in names() or plugins.is_reference(base) or base.endswith(".py")):
        near = nearest(base, names()) or names()
        raise ValueError(f"--methods {base} is unknown; did you mean {' or '.join(near)}?")
    if base in ("full", "floor", "locret") and spec.options:
        raise ValueError(f"--methods {spec}: {base} has no options; drop {next(iter(spec.options))}")
    if base in ("full", "floor"):
        if spec.modifiers:
            raise ValueError(f"--methods {spec}: {base} evicts nothing, so +{spec.modifiers[0]} means nothing; drop it")
        return Full() if base == "full" else Floor()
    found = Bounded(str(spec), "retaining_heads" if base == "locret" else base, spec.options, spec.changes)
    if not found.has_heads:
        found.make_scorer(None)  # refuses options that are unfit
    return found


def _passes(schedule: Schedule) -> list[Pass]:
    found: list[Pass] = []
    held: Sequence[int] = schedule.held
    seen = 0
    for step in (*schedule.steps, schedule.last):
        if step.tokens:
            found.append(Pass(step.tokens, tuple(held), seen, int(step is schedule.last)))
        held, seen = step.kept, seen + step.tokens
    return found


def _unit_bytes(sizes: Sizes) -> int:
    return 2 * sizes.backbone.num_kv_heads * sizes.backbone.head_dim * sizes.element_size


def _bytes_of(heads: RetainingHeads) -> int:
    return sum(parameter.nbytes for parameter in heads.parameters())


def _check_uniform(sizes: Sizes) -> None:
    if not sizes.backbone.uniform:
        raise ValueError(
            f"--methods floor: some layers of this backbone slide over a window of {sizes.backbone.window} tokens, "
            "for which there is no floor; leave it out of --methods"
        )
