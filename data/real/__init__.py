"""Real texts and people's questions about them, with the sentences that answer them; see README.md for licences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from locret.data.training.text_rows import flat, people_asked

FOLDER = Path(__file__).parent
UNTIL = 0.6
"""Share of a file with questions that heads may be trained on, from its beginning."""
UNSEEN = "postgres_glossary"
SETS = (UNSEEN, "python_glossary", "python_faq", "sqlite_faq")
"""Sets of questions; of the first one, nothing is trained on."""


@dataclass(frozen=True)
class Asked:
    """A question, and the sentence that answers it."""

    question: str
    answer: str


@dataclass(frozen=True)
class Piece:
    """A piece of a text, and the questions whose answers stand in it."""

    text: str
    tokens: int
    asked: tuple[Asked, ...]


def texts() -> Path:
    return FOLDER / "texts"


def readable(tokenizer: Any) -> bool:
    """Return whether a tokenizer is fast and can write English text back as it was."""
    text = (texts() / "sqlite_docs" / "faq.txt").read_text(encoding="utf-8", errors="replace")[:2000].strip()
    if not getattr(tokenizer, "is_fast", False):
        return False
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return bool(tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip() == text)


@cache
def _questions(name: str) -> tuple[dict[str, Any], ...]:
    file = FOLDER / "questions" / f"{name}.jsonl"
    return tuple(json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())


def pieces(name: str, tokenizer: Any, tokens: int, *, seen: bool = False) -> list[Piece]:
    """Return the pieces of a set's texts of so many tokens, white space folded, that have questions.

    The last piece of a text has half as many tokens or more. `seen` are of the parts that heads may be trained on.
    """
    found = []
    for file in dict.fromkeys(one["context"] for one in _questions(name)):
        raw = (texts() / file).read_text(encoding="utf-8", errors="replace")
        until = 0 if name == UNSEEN else int(UNTIL * len(raw))
        text = flat(raw[:until] if seen else raw[until:])
        questions = [one for one in _questions(name) if one["context"] == file]
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        places = encoded["offset_mapping"]
        for start in range(0, len(places), tokens):
            end = min(start + tokens, len(places))
            if end - start < tokens // 2 and start:
                break
            own = text[places[start][0] : places[end - 1][1]]
            asked = tuple(Asked(one["question"], one["answer"]) for one in people_asked(own, questions))
            if asked:
                found.append(Piece(own, end - start, asked))
    return found
