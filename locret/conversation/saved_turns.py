"""How a saved context or conversation goes on, from the notes of its file: its turns, its sources, its protection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.base.fields import checked_values
from locret.cache.cache_file import CONTEXT_WRITERS, read_notes
from locret.conversation.document import Source, is_text
from locret.conversation.templates import Message, vocabulary_fingerprint
from locret.conversation.text_stream import LONGEST_PENDING, TokenStream
from locret.conversation.transcript import Transcript
from locret.conversation.turns import Protection, protection_from

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def saved_turns(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, vocabulary: int
) -> tuple[TokenStream, Transcript, str, tuple[int, ...]]:
    """Return how a saved context or conversation goes on, without its units.

    Args:
        path: The file.
        tokenizer: The one that it was made with.
        vocabulary: Token ids there are.

    Returns:
        How its text goes on, what has been said, what it is called, and the tokens that its cache does not hold yet.

    Raises:
        ValueError: If the file is none, is damaged, or was made with another tokenizer.
    """
    notes = read_notes(path, CONTEXT_WRITERS).get("conversation")
    if notes is None:
        raise ValueError(f"{path} was not saved by a context or a chat; read it with locret.load_cache")
    check_notes(notes, path, vocabulary)
    # Files of earlier versions do not say.
    if notes.get("tokenizer", ours := vocabulary_fingerprint(tokenizer)) != ours:
        raise ValueError(f"{path} was made with another tokenizer, to which its text is other tokens; use that one")
    turns = tuple(Message(role, content) for role, content in notes["turns"])
    transcript = Transcript(tokenizer, notes["template"], notes["system"], turns)
    stream = TokenStream(tokenizer, context=notes["context"], pending=notes["pending"])
    return stream, transcript, notes["name"], tuple(notes["unread"])


def saved_sources(path: str | Path) -> tuple[Source, ...]:
    """Return what a saved context or conversation was read from; nothing for files of earlier versions.

    Raises:
        ValueError: If the file is none, or what it says cannot be right.
    """
    notes = read_notes(path, CONTEXT_WRITERS).get("conversation")
    given = notes.get("sources", []) if isinstance(notes, dict) else []
    try:
        return tuple(Source(**checked_values(Source, one, "sources")) for one in given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}; save it again") from error


def saved_protection(path: str | Path) -> Protection:
    """Return what a saved context or conversation protects, and where its turns are.

    Raises:
        ValueError: If the file is none, or what it says cannot be right.
    """
    notes = read_notes(path, CONTEXT_WRITERS).get("conversation")
    try:
        return protection_from(notes if isinstance(notes, dict) else {})
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; save it again") from error


def check_notes(notes: Any, path: str | Path, vocabulary: int) -> None:
    """Refuse what a context would not have written.

    Raises:
        ValueError: Naming what is wrong.
    """

    def is_token(one: Any) -> bool:
        return type(one) is int and 0 <= one < vocabulary

    checks: dict[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("name", "template"), lambda value: isinstance(value, str)),
        **dict.fromkeys(("context", "pending"), lambda value: is_text(value) and len(value) <= LONGEST_PENDING),
        "system": lambda value: value is None or is_text(value),
        "turns": _are_turns,
        "unread": lambda value: isinstance(value, list) and all(map(is_token, value)),
    }
    for name, fits in checks.items():
        if not isinstance(notes, dict) or name not in notes or not fits(notes[name]):
            raise ValueError(f"{path} is damaged: its conversation has no {name} that could be right; save it again")


def _are_turns(value: Any) -> bool:
    if not isinstance(value, list) or len(value) % 2:
        return False
    roles = ("user", "assistant")
    return all(
        isinstance(turn, list) and len(turn) == 2 and turn[0] == roles[nth % 2] and is_text(turn[1])
        for nth, turn in enumerate(value)
    )
