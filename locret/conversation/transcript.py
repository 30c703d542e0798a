"""A conversation about a document as text: what each turn adds to what has been read.

The document is part of the first user turn, in front of the first question, and is itself never held: a mark stands for
it. What a turn adds is what the template writes after that mark, or after the last answer, up to where the assistant
speaks. So template tokens are right whatever the template does between turns. Templates that write earlier turns
otherwise once a conversation goes on (they move the system message, or drop reasoning) contradict what has been read;
that is said once.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from locret.conversation.templates import Message, check_template, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Letters and digits only, so that no template trims, escapes or rewrites them.
DOCUMENT, ANSWER = "LocretDocument7f3a9c", "LocretAnswer7f3a9c"
_REWRITTEN = (
    "the tokenizer's chat template writes earlier turns otherwise once a conversation goes on (it moves the system "
    "message, say, or drops reasoning); what has been read stays as it was read"
)


class Transcript:
    """The turns about a document, and what each adds.

    Args:
        tokenizer: Gives the chat template.
        template: One of `locret.conversation.templates.TEMPLATES`.
        system: System message; the template's own default if None. Where a template has no such role, it opens the
            first user turn.
        turns: What was said before: user and assistant in turns.

    Raises:
        ValueError: For a template that does not exist or is missing.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        system: str | None = None,
        turns: tuple[Message, ...] = (),
    ) -> None:
        check_template(tokenizer, template)
        self.tokenizer, self.template, self.system, self.turns = tokenizer, template, system, turns

    def copy(self) -> Transcript:
        """Return a transcript that goes its own way."""
        return Transcript(self.tokenizer, self.template, self.system, self.turns)

    def opening(self) -> str:
        """Return the text before the document.

        Raises:
            ValueError: If the template refuses the turns, or writes the document twice or not at all.
        """
        return self.around(None)[0]

    def system_end(self) -> int:
        """Return how many characters of the text before the document are the system turn; 0 without one."""
        if self.system is None:
            return 0
        opening = self.opening()
        if self.template == "chat":
            try:  # with what the template writes at its end
                alone = self.tokenizer.apply_chat_template(
                    [Message("system", self.system)._asdict()], tokenize=False, add_generation_prompt=False
                )
            except Exception:  # whatever a stranger's template does
                alone = ""
            if alone and opening.startswith(alone):
                return len(alone)
        said = self.system.strip()
        found = opening.find(said)
        return found + len(said) if found >= 0 else 0

    def around(self, question: str | None) -> tuple[str, str]:
        """Return the text before and after the document, up to where the assistant answers the question about it.

        Raises:
            ValueError: If the template refuses the turns, or writes the document twice or not at all.
        """
        text = self._render((Message("user", DOCUMENT if question is None else f"{DOCUMENT}\n\n{question}"),))
        before, mark, after = text.partition(DOCUMENT)
        if not mark or after.count(DOCUMENT) != (question or "").count(DOCUMENT):
            raise ValueError(
                f"--template {self.template}: the tokenizer's chat template writes the user's text "
                f"{text.count(DOCUMENT)} times, so a document cannot be streamed through it; use --template original "
                "or --template none"
            )
        return before, after

    def ask(self, text: str | None) -> str:
        """Take a user's turn and return what it adds, up to where the assistant answers.

        Args:
            text: What is asked; None: the document is the whole first turn.

        Raises:
            ValueError: If the template refuses the turns.
        """
        first = DOCUMENT if text is None else f"{DOCUMENT}\n\n{text}"
        turns = (*self.turns, Message("user", text or "" if self.turns else first))
        if not self.turns:
            before, added = self.around(text)
            agrees = before == self.opening()
        else:
            mark = self._unused(ANSWER, turns[-1].content)
            before, _, added = self._render((*turns[:-2], Message("assistant", mark), turns[-1])).rpartition(mark)
            agrees = before.rstrip() == self._render(turns[:-2]).rstrip()
            agrees = agrees and turns[-2].content.strip() in self._render(turns)
        if not agrees and self.template == "chat":
            warnings.warn(_REWRITTEN, stacklevel=3)
        self.turns = turns
        return added

    def answered(self, text: str) -> None:
        """Take the assistant's turn; templates write white space around it themselves."""
        self.turns = (*self.turns, Message("assistant", text if self.template == "none" else text.strip()))

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as transformers takes it, without the document."""
        said = [
            turn._replace(content=turn.content.removeprefix(DOCUMENT).removeprefix("\n\n")) for turn in self.turns[:1]
        ]
        system = [] if self.system is None else [Message("system", self.system)]
        return [message._asdict() for message in (*system, *said, *self.turns[1:])]

    def _render(self, turns: tuple[Message, ...]) -> str:
        if self.system is None:
            return render(self.tokenizer, turns, self.template)
        try:
            return render(self.tokenizer, (Message("system", self.system), *turns), self.template)
        except ValueError:
            first = turns[0]._replace(content=f"{self.system}\n\n{turns[0].content}")
            return render(self.tokenizer, (first, *turns[1:]), self.template)

    def _unused(self, mark: str, text: str) -> str:
        while any(mark in said for said in (text, *(turn.content for turn in self.turns))):
            mark += "0"
        return mark
