"""Training rows that ask for many facts: every answer is in the text, and evaluation's keys are never seen."""

from __future__ import annotations

import re

import pytest
from embedded import tiny_tokenizer

from locret.data import tasks
from locret.data.tasks.generated.mixture import mixture
from locret.data.text.haystack import prompt_length
from locret.data.text.words import NAMES, VARIABLES

TOKENIZER = tiny_tokenizer()
ALL = tasks.names()


def keys(text: str) -> set[str]:
    """Return the names and variables that statements in a text are about."""
    return {*re.findall(r"special magic numbers for (\w+) is:", text), *re.findall(r"VAR (\w+) =", text)}


def test_the_reply_restates_what_the_text_says() -> None:
    for seed in range(10):
        row = mixture(TOKENIZER, ALL, 1024, seed=seed)
        for key, number in re.findall(r"for (\w+) is: (\d+)[,.]", row.reply):
            assert f"numbers for {key} is: {number}." in row.document
        for number in re.findall(r"The (?:pass key|sequence of digits) is (\d+)\.", row.reply):
            assert f"is {number}. Remember it." in row.document
        for source, name in re.findall(r"= ([\w ]+): (\w+)[,.]", row.reply):
            assert f"VAR {name} = {source}." in row.document


@pytest.mark.slow
def test_training_keys_are_never_asked_in_evaluation() -> None:
    rows = [mixture(TOKENIZER, ALL, 2048, seed=seed) for seed in range(10)]
    trained = set.union(*(keys(row.document) for row in rows))
    evaluated = set.union(
        *(
            keys(tasks.get(name).sample(TOKENIZER, 512, seed=seed).document)
            for name in ("multikey", "multivalue", "variable_tracking")
            for seed in range(20)
        )
    )
    assert len(trained) > 40
    assert not trained & evaluated


def test_evaluation_rows_use_the_other_half_of_the_keys() -> None:
    found = set.union(*(keys(mixture(TOKENIZER, ALL, 1024, seed=s, split="eval").document) for s in range(10)))
    assert found <= {*NAMES[1::2], *VARIABLES[1::2]}


def test_no_key_names_two_things_in_one_text() -> None:
    for seed in range(20):
        row = mixture(TOKENIZER, ALL, 2048, seed=seed)
        asked = re.findall(r"number for (\w+) mentioned", row.question)
        assert len(asked) == len(set(asked))
        assert not set(asked) & set(re.findall(r"all the special magic numbers for (\w+)", row.question))
        for key in asked:
            assert row.document.count(f"numbers for {key} is:") == 1
        variables = re.findall(r"VAR (\w+) =", row.document)
        assert len(variables) == len(set(variables))
        assert all(
            row.document.count(once) <= 1 for once in ("The pass key is", "The sequence of digits is", "The Dict is")
        )


@pytest.mark.parametrize("tokens", [300, 512, 1024, 4096])
def test_rows_never_exceed_their_length(tokens: int) -> None:
    for seed in range(5):
        assert prompt_length(TOKENIZER, mixture(TOKENIZER, ALL, tokens, seed=seed).content) <= tokens


def test_more_density_asks_for_more() -> None:
    few, many = (
        sum(len(mixture(TOKENIZER, ALL, 2048, seed=s, density=d).targets) for s in range(8)) for d in (0.1, 0.6)
    )
    assert many > 2 * few
