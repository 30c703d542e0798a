"""Statements hidden in filler: where they stand, in which order, and how long the text becomes."""

from __future__ import annotations

import random
import re

import pytest
from embedded import tiny_tokenizer

from locret.data.text.filler import Filler
from locret.data.text.haystack import count_tokens, hide, prompt_length

TOKENIZER = tiny_tokenizer()


def hidden(statements: list[str], depths: list[float], tokens: int = 400, question: str = "Where is it?") -> str:
    return hide(
        TOKENIZER,
        statements,
        depths,
        filler=Filler(random.Random(1)),
        tokens=tokens,
        around=lambda text: f"{text}\n{question}",
    )


def test_statements_stand_at_their_depths_whatever_order_they_come_in() -> None:
    depths = [0.8, 0.0, 1.0, 0.4]
    statements = [f"VAR {name} = 1." for name in ("A", "B", "C", "D")]
    text = hidden(statements, depths, tokens=2000)
    for statement, depth in zip(statements, depths, strict=True):
        assert text.count(statement) == 1
        assert text.index(statement) / len(text) == pytest.approx(depth, abs=0.03)
    assert text.startswith(statements[1])
    assert text.endswith(statements[2])


def test_statements_are_never_inside_a_sentence() -> None:
    for seed in range(20):
        statement = f"VAR A = {seed}."
        before, after = hidden([statement], [seed / 20]).split(statement)
        assert not before or re.search(r"[.?!:;] $", before)
        assert not after or re.match(r" [A-Z]", after)


@pytest.mark.parametrize("tokens", range(200, 216))
def test_the_prompt_has_every_length_asked_for_whatever_surrounds_the_text(tokens: int) -> None:
    for question in ("Why?", "What is the value of the first one and what is that of the second one?"):
        text = hidden(["VAR A = 1."], [0.5], tokens, question)
        assert prompt_length(TOKENIZER, f"{text}\n{question}") == tokens


def test_a_prompt_of_exactly_the_statements_has_no_filler_and_one_token_less_is_refused() -> None:
    statement = "VAR A = 1."
    least = prompt_length(TOKENIZER, f"{statement}\nWhere is it?")
    assert hidden([statement], [0.5], least) == statement
    with pytest.raises(ValueError, match=f"tokens={least - 1} cannot hold .* which take {least}; raise tokens"):
        hidden([statement], [0.5], least - 1)


@pytest.mark.parametrize("depth", [-0.1, 1.01, float("nan")])
def test_a_depth_outside_the_text_is_refused(depth: float) -> None:
    with pytest.raises(ValueError, match="is outside the text; give a number from 0"):
        hidden(["VAR A = 1."], [depth])


def test_words_are_counted_without_special_tokens() -> None:
    assert count_tokens(TOKENIZER, "") == 0
    assert count_tokens(TOKENIZER, "Yes. Yes.") == 2 * count_tokens(TOKENIZER, "Yes.")
