"""A text that is its own answer: what is read, what is asked and what is answered."""

from __future__ import annotations

import pytest
import torch
from embedded import tiny_tokenizer

from locret.conversation.templates import Message
from locret.data.training.reconstruction import REQUEST, reconstruction
from locret.data.training.rows import Row
from locret.data.training.stream import TrainingStream

TOKENIZER = tiny_tokenizer()


def stream(rows: list[dict[str, str]], **options: object) -> TrainingStream:
    return TrainingStream(rows, TOKENIZER, seed=0, max_length=64, reconstruct=True, **options)  # type: ignore[arg-type]


def test_the_text_comes_first_then_the_request_then_the_text_again() -> None:
    example = next(stream([{"text": "The door is red."}]))
    prompt, answer = (TOKENIZER.decode(ids[0]) for ids in (example.prompt_ids, example.answer_ids))
    assert prompt == f"<bos> <user> The door is red.\n\n{REQUEST} <eos> <assistant>"
    assert answer == "The door is red. <eos>"
    copy = example.answer_ids[0, :-1]
    assert torch.equal(example.prompt_ids[0, 2 : 2 + len(copy)], copy)


def test_the_answer_of_a_row_is_not_used() -> None:
    answered = next(stream([{"instruction": "The door is red.", "output": "Yes."}]))
    alone = next(stream([{"text": "The door is red."}]))
    assert torch.equal(answered.prompt_ids, alone.prompt_ids)
    assert torch.equal(answered.answer_ids, alone.answer_ids)


def test_a_conversation_is_one_text_and_a_system_message_stays() -> None:
    turns = [("system", "Be kind."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Who?")]
    row = reconstruction(Row(tuple(Message(*turn) for turn in turns), "Me."))
    text = "Hi.\n\nHello.\n\nWho?"
    assert row == Row((Message("system", "Be kind."), Message("user", f"{text}\n\n{REQUEST}")), text)


def test_a_text_that_fits_only_once_is_refused() -> None:
    with pytest.raises(ValueError, match=r"row 0 .* has \d+ prompt and \d+ answer tokens, together longer than the"):
        next(stream([{"text": "The door is red. " * 8}]))


def test_an_empty_text_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"row 1 .* has an empty prompt \(text schema"):
        stream([{"text": "The door is red."}, {"text": " "}]).check_rows()
