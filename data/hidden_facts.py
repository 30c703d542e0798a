"""Facts and how they are hidden: what is stated, what is asked, what is right, and where in the text it goes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from locret.data.filler import Filler

# Two tokens of the embedded vocabulary each: they fill a text to its exact length.
_SHORT_SENTENCES = ("Yes.", "No.", "So.", "Here.", "There.")


@dataclass(frozen=True)
class Fact:
    """A statement of the text that can be asked for; `name` is None for the pass key."""

    name: str | None
    value: str

    @property
    def reply(self) -> str:
        """The sentence that states the fact, in the text and in the answer alike."""
        return f"The pass key is {self.value}." if self.name is None else f"The number of {self.name} is {self.value}."

    @property
    def statement(self) -> str:
        """The sentences hidden in the text."""
        return self.reply + " Remember it." if self.name is None else self.reply


@dataclass(frozen=True)
class Sample:
    """A text, a question about it, and what is right.

    `answer` holds the bare values, joined by one space; `reply` is the whole sentence or sentences a model should say.
    """

    text: str
    question: str
    answer: str
    reply: str = ""

    @property
    def content(self) -> str:
        """The user's turn: the text, then the question on its own line."""
        return f"{self.text}\n{self.question}"

    def is_answered_by(self, generated: str) -> bool:
        """Return whether the numbers in `generated` begin with the right ones, in the order asked for."""
        wanted = self.answer.split()
        return re.findall(r"\d+", generated)[: len(wanted)] == wanted


def ask(facts: Sequence[Fact]) -> str:
    """Return the question whose right answer is the facts' replies in the given order (the pass key first)."""
    names = [fact.name for fact in facts if fact.name is not None]
    questions = ["What is the pass key?"] if len(names) < len(facts) else []
    if len(names) == 1:
        questions.append(f"What is the number of {names[0]}?")
    elif names:
        questions.append(f"What are the numbers of {', '.join(names)}?")
    return " ".join(questions)


def count_tokens(tokenizer: Any, text: str) -> int:
    """Return the tokens of a piece of text, without special tokens."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def prompt_length(tokenizer: Any, content: str) -> int:
    """Return the tokens of the whole chat prompt that has `content` as its only user turn."""
    messages = [{"role": "user", "content": content}]
    return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])


def hide_facts(
    tokenizer: Any, facts: Sequence[Fact], depths: Sequence[float], *, filler: Filler, tokens: int, question: str
) -> str:
    """Return a text in which fact i starts at share `depths[i]` of the filler, as long as the whole chat prompt allows.

    Args:
        tokenizer: Any tokenizer with a chat template.
        facts: What to hide.
        depths: For each fact 0 (first sentence) to 1 (last sentence).
        filler: Where the other sentences come from.
        tokens: Length of the whole chat prompt (text, question, template), never exceeded.
        question: The question that will follow the text; here only its length counts.

    Raises:
        ValueError: Where a depth is outside 0 to 1, or the facts and the question alone are longer than `tokens`.
    """
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth={depth} is outside the text; give a number from 0 (start) to 1 (end)")
    sentences: list[str] = []

    def length() -> int:
        return prompt_length(tokenizer, f"{_insert(sentences, facts, depths)}\n{question}")

    used = length()
    if used > tokens:
        raise ValueError(f"tokens={tokens} cannot hold the facts and the question, which take {used}; raise tokens")
    while used < tokens:
        sentences.append(filler.sentence())
        used += count_tokens(tokenizer, " " + sentences[-1])
    while (used := length()) > tokens:
        sentences.pop()
    while tokens - used >= (cost := count_tokens(tokenizer, " " + (short := filler.rng.choice(_SHORT_SENTENCES)))):
        sentences.append(short)
        used += cost
    if used < tokens and sentences:  # one token is missing: "Yes." becomes "And yes."
        sentences[-1] = f"And {sentences[-1][0].lower()}{sentences[-1][1:]}"
    filler.rng.shuffle(sentences)  # or short sentences would mark the end of every text
    while length() > tokens:  # only tokenizers that join tokens across sentences need this
        sentences.pop()
    return _insert(sentences, facts, depths)


def _insert(sentences: Sequence[str], facts: Sequence[Fact], depths: Sequence[float]) -> str:
    """Put each fact before the sentence at its share of the characters; facts at one place keep their order."""
    total = sum(len(sentence) + 1 for sentence in sentences)
    waiting = sorted(range(len(facts)), key=lambda index: depths[index])
    pieces: list[str] = []
    written = 0
    for sentence in sentences:
        while waiting and depths[waiting[0]] * total <= written:
            pieces.append(facts[waiting.pop(0)].statement)
        pieces.append(sentence)
        written += len(sentence) + 1
    pieces.extend(facts[index].statement for index in waiting)
    return " ".join(pieces)
