"""Filler that looks like facts: what texts hold besides those."""

from __future__ import annotations

import re
from typing import Any

import pytest
from embedded import tiny_tokenizer

from locret.data import tasks
from locret.data.tasks.generated.mixture import mixture
from locret.data.tasks.task import Wanted
from locret.data.text.filler import FillerOptions

TOKENIZER = tiny_tokenizer()


def sample(name: str, tokens: int = 2048, **options: Any) -> Any:
    return tasks.get(name, **options).sample(TOKENIZER, tokens, depth=0.5, seed=3)


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_can_have_filler_with_the_marks_and_words_of_facts(name: str) -> None:
    plain, one = sample(name, 1536), sample(name, 1536, lookalikes=100)
    assert (one.targets, one.question, one.reply) == (plain.targets, plain.question, plain.reply)
    assert tasks.get(name, lookalikes=100).score(one.reply, one) == 1.0
    numbers, verbs = r"(?<=\. )\d+ \d+ \d+\.", r"vault holds \d|carries \d|is worth \d|is now \d"
    for marks in (r": \d", r"= \d", numbers, verbs):
        assert len(re.findall(marks, one.document)) > len(re.findall(marks, plain.document))
    assert tasks.get(name).options()["lookalikes"] == 0


def test_look_alikes_are_about_nothing_that_is_asked() -> None:
    filler, found = FillerOptions(lookalike_share=1.0), 0
    for seed in range(12):
        one = tasks.get("multikey").sample(TOKENIZER, 1024, seed=seed, split="train", filler=filler)
        mixed = mixture(TOKENIZER, ["multikey"], 1024, seed=seed, density=0.2, filler=filler)
        for text in (one, mixed):
            asked = set(re.findall(r"numbers for (\w+) is", text.document))
            others = set(re.findall(r"string of the \w+ is (\w+)|(?:north|south|east|west) of (\w+)\.", text.document))
            about = {word for pair in others for word in pair if word}
            assert not about & asked
            found += len(about)
    assert found > 20


def test_texts_without_look_alikes_stand_under_the_name_that_older_folders_have() -> None:
    def facts(**options: Any) -> dict[str, Any]:
        wanted = Wanted(tokenizer=lambda: TOKENIZER, lengths=[512], samples=1, seed=0)
        return tasks.get("passkey", **options).select(wanted).facts

    assert facts() == {"version": 1, "digits": 5}
    assert facts(lookalikes=20) == {"version": 1, "digits": 5, "lookalikes": 20}
    with pytest.raises(ValueError, match="lookalikes=101 is more than all sentences; give 0 to 100"):
        tasks.get("passkey", lookalikes=101)
