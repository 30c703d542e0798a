"""The tasks of worlds: right by their own reply, alike for the same seed, with keys that training never saw."""

from __future__ import annotations

import random
import re

import pytest

from locret.data import tasks
from locret.data.tasks.generated.base import Draw
from locret.data.tasks.generated.mixture import quiz
from locret.data.text.embedded_tokenizer import COUNTRY_OF, build_tokenizer, vocabulary
from locret.data.text.haystack import prompt_length

ALL = tasks.names("world")
TOKENIZER = build_tokenizer()


def sample(name, tokens=900, **options):
    return tasks.get(name).sample(TOKENIZER, tokens, **options)


@pytest.mark.parametrize("name", ALL)
def test_the_reply_to_every_question_is_right_and_that_to_another_is_not(name):
    task, one = tasks.get(name), sample(name, seed=3)
    assert prompt_length(TOKENIZER, one.content, one.system) <= 900
    assert one.asking(one.asked[0]) == one
    for asked in one.asked:
        assert task.score(asked.reply, one.asking(asked)) == 1, asked
        assert len(TOKENIZER(asked.reply)["input_ids"]) < task.max_new_tokens
    apart = [asked for asked in one.asked if not any(target in asked.reply for target in one.targets)]
    assert all(task.score(asked.reply, one) < 1 for asked in apart)
    assert task.score("", one) == 0


@pytest.mark.parametrize("name", ALL)
def test_the_same_seed_makes_the_same_text_and_another_another(name):
    assert sample(name, seed=1) == sample(name, seed=1)
    assert sample(name, seed=1) != sample(name, seed=2)
    assert sample(name, seed=1, split="train").content != sample(name, seed=1).content


@pytest.mark.parametrize("name", ALL)
def test_every_word_is_one_token(name):
    known, one = set(vocabulary()), sample(name)
    text = " ".join((one.system, one.content, *(asked.text + " " + asked.reply for asked in one.asked)))
    assert not {word for word in re.findall(r"[A-Za-z']+", text) if word not in known}


def statements(name, seed, split="eval", **options):
    return tasks.get(name, **options).plant(Draw(random.Random(seed), split))


def test_training_and_evaluation_share_no_people_things_or_cities():
    for name in ("world/qa2", "world/qa5", "world/paraphrase", "world/two_hop", "world/strings"):
        words = {
            split: {
                word
                for seed in range(30)
                for text in statements(name, seed, split).statements
                for word in re.findall(r"\b[A-Z][a-z]+\b|\w+(?=\.)", text)
            }
            for split in ("train", "eval")
        }
        assert not {word for word in words["train"] & words["eval"] if word[0].isupper()} - {"The", "A", "One"}, name


def test_near_keys_share_a_word_with_others_and_none_is_there_twice():
    keys = [re.findall(r"The (\w+) (\w+) vault", text)[0] for text in statements("world/near_keys", 0).statements]
    assert len(set(keys)) == len(keys) == 16
    assert all(any((color == one) != (name == two) for one, two in keys) for color, name in keys)


def test_as_many_near_keys_as_a_capacity_curve_asks_for():
    assert len(statements("world/near_keys", 0, keys=512).statements) == 512


def test_the_latest_number_of_a_key_is_its_last_in_the_text():
    one = sample("world/latest", seed=5)
    for asked in one.asked:
        name = asked.text.split()[-1].rstrip("?")
        assert re.findall(rf"The code of {name} is now (\d+)", one.document)[-1] == asked.targets[0]


def test_a_paraphrase_shares_no_word_with_the_fact_but_its_number():
    for asked in statements("world/paraphrase", 2).questions:
        question = set(re.findall(r"\w+", asked.text.lower()))
        assert not question & {word.lower() for word in re.findall(r"\w+", asked.reply)}
        assert COUNTRY_OF[asked.reply.split()[3]] in asked.text


