"""What each task asks in its benchmark's form."""

from __future__ import annotations

import re
from typing import Any

import pytest
from embedded import tiny_tokenizer

from locret.data import tasks

TOKENIZER = tiny_tokenizer()
ALL = tasks.names()


def sample(name: str, tokens: int = 512, **options: Any) -> Any:
    return tasks.get(name).sample(TOKENIZER, tokens, **options)


@pytest.mark.parametrize("name", ALL)
def test_the_question_and_introduction_do_not_tell_the_answer(name: str) -> None:
    one = sample(name)
    assert not [target for target in one.targets if target in tasks.get(name).introduction + one.question]


@pytest.mark.parametrize("name", ["passkey", "number", "multikey"])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_needle_is_at_its_depth(name: str, depth: float) -> None:
    one = sample(name, 1500, depth=depth, seed=3)
    where = one.document.index(one.targets[0]) / len(one.document)
    assert one.depths[0] == depth
    assert abs(where - depth) < 0.12


@pytest.mark.parametrize(("name", "count"), [("passkey", 1), ("number", 1), ("multikey", 1)])
def test_targets_are_what_the_form_says(name: str, count: int) -> None:
    digits = {"passkey": 5, "number": 10, "multikey": 7}
    one = sample(name)
    assert len(set(one.targets)) == count
    assert all(re.fullmatch(rf"[1-9]\d{{{digits[name] - 1}}}", target) for target in one.targets)


def test_multikey_hides_eight_keys_of_its_own_and_options_change_them() -> None:
    def needles(**options: Any) -> list[str]:
        one = tasks.get("multikey", **options).sample(TOKENIZER, 900)
        return re.findall(r"special magic numbers for (\w+) is: (\d+)", one.document)

    assert len(dict(needles())) == len(needles()) == 8
    found = needles(keys=12, digits=4)
    assert len(dict(found)) == 12
    assert {len(number) for _, number in found} == {4}


@pytest.mark.parametrize("name", ALL)
def test_the_reply_fits_into_the_answer(name: str) -> None:
    longest = max(len(TOKENIZER(sample(name, seed=seed).reply)["input_ids"]) for seed in range(10))
    assert longest + 1 <= tasks.get(name).max_new_tokens, "and one more token to end the turn"


@pytest.mark.parametrize("name", ALL)
def test_records_can_say_what_was_measured(name: str) -> None:
    task = tasks.get(name)
    assert task.version >= 1
    assert task.source
    assert task.metric
    assert all(isinstance(value, int) for value in task.options().values())


@pytest.mark.parametrize("name", [name for name in ALL if all(target.isdigit() for target in sample(name).targets)])
def test_keeping_every_digit_takes_more_than_twice_a_budget_of_256(name: str) -> None:
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER(sample(name, 8192).content)["input_ids"])
    assert sum(re.search(r"\d", token) is not None for token in tokens) > 2 * 256
