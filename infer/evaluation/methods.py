"""The methods that `locret-eval` compares: those of `locret.infer.methods`, and the true answer.

Two protocols: `aware`, the question stands in the prompt while that is read; `agnostic`, the document is read and
evicted to the budget first, and the question comes afterwards, on a fork. Both have the same prompt tokens. The ids of
the whole prompt are cut before the first token that the document alone does not begin with, in any of the prompts: a
token that joins the document's end with a question counts to the question.
"""

# L layers, K KV heads, N prompt tokens, D of them of the document

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn

from locret import RetainingHeads, scorers
from locret.base import method_spec
from locret.conversation.document import encode
from locret.data.tasks import Sample, Task
from locret.data.tasks.prompts import BuiltPrompt, build_prompt
from locret.infer.methods import Method, find, modified
from locret.infer.methods import names as shared_names
from locret.labels.labels import answer_labels
from locret.scorers import Scorer

ORACLE = "oracle"
_ORACLE = Method(ORACLE, "labels of the true answer: the upper bound that trained heads chase")


@dataclass
class Setup:
    """What scorers are made from: the backbone, its tokenizer, the heads and the seed."""

    model: nn.Module
    tokenizer: Any
    heads: RetainingHeads | None
    seed: int


def text_tokens(setup: Setup, task: Task, sample: Sample, template: str = "chat") -> int:
    """Return D of a sample's text: tokens that the prompts of all its questions begin with and that the text ends."""
    # The sample's own question is among them, unless the task's own prompt says it otherwise.
    others = [sample.asking(question) for question in sample.asked]
    asked = [sample, *(one for one in others if one.content != sample.content)]
    built = [build_prompt(task, one, setup.tokenizer, template=template) for one in asked]
    return min(document_tokens(setup.tokenizer, task, *both) for both in zip(asked, built, strict=True))


def document_tokens(tokenizer: Any, task: Task, sample: Sample, built: BuiltPrompt) -> int:
    """Return how many tokens of a prompt stand before its question and are those of the text up to there."""
    begin, end = sample.span
    question = sample.content[end:]
    unknown = not end or not question.strip() or bool(sample.turns)
    if unknown or (sample.question.strip() and sample.question.strip() in sample.content[:begin]):
        why = "does not say where its questions begin" if unknown else "asks before its document"
        raise ValueError(
            f"--protocol agnostic tells a document from its question, but {task.name} {why}; drop "
            "it, or leave the task out"
        )
    places = (built.text.rfind(tail) for tail in (question, question.rstrip(), question.strip()))
    place = next((place for place in places if place > 0), 0)
    # Some templates write bos themselves, and some protocols leave it to the tokenizer.
    own = (encode(tokenizer, built.text[:place]), list(tokenizer(built.text[:place], verbose=False)["input_ids"]))
    length = max(len(commonprefix([ids, built.ids])) for ids in own)
    if not place or not length:
        raise ValueError(
            f"--protocol agnostic: the question of {f'{task.name} {sample.id}'.strip()} is not found "
            "in its prompt, because truncation or the chat template changed it; raise --max-prompt, or drop it"
        )
    return length


@dataclass
class Prompt:
    """One sample as token ids."""

    setup: Setup
    task: Task
    ids_1N: Tensor
    sample: Sample
    text: Callable[[], int]
    """Gives the `text_tokens` that it has in common with the prompts of other questions about its text."""
    template: str = "chat"
    whole: Prompt | None = field(default=None, repr=False)
    """With the question, where these ids end before it."""

    @property
    def document(self) -> Prompt:
        """The prompt up to where its question begins; errors are those of `text_tokens`."""
        return replace(self, ids_1N=self.ids_1N[:, : self.text()], whole=self)

    @cached_property
    def labels(self) -> Tensor:
        """The oracle's labels (L, K, N), from the true answer and its end; computed once, until they are deleted."""
        if self.whole is not None:
            return self.whole.labels[..., : self.ids_1N.shape[1]]
        tokenizer = self.setup.tokenizer
        ids = tokenizer(self.sample.reply, add_special_tokens=False)["input_ids"]
        ids = ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]
        answer_1A = torch.tensor([ids], device=self.ids_1N.device)
        return answer_labels(self.setup.model, self.ids_1N, answer_1A, "log_attention", True)


def names() -> list[str]:
    """Return the names that `get` knows."""
    first, second, *others = shared_names()
    return [first, second, ORACLE, *others]


def rule(method: Method) -> str:
    """Return a method's name without options and modifiers."""
    return method_spec.parse(method.name).name


def get(method: str) -> Method:
    """Return the method that a text names, such as `snapkv:kernel=7+pyramid`."""
    spec = method_spec.parse(method)
    return modified(_ORACLE, spec, "method") if spec.name == ORACLE else find(spec, "method", names())


def make_scorer(method: Method, prompt: Prompt) -> RetainingHeads | Scorer:
    """Return what rates the units of a prompt; not for the plain cache, where nothing does."""
    setup, base = prompt.setup, method_spec.parse(method.name)
    if method.needs_heads:
        assert setup.heads is not None
        return setup.heads
    if base.name == ORACLE:
        return scorers.get("oracle", labels=prompt.labels)
    if base.name == "random" and "seed" not in base.options:
        return scorers.get(base.name, seed=setup.seed)
    assert method.scorer is not None
    return method.scorer
