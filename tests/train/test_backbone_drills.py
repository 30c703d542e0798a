"""The drills of the backbone's training: what they state, what they ask, and where their loss is."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from checkpoints.build import drills
from checkpoints.build.batches import Stage, steps
from locret.data.text.embedded_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


def answers(pieces: drills.Pieces) -> list[list[tuple[str, str]]]:
    """Return, reply by reply, what is given before each colon and what must follow it."""
    assert [bears for _, bears in pieces] == [False, True] * (len(pieces) // 2)
    pairs = [(known.rstrip(":"), found) for (known, _), (found, _) in zip(pieces[::2], pieces[1::2], strict=True)]
    replies: list[list[tuple[str, str]]] = [[]]
    for known, found in pairs:
        replies[-1].append((known, found.rstrip(",.")))
        if found.endswith("."):
            replies.append([])
    return replies[:-1]


@pytest.mark.parametrize("seed", range(5))
def test_chains_are_defined_before_they_are_used_and_answered_hop_by_hop(seed):
    text, pieces = drills.chains(random.Random(seed), 5)
    statements = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
    seen: set[str] = set()
    for name, source in statements:
        assert source.isdigit() or source in seen
        seen.add(name)
    replies = answers(pieces)
    assert len(replies) == 5
    for reply in replies:
        hops = [(re.search(r"= (?:VAR )?(\w+)$", known).group(1), found) for known, found in reply]
        assert hops[0][0].isdigit()
        assert [source for source, _ in hops[1:]] == [name for _, name in hops[:-1]]
        assert all((name, source) in statements for source, name in hops)


@pytest.mark.parametrize("seed", range(5))
def test_values_are_listed_in_ascending_order_and_their_first_pieces_differ(seed):
    text, pieces = drills.values(random.Random(seed), 3)
    for reply in answers(pieces):
        key = re.search(r"for (\w+) is$", reply[0][0]).group(1)
        stated = re.findall(rf"numbers for {key} is: (\d+)\.", text)
        listed = [found for _, found in reply]
        assert sorted(stated, key=int) == listed
        assert all(known.endswith(f"for {key} is") for known, _ in reply)
        assert all(first[:2] < second[:2] for first, second in pairwise(listed))


def test_sums_are_right():
    _, pieces = drills.sums(random.Random(0), 40)
    for (question, _), (answer, _) in zip(pieces[::2], pieces[1::2], strict=True):
        first, second = map(int, re.findall(r"\d+", question))
        assert first + second == int(answer.rstrip("."))


def test_numbers_go_down_by_one_and_rows_come_again_in_order():
    for name in ("descents", "orders"):
        text, pieces = drills.DRILLS[name](random.Random(0), 20)
        assert text == ""
        for (given, bears), (asked, bears_too) in zip(pieces[::2], pieces[1::2], strict=True):
            assert (bears, bears_too) == (False, True)
            first, then = ([int(number) for number in re.findall(r"\d+", part)] for part in (given, asked))
            assert then == ([first[0] - 1, first[0] - 2, first[0] - 3] if name == "descents" else sorted(first))
        assert len(pieces) == 40


def test_ways_end_where_the_text_says_so():
    text, pieces = drills.ends(random.Random(0), 20)
    stated = dict(re.findall(r"(From \w+ go) (to \w+\.|back\.)", text))
    assert len(stated) == 20
    assert {known: found for (known, _), (found, _) in zip(pieces[::2], pieces[1::2], strict=True)} == stated
    assert 4 < sum(found == "back." for found in stated.values()) < 16


def test_who_moved_last_is_asked_of_everybody():
    text, pieces = drills.moves(random.Random(0), 20)
    moved = re.findall(r"(\w+) (\w+ to the \w+\.)", text)
    assert len(moved) == 20
    assert len(dict(moved)) == 5
    assert {known: found for (known, _), (found, _) in zip(pieces[::2], pieces[1::2], strict=True)} == dict(moved)


def test_what_goes_by_is_counted():
    text, pieces = drills.counts(random.Random(0), 7)
    assert len(pieces) == 14
    for (known, bears), (times, bears_too) in zip(pieces[::2], pieces[1::2], strict=True):
        assert (bears, bears_too) == (False, True)
        assert times == f"{text.count(f'{known}.')} times."


def test_a_stage_draws_the_drills_that_it_names():
    stage = Stage(steps=12, tokens=96, batch_tokens=192, drill_share=1.0, drills=["orders", "sums"])
    assert {kind for (batch,) in steps(TOKENIZER, [stage], seed=0) for kind in batch.kinds} == {"orders", "sums"}
    for names, said in ((["after"], "after"), ([], "empty")):
        with pytest.raises(ValueError, match=f"stages: drills .*{said}"):
            Stage(steps=1, tokens=96, drills=names)


def test_a_drill_takes_about_the_tokens_asked_for_and_bears_loss_on_its_values_alone():
    rng, seen = random.Random(1), set()
    for _ in range(40):
        ids, mask, name = drills.drill(rng, TOKENIZER, 256)
        seen.add(name)
        assert 128 <= len(ids) <= 320
        predicted = TOKENIZER.decode([token for token, bears in zip(ids, mask, strict=True) if bears])
        assert not re.search(r"special|assigned|VAR|=", predicted)
        assert sum(mask) >= 20
    assert seen == {"chains", "values", "sums", "cities"}


def test_a_stage_without_tasks_mixes_drills_and_copying():
    stage = Stage(steps=20, tokens=96, batch_tokens=192, drill_share=0.5)
    kinds = [set(batch.kinds) for (batch,) in steps(TOKENIZER, [stage], seed=0)]
    assert {"dense"} in kinds
    assert any(kind & {"chains", "values", "sums", "cities"} for kind in kinds)
    assert kinds == [set(batch.kinds) for (batch,) in steps(TOKENIZER, [stage], seed=0)]
