"""What a text has become: a context that can be asked, talked to, saved and forked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from transformers import DynamicCache

from locret.cache.cache import RetentionCache
from locret.cache.compose import shrunk
from locret.conversation.chat import LONGEST_ANSWER, Chat, Reading, check_question
from locret.conversation.document import without_breaks
from locret.conversation.evidence import Answered, answered, check_source, reread

if TYPE_CHECKING:
    pass


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
    def ask(self, question: str, *, evidence: Literal[True], source: Any = None, **options: Any) -> Answered: ...

    @overload
    def ask(self, question: str, **options: Any) -> str: ...

    @overload
    def ask(self, question: Sequence[str], **options: Any) -> list[Any]: ...

    def ask(
        self,
        question: str | Sequence[str],
        *,
        stream: bool = False,
        measured: bool = False,
        evidence: bool = False,
        source: Any = None,
        max_new_tokens: int = LONGEST_ANSWER,
        **options: Any,
    ) -> Any:
        """Answer a question, or each of several, from a fork of its own; the context does not change.

        Args:
            question: What to ask, or a list of questions.
            stream: Return an iterator of the answer's words as they are written, for one question.
            measured: Return a `Measured` instead of a text: with units, bytes and seconds.
            evidence: Return an `Answered` instead of a text: with how sure the answer is, and where in the text it
                looked.
            source: With evidence: the text that was read, as `LongContextModel.read` takes it. Where evidence may be
                gone, its passages are read again, in the room of a turn, and the question is answered once more.
            max_new_tokens: Longest answer in tokens.
            **options: Whatever `model.generate` takes: temperature, top_p, num_beams, stop_strings, ... An answer is
                greedy unless they ask for sampling.

        Raises:
            ValueError: For an empty question, an option that does not exist, or a source that is another text.
        """
        if stream + measured + evidence > 1:
            raise ValueError("stream, measured and evidence each return something else than a text; give one of them")
        if source is not None:
            if not evidence:
                raise ValueError("source is read again only with evidence=True; add that, or leave source out")
            check_source(self, source)
        if not isinstance(question, str) and isinstance(question, Sequence):
            if stream:
                raise ValueError("stream=True yields one answer; ask one question, or leave it out")
            how: dict[str, Any] = {"measured": measured, "evidence": evidence, "source": source, **options}
            return [self.ask(one, max_new_tokens=max_new_tokens, **how) for one in question]
        if evidence:
            first = answered(self, question, max_new_tokens, options)
            again = source is not None and first.flagged
            return reread(self, question, source, first, max_new_tokens, options) if again else first
        if measured:
            return self.chat().measured(question, self.lm.settings(max_new_tokens, options))
        chat = self.chat()
        return (chat.stream if stream else chat.say)(question, max_new_tokens=max_new_tokens, **options)

    def stream(self, question: str, *, max_new_tokens: int = LONGEST_ANSWER, **options: Any) -> Iterator[str]:
        """Answer a question from a fork and yield the answer word by word; arguments as for `ask`."""
        return self.chat().stream(question, max_new_tokens=max_new_tokens, **options)

    def reread(
        self, question: str, source: Any, first: Answered, max_new_tokens: int = LONGEST_ANSWER, **options: Any
    ) -> Answered:
        """Answer once more with the passages of the first answer read again, whether or not it was flagged.

        Args:
            question: What was asked.
            source: The text that was read, as `LongContextModel.read` takes it.
            first: What `ask` returned with evidence=True.
            max_new_tokens: As for `ask`.
            **options: As for `ask`.

        Raises:
            ValueError: If the source is another text, or a turn has no room for what is to be read again.
        """
        return reread(self, question, source, first, max_new_tokens, options)

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

    def to_dynamic_cache(self, *, host: bool = False) -> DynamicCache:
        """Return what was kept as an ordinary prefix for other code; see `RetentionCache.to_dynamic_cache`."""
        return self.cache.to_dynamic_cache(host=host)

    def question_ids(self, question: str) -> Tensor:
        """Return the (1, L) token ids that follow the prefix of `to_dynamic_cache`: the question, up to its answer."""
        return torch.tensor([self.talk.stream.copy().rest(self._turn(question))])

    def question_text(self, question: str) -> str:
        """Return the text that follows the prefix, whose tokens `question_ids` returns."""
        return without_breaks(self.talk.stream.pending + self._turn(question))

    def _turn(self, question: str) -> str:
        check_question(question)
        return self.talk.transcript.copy().ask(question)


@contextmanager
def as_arguments() -> Iterator[None]:
    """Name the settings of option classes as Python's arguments, not as flags."""
    try:
        yield
    except (ValueError, OSError) as error:
        text = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), str(error))
        raise type(error)(text) from error
