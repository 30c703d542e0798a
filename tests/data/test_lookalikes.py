"""Tasks on which eviction alone fails: what their texts hold besides the facts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from locret.data import tasks
from locret.data.tasks.generated.mixture import mixture, quiz
from locret.data.tasks.published import suites
from locret.data.tasks.task import Wanted
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.data.text.filler import FillerOptions
from locret.data.text.haystack import prompt_length

TOKENIZER = build_tokenizer()
ALL = tasks.names("lookalikes")


def sample(name: str, tokens: int = 2048, **options: Any) -> Any:
    return tasks.get(name, **options).sample(TOKENIZER, tokens, depth=0.5, seed=3)


@pytest.mark.parametrize("name", ALL)
def test_a_sample_depends_on_its_seed_alone_fills_its_length_and_its_reply_is_right(name: str) -> None:
    task, one = tasks.get(name), sample(name)
    assert one == sample(name)
    assert one.document != task.sample(TOKENIZER, 2048, depth=0.5, seed=4).document
    assert prompt_length(TOKENIZER, one.content) == 2048
    assert task.score(one.reply, one) == 1.0
    assert task.score("The pass key is 11111.", one) == 0.0
    assert all(target in one.document for target in one.targets)
    assert len(TOKENIZER(one.reply)["input_ids"]) < task.max_new_tokens
    task.check(TOKENIZER)


def test_they_are_asked_by_name_and_are_no_rows_of_training() -> None:
    assert not set(ALL) & set(tasks.names())
    assert {tasks.get(name).family for name in ALL} == {"generated"}  # 100 samples, made here, at any length


def test_one_of_32_keys_is_asked() -> None:
    keys = re.findall(r"special magic numbers for (\w+) is: \d{7}\.", sample("lookalikes/keys").document)
    assert len(keys) == len(set(keys)) == 32


def test_needles_of_the_filler_are_about_other_things_than_those_of_the_task() -> None:
    one = sample("lookalikes/needles")
    facts = re.findall(r"special magic numbers for (\w+) is: (\d{7})\.", one.document)
    others = re.findall(r"special magic numbers for the \w+ is: (\d{7})\.", one.document)
    assert len(facts) == 8
    assert len(others) > 4 * len(facts)
    assert one.targets[0] not in others


def test_the_pass_key_stands_once_among_assignments_of_as_many_digits() -> None:
    one = sample("lookalikes/assignments")
    others = re.findall(r"(?:VAR \w+ =|The \w+ key is:|The \w+ =|The number of \w+:) (\d{5})\.", one.document)
    assert len(others) > 10
    assert one.targets[0] not in others
    assert one.document.count("The pass key is") == 1


def test_numbers_of_as_many_digits_are_everywhere_but_one_sequence_is_asked() -> None:
    one = sample("lookalikes/numbers")
    assert len(re.findall(r"\d{10}", one.document)) > 60
    assert one.document.count("The sequence of digits is") == 1


@pytest.mark.parametrize("name", ALL[1:])
def test_more_look_alikes_can_be_asked_for_but_no_more_than_all_sentences(name: str) -> None:
    few, all_of_them = (len(re.findall(r"\d{5,}", sample(name, percent=p).document)) for p in (1, 100))
    assert all_of_them > 2 * few
    with pytest.raises(ValueError, match=f"task {name}: percent=101 is more than all sentences; give 1 to 100"):
        tasks.get(name, percent=101)


@pytest.mark.parametrize("name", suites.get("world").tasks)
def test_every_task_can_have_filler_with_the_marks_and_words_of_facts(name: str) -> None:
    plain, one = sample(name, 1536), sample(name, 1536, lookalikes=100)
    assert (one.targets, one.question, one.reply) == (plain.targets, plain.question, plain.reply)
    assert tasks.get(name, lookalikes=100).score(one.reply, one) == 1.0
    numbers, verbs = r"(?<=\. )\d+ \d+ \d+\.", r"vault holds \d|carries \d|is worth \d|is now \d"
    for marks in (r": \d", r"= \d", numbers, verbs):
        assert len(re.findall(marks, one.document)) > len(re.findall(marks, plain.document))
    assert tasks.get(name).options()["lookalikes"] == 0


@pytest.mark.parametrize("name", ["count", "countdown", "prices", "qa1", "qa2", "qa3", "qa4", "shots"])
def test_look_alikes_are_about_nothing_that_is_asked(name: str) -> None:
    forms = r"Somebody took the (\w+)|Nobody went to the (\w+)|Number (\d+) is unknown"
    forms += r"|The goal of the (\w+) is unknown|A (\w+) goes away"
    found, task = 0, tasks.get(f"world/{name}", lookalikes=100)
    for seed in range(12):
        one = task.sample(TOKENIZER, 1024, seed=seed)
        asked = " ".join(f"{question.text} {question.reply}" for question in one.asked)
        words = set(re.findall(r"\w+", asked))
        about = {word for groups in re.findall(forms, one.document) for word in groups if word}
        assert not about & words
        found += len(about)
    assert found > 20


def test_look_alikes_of_training_texts_are_about_nothing_that_is_asked() -> None:
    names, filler = ["world/qa2", "world/qa3", "world/prices"], FillerOptions(lookalike_share=1.0)
    taken, found = r"Somebody took the (\w+)", 0
    for seed in range(12):
        one = tasks.get("world/qa2").sample(TOKENIZER, 1024, seed=seed, split="train", filler=filler)
        mixed = mixture(TOKENIZER, names, 1024, seed=seed, density=0.2, filler=filler)
        forked = quiz(TOKENIZER, names, 1024, questions=9, seed=seed, density=0.2, filler=filler)
        texts = [
            (one.document, " ".join(question.reply for question in one.asked) + one.question),
            (mixed.document, mixed.reply + mixed.question),
            (forked.document, " ".join(f"{question.text} {question.reply}" for _, question in forked.questions)),
        ]
        for document, asked in texts:
            things = set(re.findall(taken, document))
            assert not things & set(re.findall(r"\w+", asked))
            found += len(things)
    assert found > 20


def test_texts_without_look_alikes_stand_under_the_name_that_older_folders_have() -> None:
    def facts(**options: Any) -> dict[str, Any]:
        wanted = Wanted(tokenizer=lambda: TOKENIZER, lengths=[512], samples=1, seed=0)
        return tasks.get("passkey", **options).select(wanted).facts

    assert facts() == {"version": 1, "digits": 5}
    assert facts(lookalikes=20) == {"version": 1, "digits": 5, "lookalikes": 20}
    with pytest.raises(ValueError, match="lookalikes=101 is more than all sentences; give 0 to 100"):
        tasks.get("passkey", lookalikes=101)
    with pytest.raises(ValueError, match="lookalikes=5 changes nothing beside percent=100"):
        tasks.get("lookalikes/needles", lookalikes=5, percent=100)