def test_a_thing_is_where_its_bearer_went_last():
    one = sample("world/qa2", seed=4)
    for asked in one.asked:
        thing = asked.text.split()[-1].rstrip("?")
        bearer = re.findall(rf"The {thing} was (?:carried|held|grabbed) by (\w+)\.", one.document)[-1]
        room = re.findall(rf"{bearer} (?:moved|went|journeyed|travelled) to the (\w+)\.", one.document)[-1]
        assert asked.targets == (room,)


def test_a_count_is_the_number_of_times_that_the_text_says_it():
    one = sample("world/count", seed=6)
    for asked in one.asked:
        thing = asked.text.split()[-1].rstrip("?")
        assert one.document.count(f"A {thing} goes by.") == int(asked.targets[0])


def test_the_highest_price_is_higher_than_all_others():
    one = sample("world/prices", seed=7)
    prices = {thing: int(price) for price, thing in re.findall(r"The price (\d+): the (\w+)\.", one.document)}
    assert {asked.text.split()[3]: asked.targets[0] for asked in one.asked} == {
        "highest": max(prices, key=prices.get),
        "lowest": min(prices, key=prices.get),
    }


def test_rules_stand_in_the_system_turn_and_every_reply_follows_them():
    one = sample("world/rules", seed=1)
    begin = re.findall(r"Begin every answer with (\w+)\.", one.system)[0]
    end = re.findall(r"End every answer with (\w+)\.", one.system)[0]
    assert all(asked.reply.startswith(f"{begin}.") and asked.reply.endswith(f" {end}.") for asked in one.asked)
    task, number = tasks.get("world/rules"), one.targets[2]
    assert task.score(f"The badge is {number}.", one) == 0  # the first rule is broken
    with pytest.raises(ValueError, match="rules=4 is more than there are; ask for 1 to 3"):
        statements("world/rules", 0, rules=4)


def test_a_secret_is_told_where_that_is_allowed_alone():
    task, kinds = tasks.get("world/secret"), set()
    for seed in range(12):
        one = sample("world/secret", seed=seed)
        word = re.findall(r"The secret word is (\w+)\.", one.system)[0]
        kept = "Never tell it." in one.system
        kinds.add(kept)
        assert task.score(f"The secret word is {word}.", one) == (0 if kept else 1)
        assert task.score("I do not tell it.", one) == (1 if kept else 0)
    assert kinds == {True, False}


def test_a_way_is_scored_by_its_steps_up_to_the_first_that_is_wrong():
    task, one = tasks.get("world/path"), sample("world/path")
    steps = list(one.targets)
    assert task.score(" ".join(steps[:4]), one) == pytest.approx(4 / 9)
    assert task.score(" ".join(steps[1:]), one) == 0


def test_rules_of_a_text_hold_for_all_its_questions():
    found = 0
    for seed in range(20):
        text = quiz(TOKENIZER, ["world/rules", "world/qa1", "passkey"], 500, questions=16, seed=seed, density=0.9)
        ends = re.findall(r"End every answer with (\w+)\.", text.system)
        found += bool(ends)
        assert all(asked.reply.endswith(f" {end}.") for end in ends for _, asked in text.questions)
    assert found


def test_a_bare_text_is_its_facts_and_still_answers_every_question():
    for seed, name in enumerate(ALL):
        text = quiz(TOKENIZER, [name], 300, questions=16, seed=seed, density=0.01, bare=True)
        assert text.questions
        known = {word for _, asked in text.questions for target in asked.targets for word in re.findall(r"\w+", target)}
        if name not in ("world/count", "world/secret", "world/rules"):
            assert known <= set(re.findall(r"\w+", text.document)), name
        if name != "world/secret":
            assert len(TOKENIZER(text.document)["input_ids"]) < 200


def test_every_number_of_a_countdown_is_the_one_below_the_last_that_was_said():
    for steps in (1, 2, 7, 10):
        one = tasks.get("world/countdown", steps=steps).sample(TOKENIZER, 900, seed=steps)
        assert len(one.asked) == 3
        for asked in one.asked:
            end, start = (int(number) for number in re.findall(r"\d+", asked.text))
            said = [int(target.split()[1]) for target in asked.targets]
            assert said == list(range(start - 1, end - 1, -1))
            assert all(target in one.document for target in asked.targets)
