"""The methods that `locret-eval` compares: those of `locret.infer.methods`, fresh heads, and the true answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetainingHeads, lookups, scorers
from locret.base import method_spec
from locret.conversation.protect import QUESTION, SYSTEM, TEMPLATES, USER, Rule, Turn, spans_of
from locret.conversation.text import encode, leading_special_ids
from locret.conversation.turns import Transcript
from locret.data.tasks import Sample
from locret.infer.evaluation.shared_text import SharedText, reply_ids
from locret.infer.methods import FULL, LOCRET, Method, find, modified
from locret.infer.methods import names as shared_names
from locret.labels.labels import answer_labels
from locret.policy.protection import Span, clipped
from locret.scorers import Scorer
from locret.scorers.published_gates import PublishedGateScorer

UNTRAINED, ORACLE, ORACLE_AGNOSTIC = "untrained", "oracle", "oracle_agnostic"
RANDOM_ANSWER = "random_answer"
"""What stands in every table of answers that are evicted while they are written."""
_OWN = (
    Method(UNTRAINED, "retaining heads with fresh weights"),
    Method(ORACLE, "labels of the true answer: the upper bound that trained heads chase"),
    Method(ORACLE_AGNOSTIC, "labels of the answers to all questions of the text: what it loses, the budget loses"),
)


@dataclass
class Setup:
    """What scorers are made from: the backbone, its tokenizer, the heads and the seed."""

    model: nn.Module
    tokenizer: Any
    heads: RetainingHeads | None
    seed: int
    protect: Sequence[Rule] = ()
    """What of each prompt stays whatever its scores."""

    @cached_property
    def untrained(self) -> RetainingHeads:
        """Fresh heads of the trained heads' size."""
        if self.heads is None:
            return RetainingHeads.for_model(self.model, seed=self.seed).follow(self.model)
        return self.heads.fresh(self.seed).follow(self.model)


@dataclass
class Prompt:
    """One sample as token ids."""

    ids_1N: Tensor
    sample: Sample
    setup: Setup
    text: SharedText | None = field(default=None, repr=False)
    """What is known of the other questions of its text."""
    whole: Prompt | None = field(default=None, repr=False)
    """With the question, where these ids end before it."""
    second: bool = False
    """Whether it asks for the answer to a thought: nothing of the text, which has what is protected, stands in it."""
    _labels: Tensor | None = field(default=None, repr=False)

    @property
    def document(self) -> Prompt:
        """The prompt up to where its question begins.

        Raises:
            ValueError: If that is not known.
        """
        assert self.text is not None
        return replace(self, ids_1N=self.ids_1N[:, : self.text.document], whole=self, _labels=None)

    def protected(self) -> list[Span]:
        """Return what of the ids stays whatever its scores."""
        if self.second:
            return []
        rules, turns = self.setup.protect, list[Turn]()
        if any(rule.what == SYSTEM for rule in rules) and (end := self._system_end()):
            turns.append(Turn(SYSTEM, 0, end))
        if any(rule.what == QUESTION for rule in rules) and self.whole is None:
            assert self.text is not None
            turns.append(Turn(USER, self.text.document, None))
        return list(clipped(spans_of(rules, turns), self.ids_1N.shape[1]))

    def _system_end(self) -> int:
        """Return how many of the ids are the sample's system message, as a template writes it; 0 without one."""
        tokenizer, ids, system = self.setup.tokenizer, self.ids_1N[0].tolist(), self.sample.system
        for template in TEMPLATES if system else ():
            if template == "chat" and not tokenizer.chat_template:
                continue
            transcript = Transcript(tokenizer, template, system)
            written = encode(tokenizer, transcript.opening()[: transcript.system_end()])
            own = [*([] if template == "chat" else leading_special_ids(tokenizer)), *written]
            if ids[: len(own)] == own:
                return len(own)
        return 0

    @property
    def labels(self) -> Tensor:
        """The oracle's labels (layers, kv_heads, n), from the true answer; computed once."""
        if self.whole is not None:
            return self.whole.labels[..., : self.ids_1N.shape[1]]
        if self._labels is None:
            answer_1A = reply_ids(self.setup.tokenizer, self.sample.reply, self.ids_1N.device)
            self._labels = answer_labels(self.setup.model, self.ids_1N, answer_1A, "log_attention", True)
        return self._labels

    def forget(self) -> None:
        """Give the labels' memory back."""
        self._labels = None

    @property
    def agnostic_labels(self) -> Tensor:
        """The agnostic oracle's labels (layers, kv_heads, n); those of the question itself are the oracle's.

        Raises:
            ValueError: If it is not known what else could be asked of the text.
        """
        if self.text is None:
            raise ValueError(f"method {ORACLE_AGNOSTIC} needs a task's prompt; use it in locret-eval")
        shared, tokens = self.text.labels, self.ids_1N.shape[1]
        if tokens <= shared.shape[-1]:
            return shared[..., :tokens]
        return torch.cat([shared, self.labels[..., shared.shape[-1] :]], dim=-1)


def names() -> list[str]:
    """Return the names that `get` knows."""
    own = [FULL, LOCRET, UNTRAINED, ORACLE, ORACLE_AGNOSTIC]
    return [*own, *(name for name in shared_names() if name not in own)]


def knows_answers(name: str) -> bool:
    """Return whether a method keeps what the true answers look at."""
    return method_spec.parse(name).name in (ORACLE, ORACLE_AGNOSTIC)


def protects(method: Method) -> bool:
    """Return whether a method evicts as ours do, so that what `--protect` names stays.

    Those that recall by a rule of their own lose nothing: they move units to another tier.
    """
    rule = method_spec.parse(method.name).name
    return not (method.keeps_all or method.plain or rule in lookups.names())


def writes_beside(method: Method) -> bool:
    """Return whether several of a method's answers can be written side by side, each from a bounded cache of ours."""
    return not method.plain


def get(method: str | Mapping[str, Any]) -> Method:
    """Return the method that a text or a mapping of YAML names, such as `snapkv:kernel=7+pyramid`.

    Raises:
        ValueError: If there is none (the message lists the nearest names), or an option or modifier is unfit.
    """
    spec = method_spec.parse(method)
    for own in _OWN:
        if own.name == spec.name:
            return modified(own, spec, "method")
    return find(spec, "method", names())


def gate_identities(methods: Iterable[Method], model: nn.Module) -> dict[str, Any]:
    """Read the gates of others that methods name, and return by method what tells them from others of their name.

    Raises:
        ValueError: If one is missing or damaged, or does not fit the backbone.
    """
    named = {method.name: method.scorer for method in methods if isinstance(method.scorer, PublishedGateScorer)}
    return {name: scorer.identity(scorer.prepare(model)) for name, scorer in named.items()}


def make_scorer(method: Method, prompt: Prompt) -> RetainingHeads | Scorer:
    """Return what rates the units of a prompt; not for the plain cache, where nothing does."""
    setup, base = prompt.setup, method_spec.parse(method.name)
    if method.needs_heads:
        assert setup.heads is not None
        return setup.heads
    if base.name == UNTRAINED:
        return setup.untrained
    if base.name == ORACLE:
        return scorers.get("oracle", labels=prompt.labels)
    if base.name == ORACLE_AGNOSTIC:
        return scorers.get("oracle", labels=prompt.agnostic_labels)
    if base.name in ("random", RANDOM_ANSWER) and "seed" not in base.options:
        return scorers.get(base.name, seed=setup.seed)
    assert method.scorer is not None
    return method.scorer
