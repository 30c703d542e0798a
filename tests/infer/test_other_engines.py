"""The comparison of engines over HTTP: its options, its prompts and its table; engines themselves are run by hand."""

from pathlib import Path

import pytest

from locret import LongContextModel, RetentionPolicy
from locret.engines.prefix import Prefix
from locret.engines.prompts import SavedPrompts
from locret.infer.speed.lab.other_engines import EngineOptions, command, from_context, in_full, page, read_books

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-mib", "8"], "--kv-mib 8 does not hold one full prompt of 8704 tokens, 44,564,480 bytes"),
        (["--questions", "0"], "--questions 0 is too small"),
        (["--contexts", "0"], "--contexts"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        command(arguments)


def test_both_sides_are_asked_the_same(tmp_path):
    policy = RetentionPolicy(budget=48, chunk_size=128, stabilizers=16, local_len=16)
    heads = str(ROOT / "checkpoints/tiny-heads")
    lm = LongContextModel.from_pretrained(ROOT / "checkpoints/tiny", heads=heads, policy=policy)
    (book,) = read_books(lm, tmp_path, 1, 400, 2)
    assert book.prefix.placeholders == Prefix.from_file(tmp_path / "book1-400.ctx").placeholders
    (ids, number) = book.questions[1]
    assert from_context(book, 1) == [*book.prefix.placeholders, *ids]
    text = lm.tokenizer.decode(in_full(book, 1))
    assert number in text and text.endswith("<assistant>")  # noqa: PT018
    assert len(book.ids) == book.prefix.tokens
    question = lm.tokenizer.decode(ids)
    assert (
        SavedPrompts(tmp_path / "book1-400.ctx", lm.tokenizer).question_ids(
            question[question.index("What") : question.index("?") + 1]
        )
        == ids
    )


def test_the_table_of_a_record():
    cell = {"asked": 8, "right": 8, "per_second": 2.5, "seconds": 3.2, "running": 3}
    sides = {
        "ours": {"4 contexts": cell, "first_token": 0.5, "short_first_token": 0.1, "at_once": 99},
        "theirs": {"failed": "it broke"},
    }
    record = {"options": {"contexts": [4]}, "sides": sides, "reading": {"text": 1.0, "short": 0.25}}
    lines = page(record)
    assert "| ours | 2.50 (8/8) |  | 0.500 |  | 99 |" in lines
    assert "| theirs |  |  |  |  |  |" in lines
    assert EngineOptions().contexts == [4, 16]
