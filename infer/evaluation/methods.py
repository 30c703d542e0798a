"""The methods that `locret-eval` compares: the plain cache, and everything that can rate cache units.

Every scorer that can be named is a method of the same name, with its options, as `locret.method_spec` says; a scorer
that needs more than options gets a line here. What a method's scores are used for can be changed by modifiers of the
policy: `snapkv:kernel=7+prompt_end`, `locret+pyramid`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetainingHeads, method_spec, plugins, scorers
from locret.cache.limits import check_pair
from locret.data.tasks import Sample
from locret.labels.labels import answer_labels
from locret.method_spec import MethodSpec
from locret.nearest import nearest
from locret.policy.policy import RetentionPolicy
from locret.scorers import Scorer


@dataclass
class Setup:
    """What scorers are made from: the backbone, its tokenizer, the heads and the seed."""

    model: nn.Module
    tokenizer: Any
    heads: RetainingHeads | None
    seed: int

    @cached_property
    def untrained(self) -> RetainingHeads:
        """Fresh heads of the trained heads' size."""
        width = self.heads.config.hidden_dim if self.heads is not None else 1024
        return RetainingHeads.for_model(self.model, width, seed=self.seed).to(next(self.model.parameters()).device)


@dataclass
class Prompt:
    """One sample as token ids."""

    ids_1N: Tensor
    sample: Sample
    setup: Setup
    _labels: Tensor | None = field(default=None, repr=False)

    @property
    def labels(self) -> Tensor:
        """The oracle's labels (layers, kv_heads, n), from the true answer; computed once."""
        if self._labels is None:
            tokenizer = self.setup.tokenizer
            ids = tokenizer(self.sample.reply, add_special_tokens=False)["input_ids"]
            if tokenizer.eos_token_id is not None:
                ids = [*ids, tokenizer.eos_token_id]
            answer_1A = torch.tensor([ids], device=self.ids_1N.device)
            self._labels = answer_labels(self.setup.model, self.ids_1N, answer_1A, "log_attention", True)
        return self._labels


@dataclass(frozen=True)
class Method:
    """A way of reading a prompt."""

    name: str
    description: str
    make: Callable[[Prompt], RetainingHeads | Scorer] | None
    """Gives what rates the units of a prompt; None for the plain cache, which keeps all of them."""
    needs_heads: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What the method changes in every policy."""
    positions: str | None = None
    """Position mode of the method's paper, taken unless the user chose one."""
    recent: Callable[[int], int] = lambda budget: 0
    """Newest units out of a budget that the method keeps whatever their scores."""
    scorer: Scorer | None = field(default=None, compare=False)
    """What rates the units, where it needs no prompt to be known."""

    def policy(self, policy: RetentionPolicy, chosen: Collection[str] = ()) -> RetentionPolicy:
        """Return the policy with the method's own changes; `chosen` are the names of the numbers that the user set.

        Raises:
            ValueError: If they contradict the policy.
        """
        usual = {} if self.positions is None or "positions" in chosen else {"positions": self.positions}
        try:
            made = replace(policy, **{**usual, **self.changes})
            if self.scorer is not None:
                check_pair(self.scorer, made)
            return made
        except ValueError as error:
            raise ValueError(f"method {self.name}: {error}") from error


def _heads(prompt: Prompt) -> RetainingHeads:
    assert prompt.setup.heads is not None
    return prompt.setup.heads


_SPECIAL = (
    Method("full", "the plain cache of transformers: every unit stays", None),
    Method("locret", "trained retaining heads", _heads, needs_heads=True),
    Method("untrained", "retaining heads with fresh weights", lambda prompt: prompt.setup.untrained),
    Method(
        "oracle",
        "labels of the true answer: the upper bound that trained heads chase",
        lambda prompt: scorers.get("oracle", labels=prompt.labels),
    ),
)
"""Methods without options."""
_ABOUT = {
    "random": "units drawn at random",
    "streaming": "first and most recent tokens (StreamingLLM)",
    "streaming-original": "the same, with the positions of the text",
}
"""Methods that have the positions of the policy, as heads do."""
_FIRST = ("full", "locret", "untrained", "random", "streaming", "streaming-original", "oracle")
"""What lists begin with."""


def names() -> list[str]:
    """Return the names that `get` knows."""
    return [*_FIRST, *(name for name in scorers.names() if name not in _FIRST and name != "retaining_heads")]


def get(method: str | Mapping[str, Any]) -> Method:
    """Return the method that a text or a mapping of YAML names, such as `snapkv:kernel=7+pyramid`.

    Raises:
        ValueError: If there is none (the message lists the nearest names), or an option or modifier is unfit.
    """
    spec = method_spec.parse(method)
    found = _special(spec) or _of_scorer(spec)
    if found.make is None and spec.modifiers:
        modifier = spec.modifiers[0]
        raise ValueError(f'method "{spec}": the plain cache evicts nothing, so +{modifier} means nothing; drop it')
    for modifier in spec.modifiers:
        if clash := found.changes.keys() & modifier.changes.keys():
            raise ValueError(f'method "{spec}": {spec.name} sets {min(clash)} itself; drop +{modifier}')
    return replace(found, name=str(spec), changes={**found.changes, **spec.changes})


def _special(spec: MethodSpec) -> Method | None:
    for method in _SPECIAL:
        if method.name == spec.name:
            if spec.options:
                raise ValueError(f'method "{spec}": {spec.name} has no options; drop {next(iter(spec.options))}')
            return method
    return None


def _of_scorer(spec: MethodSpec) -> Method:
    if spec.name == "retaining_heads":
        raise ValueError(f'method "{spec}" is called locret here; write locret, and give --heads')
    if not _is_scorer(spec.name):
        near = nearest(spec.name, names()) or names()
        raise ValueError(f'method "{spec.name}" is unknown; did you mean {" or ".join(near)}?')
    original = spec.name == "streaming-original"
    scorer = scorers.make(replace(spec, name="streaming") if original else spec)

    def make(prompt: Prompt) -> Scorer:
        drawn = spec.name == "random" and "seed" not in spec.options
        return scorers.get("random", seed=prompt.setup.seed) if drawn else scorer

    about = _ABOUT.get(spec.name) or (type(scorer).__doc__ or spec.name).strip().splitlines()[0].rstrip(".")
    return Method(
        spec.name,
        about[:1].lower() + about[1:],
        make,
        changes={"positions": "original"} if original else {},
        positions=None if spec.name in _ABOUT else scorer.positions,
        recent=scorer.recent,
        scorer=scorer,
    )


def _is_scorer(name: str) -> bool:
    return name in names() or plugins.is_reference(name) or name.endswith(".py")
