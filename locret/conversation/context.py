"""What a text has become: a context that can be asked, talked to, saved and forked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor
from transformers import DynamicCache

from locret.cache.cache import RetentionCache
from locret.cache.compose import shrunk
from locret.conversation.chat import LONGEST_ANSWER, Chat, Reading, check_question
from locret.conversation.document import without_breaks
from locret.conversation.evidence import Answered, answered


class Context(Reading):
    """What has been read: it can be asked, talked to, saved and forked. `LongContextModel.read` and `load` make them.

    Examples:
        >>> lm = LongContextModel(model, tokenizer, heads, policy)
        >>> context = lm.read("The grass is green. " * 40 + "The pass key is 71432. " + "The sky is blue. " * 40)
        >>> context.ask(["What is the pass key?", "What is the pass key?"])
        ['The pass key is 71432.', 'The pass key is 71432.']
        >>> chat = context.chat()
        >>> chat.say("What is the pass key?")
        'The pass key is 71432.'
        >>> context.save("text.ctx")
        >>> lm.load("text.ctx").ask("What is the pass key?")
        'The pass key is 71432.'
    """

    @property
    def system(self) -> str | None:
        """The system message in front of the text."""
        return self.talk.transcript.system

    @overload
    def ask(self, question: str, *, evidence: Literal[True], **options: Any) -> Answered: ...

    @overload
    def ask(self, question: str, **options: Any) -> str: ...

    @overload
    def ask(self, question: Sequence[str], **options: Any) -> list[Any]: ...

    def ask(
        self,
        question: str | Sequence[str],
        *,
        measured: bool = False,
        evidence: bool = False,
        max_new_tokens: int = LONGEST_ANSWER,
        **options: Any,
    ) -> Any:
        """Answer a question, or each of several, from a fork of its own; the context does not change.

        Args:
            question: What to ask, or a list of questions.
            measured: Return a `Measured` instead of a text: with units, bytes and seconds.
            evidence: Return an `Answered` instead of a text: with how sure the answer is, and where in the text it
                looked.
            max_new_tokens: Longest answer in tokens.
            **options: Whatever `model.generate` takes: temperature, top_p, num_beams, stop_strings, ... An answer is
                greedy unless they ask for sampling.

        Raises:
            ValueError: For an empty question, or an option that does not exist.
        """
        if measured and evidence:
            raise ValueError("measured and evidence each return something else than a text; give one of them")
        if not isinstance(question, str) and isinstance(question, Sequence):
            how: dict[str, Any] = {"measured": measured, "evidence": evidence, **options}
            return [self.ask(one, max_new_tokens=max_new_tokens, **how) for one in question]
        if evidence:
            return answered(self, question, max_new_tokens, options)
        if measured:
            return self.chat().measured(question, self.lm.settings(max_new_tokens, options))
        return self.chat().say(question, max_new_tokens=max_new_tokens, **options)

    def stream(self, question: str, *, max_new_tokens: int = LONGEST_ANSWER, **options: Any) -> Iterator[str]:
        """Answer a question from a fork and yield the answer as it is written; arguments as for `ask`."""
        return self.chat().stream(question, max_new_tokens=max_new_tokens, **options)

    def chat(self, cache: RetentionCache | None = None) -> Chat:
        """Return a conversation about the context, in a copy of its cache, or in one that has been made already."""
        return Chat(self.lm, self.cache.copy() if cache is None else cache, self.talk.copy())

    def fork(self) -> Context:
        """Return an independent copy."""
        return Context(self.lm, self.cache.copy(), self.talk.copy())

    def shrink(self, budget: int) -> Context:
        """Return a smaller context at once, from the scores that its units have; this one does not change.

        The last local tokens stay, and what the scorer keeps by right, as at the end of a read. Nothing is read again:
        it is what an eviction to that budget leaves now.

        Args:
            budget: Most units per KV head, local tokens included.

        Raises:
            ValueError: If it is no number of units, too few for what is protected, or a rule of its own decides what
                stays.
        """
        return Context(self.lm, shrunk(self.cache, budget), self.talk.copy())

    def to_dynamic_cache(self) -> DynamicCache:
        """Return what was kept as an ordinary prefix for other code; see `RetentionCache.to_dynamic_cache`."""
        return self.cache.to_dynamic_cache()

    def question_ids(self, question: str) -> Tensor:
        """Return the (1, L) token ids that follow the prefix of `to_dynamic_cache`: the question, up to its answer."""
        return torch.tensor([replace(self.talk.stream).rest(self._turn(question))])

    def question_text(self, question: str) -> str:
        """Return the text that follows the prefix, whose tokens `question_ids` returns."""
        return without_breaks(self.talk.stream.pending + self._turn(question))

    def _turn(self, question: str) -> str:
        check_question(question)
        return replace(self.talk.transcript).ask(question)
