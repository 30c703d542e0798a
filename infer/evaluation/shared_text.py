"""One text and all questions asked of it: where the questions begin, and what all of their answers look at together.

Two protocols: `aware`, the question stands in the prompt while that is read; `agnostic`, the document is read and
evicted to the budget first, and the question comes afterwards, on a fork. Both have the same prompt tokens. The ids of
the whole prompt are cut before the first token that the document alone does not begin with, in any of the prompts: a
token that joins the document's end with a question counts to the question.
"""

# L layers, K KV heads, N prompt tokens, D of them of the document

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locret.backbone.adapters import input_device
from locret.conversation.document import encode
from locret.data.tasks.prompts import BuiltPrompt, build_prompt
from locret.data.tasks.task import Sample, Task
from locret.infer.evaluation.records import AGNOSTIC
from locret.labels.many_answers import labels_of_answers

if TYPE_CHECKING:
    from locret.infer.evaluation.methods import Setup


@dataclass
class SharedText:
    """A sample's text with every question that it knows.

    Args:
        setup: The backbone and its tokenizer.
        task: The sample's task.
        sample: The sample.
        template: How chat turns become text.
    """

    setup: Setup
    task: Task
    sample: Sample
    template: str = "chat"

    @cached_property
    def _asked(self) -> list[Sample]:
        """The sample, then one for every question; it is among them, unless the task's own prompt says it otherwise."""
        others = [self.sample.asking(question) for question in self.sample.asked]
        return [self.sample, *(one for one in others if one.content != self.sample.content)]

    @cached_property
    def _prompts(self) -> list[BuiltPrompt]:
        return [build_prompt(self.task, one, self.setup.tokenizer, template=self.template) for one in self._asked]

    @cached_property
    def document(self) -> int:
        """D: tokens that all prompts begin with and that the document ends.

        Raises:
            ValueError: If it is not known where the question begins, or it comes first.
        """
        return min(
            document_tokens(self.setup.tokenizer, self.task, sample, built)
            for sample, built in zip(self._asked, self._prompts, strict=True)
        )

    @cached_property
    def labels(self) -> Tensor:
        """The agnostic oracle's labels (L, K, D): the largest that any answer gives, each after its own question.

        Raises:
            ValueError: If the task does not say which questions there are.
        """
        check_asked(self.task, self.sample)
        document, device = self.document, input_device(self.setup.model)
        rests = [
            (torch.tensor([built.ids[document:]], device=device), reply_ids(self.setup.tokenizer, one.reply, device))
            for one, built in zip(self._asked, self._prompts, strict=True)
        ]
        ids_1D = torch.tensor([self._prompts[0].ids[:document]], device=device)
        return labels_of_answers(self.setup.model, ids_1D, rests, "log_attention", include_last_prompt_token=True)


def check_asked(task: Task, sample: Sample) -> None:
    """Refuse a task whose samples do not know all that could be asked of their texts.

    Raises:
        ValueError: Naming it and the way out.
    """
    if not sample.asked:
        raise ValueError(
            f"method oracle_agnostic keeps what the answers to all questions of a text look at, and {task.name} does "
            "not say which there are; leave one out, or compare with oracle, which knows the one that is asked"
        )


def reply_ids(tokenizer: Any, reply: str, device: torch.device) -> Tensor:
    """Return (1, m) ids of a true answer, with the end of the text."""
    ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return torch.tensor([ids], device=device)


def document_tokens(tokenizer: Any, task: Task, sample: Sample, built: BuiltPrompt) -> int:
    """Return how many tokens of a prompt stand before its question and are those of the text up to there.

    Raises:
        ValueError: If it is not known where the question begins, or it comes first.
    """
    begin, end = sample.span
    question = sample.content[end:]
    unknown = not end or not question.strip() or bool(sample.turns)
    if unknown or (sample.question.strip() and sample.question.strip() in sample.content[:begin]):
        why = "does not say where its questions begin" if unknown else "asks before its document"
        raise ValueError(
            f"--protocol {AGNOSTIC}, oracle_{AGNOSTIC} and --protect question tell a document from its question, but "
            f"{task.name} {why}; drop them, or leave the task out"
        )
    places = (built.text.rfind(tail) for tail in (question, question.rstrip(), question.strip()))
    place = next((place for place in places if place > 0), 0)
    # Some templates write bos themselves, and some protocols leave it to the tokenizer.
    own = (encode(tokenizer, built.text[:place]), list(tokenizer(built.text[:place], verbose=False)["input_ids"]))
    length = max(_common(ids, built.ids) for ids in own)
    if not place or not length:
        which = f"{task.name} {sample.id}".strip()
        raise ValueError(
            f"--protocol {AGNOSTIC}, --protect question, oracle_{AGNOSTIC}: the question of {which} is not found in "
            "its prompt as the task wrote it, because truncation or the chat template changed it; raise --max-prompt, "
            "or drop them"
        )
    return length


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return len(commonprefix([list(one), list(other)]))
