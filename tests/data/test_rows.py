"""Every schema gives the same Row, and a row that cannot be used says why."""

from __future__ import annotations

import pytest

from locret.conversation.templates import Message
from locret.data.training.rows import Row, detect_schema, read_row

QUESTION_AND_ANSWER = Row((Message("user", "Who?"),), "Me.")
CHAT = [("system", "Be kind."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Who?"), ("assistant", "Me.")]


def read(record, row=3):
    return read_row(record, detect_schema(record, "rows.json"), where=f"rows.jsonl:{row}")


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Who?", "output": "Me.", "input": None, "file": None},
        {"instruction": "Who?", "output": "Me.", "input": "", "file": "x.pdf"},
        {"instruction": "Who?", "output": "Me."},
        {"id": "1", "conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]},
        {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}], "length": 9},
        {"messages": {"role": ["user", "assistant"], "content": ["Who?", "Me."]}},
        {"prompt": "Who?", "answer": "Me."},
        {"prompt": "Who?", "response": "Me."},
        {"prompt": "Who?", "completion": "Me."},
    ],
)
def test_every_schema_gives_prompt_and_answer(record):
    assert read(record) == QUESTION_AND_ANSWER
    assert read(record).prompt == "Who?"


def test_alpaca_input_follows_the_instruction():
    assert read({"instruction": "Add.", "input": "1 2", "output": "3"}).prompt == "Add.\n1 2"


def test_anti_haystack_puts_the_document_before_the_question():
    assert read({"document": "A text.", "question": "Who?", "answer": "Me."}).prompt == "A text.\n\nWho?"


@pytest.mark.parametrize("trailing", [[], [("user", "Thanks.")]])
def test_all_turns_before_the_last_answer_are_the_prompt(trailing):
    messages = [{"role": role, "content": text} for role, text in CHAT + trailing]
    row = read({"messages": messages})
    assert row.chat() == messages[:4]
    assert row.answer == "Me."


def test_messages_win_over_a_prompt_column_beside_them():
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    assert read({"prompt": "copy", "answer": "copy", "messages": messages}) == QUESTION_AND_ANSWER


@pytest.mark.parametrize(
    "record",
    [
        {"text": "Who?"},
        {"instruction": "Who?", "output": ""},
        {"prompt": "Who?", "answer": None},
        {"messages": [{"role": "user", "content": "Who?"}]},
        {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": ""}]},
    ],
)
def test_a_row_without_an_answer_is_read_only_where_none_is_needed(record):
    schema = detect_schema(record, "rows.json")
    row = read_row(record, schema, where="rows.jsonl:3", answer_needed=False)
    assert row == Row((Message("user", "Who?"),), "")
    with pytest.raises(ValueError, match="rows.jsonl:3 has no answer"):
        read(record)


def test_unknown_columns_list_what_was_found_and_what_is_accepted():
    with pytest.raises(ValueError) as caught:
        detect_schema(["body", "label"], "rows.json")
    message = str(caught.value)
    assert message.startswith(
        "--dataset rows.json: columns 'body', 'label' fit no known schema; rename them to one of: "
    )
    for accepted in (
        "messages (list",
        "conversations (list",
        "document, question",
        "instruction, output",
        "prompt, and",
        "text, for --label-source reconstruction",
    ):
        assert accepted in message


@pytest.mark.parametrize(
    ("record", "reason", "sentence"),
    [
        (
            {"instruction": "Who?", "output": None},
            "no answer",
            "has no answer (LongAlpaca schema, instruction, output, optional input); mend or drop the row",
        ),
        ({"prompt": "Who?", "answer": " \n"}, "no answer", "has no answer (prompt/answer schema, prompt, and one of"),
        ({"messages": [{"role": "user", "content": "Who?"}]}, "no answer", "has no answer (messages schema"),
        ({"conversations": None}, "no answer", "has no answer (ShareGPT schema, conversations (list of from, value))"),
        (
            {"document": " ", "question": "Who?", "answer": "Me."},
            "empty context",
            "has an empty field 'document'; mend or drop the row",
        ),
        (
            {"prompt": "a\ud83d", "answer": "Me."},
            "invalid UTF-8",
            "has half a surrogate pair at character 1 of field 'prompt', which is not UTF-8",
        ),
        ({"prompt": "", "answer": "Me."}, "empty prompt", "has an empty prompt (prompt/answer schema"),
        ({"messages": [{"role": "assistant", "content": "Me."}]}, "empty prompt", "has an empty prompt (messages"),
        ({"prompt": 7, "answer": "Me."}, "wrong type", "has a field 'prompt' of type int where text is needed"),
        ({"messages": "Who?"}, "wrong type", "has a field 'messages' that is not a list of role/content objects"),
        ({"messages": {"role": "user", "content": "Who?"}}, "wrong type", "has a field 'messages' that is not a"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "unknown role",
            "has the role 'tool' in field 'messages' where one of user,",
        ),
    ],
)
def test_an_unusable_row_names_data_set_row_field_and_way_out(record, reason, sentence):
    with pytest.raises(ValueError) as caught:
        read(record)
    message = str(caught.value)
    assert message.startswith("rows.jsonl:3 has ")
    assert sentence in message
    assert message.endswith("or pass --skip-bad-rows to leave out such rows")
    assert caught.value.reason == reason
