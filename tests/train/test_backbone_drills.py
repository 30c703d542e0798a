"""The drills of the backbone's training: what they state, what they ask, and where their loss is."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from locret.data.embedded_tokenizer import build_tokenizer
from locret.train.backbone import drills
from locret.train.backbone.batches import Stage, batches

TOKENIZER = build_tokenizer()


@pytest.mark.parametrize("seed", range(5))
def test_hops_lead_from_the_name_assigned_to_the_name_that_takes_it(seed):
    text, pieces = drills.hops(random.Random(seed), 7)
    assigned = {source: name for name, source in re.findall(r"VAR (\w+) = VAR (\w+)\.", text)}
    assert len(assigned) == 7
    asked = [(pieces[i][0].rstrip(","), pieces[i + 1][0].rstrip(".")) for i in range(0, len(pieces), 2)]
    assert dict(asked) == assigned
    assert [bears for _, bears in pieces] == [False, True] * 7


@pytest.mark.parametrize("seed", range(5))
def test_chains_are_defined_before_they_are_used(seed):
    text, pieces = drills.chains(random.Random(seed), 5)
    values: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        values[name] = values.get(source, source)
    assert all(value.isdigit() for value in values.values())
    for (question, _), (answer, _) in zip(pieces[::2], pieces[1::2], strict=True):
        value = re.search(r"\d+", question).group()
        assert answer.rstrip(".").split(", ") == [name for name in values if values[name] == value]


@pytest.mark.parametrize("seed", range(5))
def test_values_are_listed_in_ascending_order_and_their_first_pieces_differ(seed):
    text, pieces = drills.values(random.Random(seed), 3)
    for (question, _), (answer, _) in zip(pieces[::2], pieces[1::2], strict=True):
        key = re.search(r"numbers for (\w+) mentioned", question).group(1)
        stated = re.findall(rf"numbers for {key} is: (\d+)\.", text)
        listed = answer.rstrip(".").split(", ")
        assert sorted(stated, key=int) == listed
        assert all(first[:2] < second[:2] for first, second in pairwise(listed))


def test_sums_are_right():
    _, pieces = drills.sums(random.Random(0), 40)
    for (question, _), (answer, _) in zip(pieces[::2], pieces[1::2], strict=True):
        first, second = map(int, re.findall(r"\d+", question))
        assert first + second == int(answer.rstrip("."))


def test_a_drill_takes_about_the_tokens_asked_for_and_bears_loss_on_its_values_alone():
    rng, seen = random.Random(1), set()
    for _ in range(40):
        ids, mask, name = drills.drill(rng, TOKENIZER, 256)
        seen.add(name)
        assert 128 <= len(ids) <= 320
        predicted = TOKENIZER.decode([token for token, bears in zip(ids, mask, strict=True) if bears])
        assert not re.search(r"special|assigned|VAR|=", predicted)
        assert sum(mask) >= 20
    assert seen == {"hops", "chains", "values", "sums"}


def test_a_stage_without_tasks_mixes_drills_and_copying():
    stage = Stage(steps=20, tokens=96, batch_tokens=192, drill_share=0.5)
    kinds = [set(batch.kinds) for batch in batches(TOKENIZER, [stage], seed=0)]
    assert {"dense"} in kinds
    assert any(kind & {"hops", "chains", "values", "sums"} for kind in kinds)
    assert kinds == [set(batch.kinds) for batch in batches(TOKENIZER, [stage], seed=0)]
