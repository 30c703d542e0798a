"""One training row, whatever schema its data set has: chat messages before the answer, and the answer.

Schemas are told apart by their column names alone; `SCHEMAS` is the only list of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from locret.conversation.turns import Message
from locret.data.training.sources import BadRow

ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "system": "system",
}


@dataclass(frozen=True)
class Row:
    """Everything before the last assistant turn, and that turn."""

    messages: tuple[Message, ...]
    answer: str
    asked: tuple[tuple[str, str], ...] = ()
    """Questions about the last message, each asked as if it were the only one, with their answers."""


@dataclass(frozen=True)
class Schema:
    """A row layout: its name, the columns that tell it, and how a record becomes messages ending with the answer."""

    name: str
    columns: str
    needed: set[str]
    turns: Callable[[Mapping[str, Any]], list[Message]]
    """Of a record."""
    asked: Callable[[Mapping[str, Any]], tuple[tuple[str, str], ...]] | None = None
    """The questions of a record that are each asked by themselves; None where a row has turns of a conversation."""


def detect_schema(columns: Iterable[str], source: str) -> Schema:
    """Find the schema of a data set from its column names."""
    found = list(columns)
    for schema in SCHEMAS:
        if schema.needed <= set(found):
            return schema
    accepted = "; ".join(f"{schema.name}: {schema.columns}" for schema in SCHEMAS)
    raise ValueError(
        f"--dataset {source}: columns {', '.join(map(repr, found)) or '(none)'} fit no known schema; "
        f"rename them to one of: {accepted}"
    )


def read_row(record: Mapping[str, Any], schema: Schema) -> Row:
    """Turn one record into a Row.

    Turns after the last assistant turn are left out: nothing answers them.

    Raises:
        BadRow: Naming the field, if the answer, the prompt or the document is missing or empty, or a field has the
            wrong type or is not UTF-8.
    """
    turns = schema.turns(record)
    answers = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    if not answers or not turns[answers[-1]].content.strip():
        raise BadRow("no answer", f"has no answer ({schema.name} schema, {schema.columns})")
    messages = tuple(turns[: answers[-1]])
    if not any(message.role == "user" and message.content.strip() for message in messages):
        raise BadRow("empty prompt", f"has an empty prompt ({schema.name} schema, {schema.columns})")
    asked = () if schema.asked is None else schema.asked(record)
    return Row(messages, turns[answers[-1]].content, asked)


def _text(record: Mapping[str, Any], field: str) -> str:
    """Return a field as text; a null or absent one is empty, as `input` is on LongAlpaca's long rows."""
    value = record.get(field)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadRow("wrong type", f"has a field {field!r} of type {type(value).__name__} where text is needed")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = f"has half a surrogate pair at character {error.start} of field {field!r}, which is not UTF-8"
        raise BadRow("invalid UTF-8", detail) from None
    return value


def _one_turn(separator: str, *fields: str) -> Callable[[Mapping[str, Any]], list[Message]]:
    """Return how fields, of which the last is the answer, become one turn and its answer."""

    def turns(record: Mapping[str, Any]) -> list[Message]:
        *asked, answer = (_text(record, name) for name in fields)
        if "document" in fields:
            _document(record)
        return [Message("user", separator.join(part for part in asked if part.strip())), Message("assistant", answer)]

    return turns


def _document(record: Mapping[str, Any]) -> str:
    document = _text(record, "document")
    if not document.strip():
        raise BadRow("empty context", "has an empty field 'document'")
    return document


def _questions(record: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    given = _objects(record.get("questions"), "questions", "question/answer")
    if not given:
        raise BadRow("wrong type", "has a field 'questions' without a question")
    pairs = tuple((_text(one, "question"), _text(one, "answer")) for one in given)
    if not all(question.strip() and answer.strip() for question, answer in pairs):
        raise BadRow("no answer", "has a question without text or answer in field 'questions'")
    return pairs


def _shared_turns(record: Mapping[str, Any]) -> list[Message]:
    """Return the turns of a document with its last question: what a row is where questions are not asked apart."""
    document, system = _document(record), _text(record, "system")
    question, answer = _questions(record)[-1]
    before = [Message("system", system)] if system.strip() else []
    return [*before, Message("user", f"{document}\n{question}"), Message("assistant", answer)]


def _list_turns(field: str, role_key: str, content_key: str) -> Callable[[Mapping[str, Any]], list[Message]]:
    def turns(record: Mapping[str, Any]) -> list[Message]:
        if record.get(field) is None:
            return []
        given = _objects(record[field], field, f"{role_key}/{content_key}")
        return [_message(turn, field, role_key, content_key) for turn in given]

    return turns


def _objects(value: Any, field: str, kind: str) -> list[Mapping[str, Any]]:
    """Return a list of objects; `datasets` keeps an old Sequence of structs as a struct of lists."""
    columns = list(value.values()) if isinstance(value, Mapping) else []
    if columns and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
        value = [dict(zip(value, one, strict=True)) for one in zip(*columns, strict=True)]
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise BadRow("wrong type", f"has a field {field!r} that is not a list of {kind} objects")
    return value


def _message(turn: Mapping[str, Any], field: str, role_key: str, content_key: str) -> Message:
    role = ROLES.get(_text(turn, role_key).lower())
    if role is None:
        found = f"has the {role_key} {turn.get(role_key)!r} in field {field!r}"
        raise BadRow("unknown role", f"{found} where one of {', '.join(ROLES)} is needed")
    return Message(role, _text(turn, content_key))


# The first that fits wins: a data set with `messages` often carries `prompt` too, as a copy.
SCHEMAS = (
    Schema("messages", "messages (list of role, content)", {"messages"}, _list_turns("messages", "role", "content")),
    Schema(
        "ShareGPT",
        "conversations (list of from, value)",
        {"conversations"},
        _list_turns("conversations", "from", "value"),
    ),
    Schema(
        "shared document",
        "document, questions (list of question, answer), optional system",
        {"document", "questions"},
        _shared_turns,
        _questions,
    ),
    # Document first: a retaining head is trained to keep what a later question needs.
    Schema(
        "Anti-Haystack",
        "document, question, answer",
        {"document", "question", "answer"},
        _one_turn("\n\n", "document", "question", "answer"),
    ),
    Schema(
        "LongAlpaca",
        "instruction, output, optional input",
        {"instruction", "output"},
        _one_turn("\n", "instruction", "input", "output"),
    ),
    *(
        Schema(f"prompt/{answer}", f"prompt, {answer}", {"prompt", answer}, _one_turn("", "prompt", answer))
        for answer in ("answer", "response", "completion")
    ),
)
