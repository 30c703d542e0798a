"""Everything that can rate cache units. To add a scorer: one file next to these, and its class in `_SCORERS`.

Scorers of other packages and files come in by name: `package.module:Class` or `file.py:Class`. A press of kvpress that
rates units comes in as `kvpress:SnapKVPress`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from locret.backbone.chunk import Chunk
from locret.base import method_spec, plugins, registry
from locret.base.method_spec import MethodSpec
from locret.base.nearest import refuse_unknown
from locret.scorers.base import FeatureScorer, Rated, Scorer, TokenPass, TokenScorer
from locret.scorers.expected_attention import ExpectedAttentionScorer
from locret.scorers.h2o import H2OScorer
from locret.scorers.key_difference import KeyDifferenceScorer
from locret.scorers.key_norm import KeyNormScorer
from locret.scorers.kvpress import is_press, press_scorer
from locret.scorers.nacl import NACLScorer
from locret.scorers.oracle import OracleScorer
from locret.scorers.published_gates import DMSScorer, FastKVzipScorer, KVzapScorer
from locret.scorers.random import RandomScorer
from locret.scorers.retaining_heads import RetainingHeadScorer
from locret.scorers.sage_kv import SageKVScorer
from locret.scorers.scissorhands import ScissorhandsScorer
from locret.scorers.sirllm import SirLLMScorer
from locret.scorers.snapkv import SnapKVScorer
from locret.scorers.streaming import StreamingScorer
from locret.scorers.tova import TOVAScorer

__all__ = [
    "FALLBACK", "Chunk", "FeatureScorer", "Rated", "RetainingHeadScorer", "Scorer", "TokenPass", "TokenScorer",
    "find", "get", "make", "names",
]  # fmt: skip

_SCORERS: tuple[type[Scorer], ...] = (
    DMSScorer, ExpectedAttentionScorer, FastKVzipScorer, H2OScorer, KVzapScorer, KeyDifferenceScorer, KeyNormScorer,
    NACLScorer, OracleScorer, RandomScorer, RetainingHeadScorer, SageKVScorer, ScissorhandsScorer,
    SirLLMScorer, SnapKVScorer, StreamingScorer, TOVAScorer,
)  # fmt: skip

FALLBACK = "expected_attention"
"""The training-free scorer that commands use for a backbone without heads: among the best of docs/numbers.md."""


def names() -> list[str]:
    """Return the names that `get` knows, sorted."""
    return sorted(scorer.name for scorer in _SCORERS)


def get(name: str, **options: Any) -> Scorer:
    """Return the scorer called `name` with its options.

    Args:
        name: A name with or without options, as `locret.base.method_spec` says, such as "snapkv:kernel=7",
            "package.module:Class" or "kvpress:SnapKVPress".
        **options: The scorer's own options.

    Raises:
        ValueError: If there is no such scorer (the message lists the nearest names), it has no such option, or an
            option has a value that it cannot have.

    Examples:
        >>> scorers.get("snapkv", window=32).window
        32
        >>> scorers.get("snapkv:kernel=7,pooling=max").kernel
        7
    """
    spec = method_spec.parse(name, "scorer")
    if spec.modifiers:
        changes = ", ".join(f"{field}={value}" for field, value in spec.changes.items())
        raise ValueError(
            f'scorer "{spec}": +{spec.modifiers[0]} is for the policy, not for the scorer; set {changes} there'
        )
    return make(spec, options)


def make(spec: MethodSpec, options: Mapping[str, Any] | None = None) -> Scorer:
    """Return the scorer of a spec, whatever its modifiers; `options` come on top of those it holds."""
    kind, given = find(spec.name), {**spec.options, **(options or {})}
    if options and (twice := sorted(spec.options.keys() & options.keys())):
        raise ValueError(f'scorer "{spec}" has the option {twice[0]} already; give it once')
    return registry.build("scorer", spec.name, kind, given, kind.needs)


def find(name: str) -> type[Scorer]:
    """Return the class of the scorer called `name`, which may be `module:Class` or `file.py:Class`."""
    for scorer in _SCORERS:
        if scorer.name == name:
            return scorer
    base = name.partition(":")[0]
    if plugins.is_reference(name) and base not in names():
        return _checked(plugins.load(name, "scorer"), name)
    if plugins.is_reference(name):
        raise ValueError(f'scorer "{name}": options are written OPTION=VALUE, such as {base}:OPTION=VALUE')
    if name.endswith(".py"):
        raise ValueError(f'scorer "{name}" names no class of the file; write {name}:Class')
    if "/" in name or os.path.isfile(os.path.join(name, "config.json")):
        raise ValueError(
            f'scorer "{name}" is a path; if it leads to retaining heads, give RetainingHeads.from_pretrained("{name}") '
            f"in Python, or --heads {name}"
        )
    refuse_unknown("scorer", name, names())


def _checked(found: Any, name: str) -> type[Scorer]:
    """Return somebody else's class as a scorer."""
    if is_press(found):
        return press_scorer(found, name)
    if not (isinstance(found, type) and issubclass(found, Scorer)):
        raise ValueError(
            f'scorer "{name}" is no subclass of locret.scorers.Scorer, and no press; derive it from Scorer'
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ValueError(f'scorer "{name}" does not define {missing}; see docs/scorers.md')
    if not (is_dataclass(found) and found.__dataclass_params__.frozen):
        raise ValueError(
            f'scorer "{name}" is not a frozen dataclass; put @dataclass(frozen=True, kw_only=True) above it'
        )
    if not isinstance(getattr(found, "name", None), str) or not found.name:
        raise ValueError(f'scorer "{name}" has no name; add name: ClassVar[str] = "..." to the class')
    return found
