"""The methods that `locret-eval` compares: the plain cache, and everything that can rate cache units.

Every registered scorer is a method of the same name; a scorer that needs more than options gets a line here. What a
method's scores are used for can be changed by modifiers of the policy: `snapkv+prompt_end`, `locret+pyramid`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetainingHeads, scorers
from locret.data.tasks import Sample
from locret.labels.labels import answer_labels
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

    def policy(self, policy: RetentionPolicy, chosen: Collection[str] = ()) -> RetentionPolicy:
        """Return the policy with the method's own changes; `chosen` are the names of the numbers that the user set.

        Raises:
            ValueError: If they contradict the policy.
        """
        usual = {} if self.positions is None or "positions" in chosen else {"positions": self.positions}
        try:
            return replace(policy, **{**usual, **self.changes})
        except ValueError as error:
            raise ValueError(f"method {self.name}: {error}") from error


MODIFIERS: Mapping[str, Mapping[str, Any]] = {
    "prompt_end": {"when": "prompt_end"},
    "pyramid": {"layer_budgets": "pyramid"},
    "adaptive_heads": {"head_budgets": "adaptive"},
    "linear": {"memory": "linear"},
    "sqrt": {"memory": "sqrt"},
    "square": {"memory": "square"},
    "square_sqrt": {"memory": "square_sqrt"},
    "adaptive": {"memory": "adaptive"},
    "decremental": {"decremental": True},
    "compact": {"positions": "compact"},
    "original": {"positions": "original"},
}
"""What may follow a method's name after a plus sign, and what it changes in the policy."""


def _heads(prompt: Prompt) -> RetainingHeads:
    assert prompt.setup.heads is not None
    return prompt.setup.heads


_SPECIAL = (
    Method("full", "the plain cache of transformers: every unit stays", None),
    Method("locret", "trained retaining heads", _heads, needs_heads=True),
    Method("untrained", "retaining heads with fresh weights", lambda prompt: prompt.setup.untrained),
    Method("random", "units drawn at random", lambda prompt: scorers.get("random", seed=prompt.setup.seed)),
    Method("streaming", "first and most recent tokens (StreamingLLM)", lambda prompt: scorers.get("streaming")),
    Method(
        "streaming-original",
        "the same, with the positions of the text",
        lambda prompt: scorers.get("streaming"),
        changes={"positions": "original"},
    ),
    Method(
        "oracle",
        "labels of the true answer: the upper bound that trained heads chase",
        lambda prompt: scorers.get("oracle", labels=prompt.labels),
    ),
)


def names() -> list[str]:
    """Return the names that `get` knows."""
    special = [method.name for method in _SPECIAL]
    return special + [name for name in scorers.names() if name not in special and name != "retaining_heads"]


def get(name: str) -> Method:
    """Return the method called `name`, which may carry modifiers: `locret+pyramid+linear`.

    Raises:
        ValueError: If there is none; the message lists the nearest names.
    """
    base, *modifiers = name.split("+")
    method = _named(base)
    for modifier in modifiers:
        if method.make is None:
            raise ValueError(f'method "{name}": the plain cache evicts nothing, so +{modifier} means nothing; drop it')
        if modifier not in MODIFIERS:
            near = nearest(modifier, MODIFIERS) or list(MODIFIERS)
            raise ValueError(f'method "{name}": +{modifier} is unknown; did you mean +{" or +".join(near)}?')
        method = replace(method, name=name, changes={**method.changes, **MODIFIERS[modifier]})
    return method


def _named(name: str) -> Method:
    for method in _SPECIAL:
        if method.name == name:
            return method
    if name in names():
        kind = scorers.find(name)
        about = (kind.__doc__ or "").splitlines()[0].rstrip(".")
        about = about[:1].lower() + about[1:]
        own = kind()
        return Method(name, about, lambda prompt: scorers.get(name), positions=kind.positions, recent=own.recent)
    near = nearest(name, names()) or names()
    raise ValueError(f'method "{name}" is unknown; did you mean {" or ".join(near)}?')
