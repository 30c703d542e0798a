"""What a text has become: a context that can be asked, talked to, saved and forked."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from transformers import DynamicCache

from locret.cache.cache import RetentionCache
from locret.cache.compose import shrunk
from locret.cache.memory import CacheMemory
from locret.conversation.chat import LONGEST_ANSWER, Chat, described, save
from locret.conversation.document import Source, is_text
from locret.conversation.evidence import Answered, answered, check_source, reread
from locret.conversation.text_stream import TokenStream
from locret.conversation.transcript import Transcript
from locret.conversation.turns import NOTHING, KeptTurn, Protection
from locret.publish_options import ContextPushOptions

if TYPE_CHECKING:
    from locret.conversation.long_context_model import LongContextModel

_READ_AGAIN = (str, Path, list, tuple, Tensor)
"""Sources that can be read more than once."""


class Context:
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

    def __init__(
        self,
        lm: LongContextModel,
        cache: RetentionCache,
        stream: TokenStream,
        transcript: Transcript,
        name: str,
        sources: tuple[Source, ...] = (),
        protection: Protection = NOTHING,
    ) -> None:
        self.lm, self.cache, self.name = lm, cache, name
        self.sources = sources
        """What was read, with its digest; none in a file of an earlier version."""
        self.protection = protection
        """What is protected, and where the turns are."""
        self._stream, self._transcript = stream, transcript

    @overload
    def ask(
        self, question: str, *, evidence: Literal[True], source: Any = None, max_new_tokens: int = ..., **options: Any
    ) -> Answered: ...

    @overload
    def ask(
        self,
        question: Sequence[str],
        *,
        evidence: Literal[True],
        source: Any = None,
        max_new_tokens: int = ...,
        **options: Any,
    ) -> list[Answered]: ...

    @overload
    def ask(self, question: str, *, max_new_tokens: int = LONGEST_ANSWER, **options: Any) -> str: ...

    @overload
    def ask(self, question: Sequence[str], *, max_new_tokens: int = LONGEST_ANSWER, **options: Any) -> list[str]: ...

    def ask(
        self,
        question: str | Sequence[str],
        *,
        stream: bool = False,
        evidence: bool = False,
        source: Any = None,
        max_new_tokens: int = LONGEST_ANSWER,
        **options: Any,
    ) -> Any:
        """Answer a question, or each of several, from a fork of its own; the context does not change.

        Args:
            question: What to ask, or a list of questions.
            stream: Return an iterator of the answer's words as they are written, for one question.
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
        if evidence:
            if stream:
                raise ValueError("stream=True yields words before all is known; leave stream or evidence out")
            if source is not None:
                if not isinstance(source, _READ_AGAIN):
                    raise ValueError(
                        f"source is a {type(source).__name__}, which cannot be read twice, first to see whether it is "
                        "what was read and then for its passages; give a text, a path, or token ids"
                    )
                check_source(self, source)
            return self._with_evidence(question, source, max_new_tokens, options)
        if source is not None:
            raise ValueError("source is read again only with evidence=True; add that, or leave source out")
        if isinstance(question, Sequence) and not isinstance(question, str):
            if stream:
                raise ValueError("stream=True yields one answer; ask one question, or leave it out")
            return [self.ask(one, max_new_tokens=max_new_tokens, **options) for one in question]
        if stream:
            return self.stream(question, max_new_tokens=max_new_tokens, **options)
        return self.chat().say(question, max_new_tokens=max_new_tokens, **options)

    def _with_evidence(self, question: Any, source: Any, new_tokens: int, options: dict[str, Any]) -> Any:
        if isinstance(question, Sequence) and not isinstance(question, str):
            return [self._with_evidence(one, source, new_tokens, options) for one in question]
        first = answered(self, question, new_tokens, options)
        return (
            self.reread(question, source, first, new_tokens, **options)
            if source is not None and first.flagged
            else first
        )

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
            ValueError: If the source is another text, its passages are no parts of it, or a turn has no room for what
                is to be read again.
        """
        return reread(self, question, source, first, max_new_tokens, options)

    @property
    def system(self) -> str | None:
        """The system message in front of the text."""
        return self._transcript.system

    def stream(self, question: str, *, max_new_tokens: int = LONGEST_ANSWER, **options: Any) -> Iterator[str]:
        """Answer a question from a fork and yield the answer word by word; arguments as for `ask`."""
        return self.chat().stream(question, max_new_tokens=max_new_tokens, **options)

    def chat(self, cache: RetentionCache | None = None) -> Chat:
        """Return a conversation about the context, in a copy of its cache, or in one that has been made already."""
        cache = self.cache.copy() if cache is None else cache
        parts = (self._stream.copy(), self._transcript.copy(), self.name)
        return Chat(self.lm, cache, *parts, sources=self.sources, protection=self.protection)

    def fork(self) -> Context:
        """Return an independent copy."""
        return self._with(self.cache.copy())

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
        return self._with(shrunk(self.cache, budget))

    def _with(self, cache: RetentionCache) -> Context:
        """Return this context with another cache of the same text."""
        parts = (self._stream.copy(), self._transcript.copy(), self.name, self.sources)
        return Context(self.lm, cache, *parts, self.protection)

    def merge(self, *chats: Chat) -> Chat:
        """Return a conversation with what several chats about this context added, one after another.

        Their turns are put onto the context as if each had followed the one before, so that one can ask about all of
        them. Only what the template writes between two turns is read. Neither context nor chats change.

        Args:
            *chats: Two or more chats of this context, or forks of one.

        Raises:
            ValueError: If one of them goes on from something else, or has said nothing.
        """
        from locret.conversation.compose import merge  # it makes contexts

        return merge(self, chats)

    def to_dynamic_cache(self, *, host: bool = False) -> DynamicCache:
        """Return what was kept as an ordinary prefix for other code; see `RetentionCache.to_dynamic_cache`."""
        return self.cache.to_dynamic_cache(host=host)

    def question_ids(self, question: str) -> Tensor:
        """Return the (1, L) token ids that follow the prefix of `to_dynamic_cache`: the question, up to its answer.

        Raises:
            ValueError: For an empty question.
        """
        return torch.tensor([self._stream.copy().rest(self._turn(question))])

    def question_text(self, question: str) -> str:
        """Return the text that follows the prefix, whose tokens `question_ids` returns.

        Raises:
            ValueError: For an empty question.
        """
        return self._stream.pending + self._turn(question)

    def _turn(self, question: str) -> str:
        if not (is_text(question) and question.strip()):
            raise ValueError(f"{question!r} is nothing to answer; give a question as text")
        return self._transcript.copy().ask(question)

    def memory(self) -> CacheMemory:
        """Return planned and counted bytes of the cache."""
        return self.cache.memory()

    def kept_by_message(self) -> list[KeptTurn]:
        """Return what has stayed of each turn: the system message, the document.

        Raises:
            ValueError: If the context was saved by an earlier version, which did not say where they are.

        Examples:
            >>> lm = LongContextModel(model, tokenizer, heads, policy)
            >>> text = "The grass is green. " * 40 + "The pass key is 71432. " + "The sky is blue. " * 40
            >>> context = lm.read(text, system="Answer in one word.", protect="system")
            >>> [one.role for one in context.kept_by_message()]
            ['system', 'document']
            >>> context.kept_by_message()[0].protected
            'all'
        """
        return self.protection.kept(self.cache)

    def save(self, path: str | Path) -> None:
        """Write the context to one file, for `LongContextModel.load`.

        Raises:
            OSError: If the file cannot be written; nothing half-written stays.
        """
        save(path, self.cache, self.name, self._stream, self._transcript, self.sources, self.protection)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        license: str | None = None,
        base_model: str | None = None,
        heads: str | None = None,
        revision: str | None = None,
        commit_message: str = "Upload a context with locret",
        create_pr: bool = False,
    ) -> str:
        """Publish the context as a repository with a card and a picture of what was kept, for `LongContextModel.load`.

        Whoever can read the repository can ask the context about its text, and sees the text's last words.

        Args:
            repo_id: Repository on the Hub, org/name; made if it does not exist.
            private: Make a new repository private.
            license: Licence of the text as the Hub spells it.
            base_model: The backbone on the Hub, for the card; where it was loaded from if that was the Hub.
            heads: The retaining heads on the Hub, for the card.
            revision: Branch to push to, made if it does not exist; main by default.
            commit_message: Message of the commit.
            create_pr: Open a pull request instead of committing.

        Returns:
            The URL of the repository, or of the pull request.

        Raises:
            ValueError: For a name or a licence that the Hub would refuse.
            OSError: If the Hub refuses or cannot be reached.

        Warns:
            UserWarning: If others will see it.
        """
        from locret.conversation.published import publish

        on_hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", self.lm.name) and not Path(self.lm.name).exists()
        with as_arguments(), tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "context.safetensors")
            options = ContextPushOptions(
                context=str(file),
                repo=repo_id,
                private=private,
                license=license,
                base_model=base_model or (self.lm.name if on_hub else None),
                heads=heads,
                revision=revision,
                commit_message=commit_message,
                create_pr=create_pr,
            )
            self.save(file)
            return str(publish(options)["url"])

    def __repr__(self) -> str:
        return described("Context", self)


@contextmanager
def as_arguments() -> Iterator[None]:
    """Name settings in messages as Python's arguments, not as flags."""
    try:
        yield
    except (ValueError, OSError) as error:
        text = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), str(error))
        raise type(error)(text) from error
