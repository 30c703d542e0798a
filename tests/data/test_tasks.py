"""The generated tasks: seeded, of the length asked for, fair, and scored as their benchmarks score them."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from embedded import tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from locret.data import tasks
from locret.data.tasks.generated.base import Draw
from locret.data.text.filler import Filler, generator
from locret.data.text.haystack import hide, prompt_length
from locret.data.text.words import NAMES, VARIABLES

TOKENIZER = tiny_tokenizer()
KEYS = {*NAMES, *VARIABLES}


@pytest.mark.parametrize("name", tasks.names())
def test_the_same_seed_gives_the_same_sample_and_another_seed_another(name: str) -> None:
    task = tasks.get(name)
    assert task.sample(TOKENIZER, 512, seed=3) == task.sample(TOKENIZER, 512, seed=3)
    assert task.sample(TOKENIZER, 512, seed=3).document != task.sample(TOKENIZER, 512, seed=4).document


@pytest.mark.slow
def test_the_same_seed_gives_the_same_text_in_another_process() -> None:
    code = (
        "from locret.data import tasks; from embedded import tiny_tokenizer; import sys;"
        "sys.stdout.write(tasks.get('multikey').sample(tiny_tokenizer(), 512, seed=3).content)"
    )
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(paths)}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout == tasks.get("multikey").sample(TOKENIZER, 512, seed=3).content


@pytest.mark.parametrize("tokens", [400, 777, 2048])
@pytest.mark.parametrize("name", tasks.names())
def test_the_chat_prompt_has_exactly_the_tokens_asked_for_and_ends_with_the_question(name: str, tokens: int) -> None:
    task = tasks.get(name)
    sample = task.sample(TOKENIZER, tokens, seed=tokens)
    assert prompt_length(TOKENIZER, sample.content) == tokens
    assert sample.content == f"{sample.document}\n{sample.question}"
    assert sample.document.startswith(f"{task.introduction}\n")


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_pass_key_stands_at_its_depth(depth: float) -> None:
    sample = tasks.get("passkey").sample(TOKENIZER, 2048, depth=depth, seed=5)
    key = sample.targets[0]
    statement = f"The pass key is {key}. Remember it. {key} is the pass key."
    assert sample.document.count(statement) == 1
    assert sample.document.count(key) == 2
    assert sample.document.index(statement) / (len(sample.document) - len(statement)) == pytest.approx(depth, abs=0.02)


@pytest.mark.parametrize("name", tasks.names())
def test_a_gold_reply_scores_one_and_a_wrong_one_zero(name: str) -> None:
    task = tasks.get(name)
    for seed in range(5):
        sample = task.sample(TOKENIZER, 512, seed=seed)
        other = next(s for s in (task.sample(TOKENIZER, 512, seed=99 + i) for i in range(9)) if not _shared(s, sample))
        assert task.score(sample.reply, sample) == 1.0
        assert task.score(", ".join(sample.targets), sample) == 1.0
        assert task.score(other.reply, sample) == 0.0
        assert task.score("", sample) == 0.0
        assert all(target in sample.document for target in sample.targets)


def _shared(one: tasks.Sample, other: tasks.Sample) -> bool:
    return any(target in one.reply for target in other.targets)


@pytest.mark.parametrize("name", tasks.names())
def test_splits_share_no_text_and_no_key(name: str) -> None:
    task = tasks.get(name)
    train, evaluation = Draw(random.Random(0), "train"), Draw(random.Random(0), "eval")
    keys = [
        {word for _ in range(3) for s in task.plant(draw).statements for word in re.findall(r"\w+", s) if word in KEYS}
        for draw in (train, evaluation)
    ]
    assert not keys[0] & keys[1]
    texts = [
        {task.sample(TOKENIZER, 400, seed=s, split=split).document for s in range(10)} for split in ("train", "eval")
    ]
    assert len(texts[0]) == len(texts[1]) == 10
    assert not texts[0] & texts[1]


def test_numbers_repeat_neighbours_and_have_ten_digits() -> None:
    for seed in range(20):
        (number,) = tasks.get("number").sample(TOKENIZER, 400, seed=seed).targets
        assert len(number) == 10
        assert sum(a == b for a, b in zip(number, number[1:], strict=False)) >= 5


def test_an_unknown_task_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match='task "multykey" is unknown; did you mean multikey'):
        tasks.get("multykey")
    with pytest.raises(ValueError, match='task multikey: it has no option "kees"; did you mean keys'):
        tasks.get("multikey", kees=3)
    with pytest.raises(ValueError, match='task "two_stage" was retired; release 0.1.0'):
        tasks.get("two_stage")
    with pytest.raises(ValueError, match='task option "lookalikes" was retired; release 0.1.0'):
        tasks.get("multikey", lookalikes=20)


@pytest.mark.parametrize("value", [0, -1, "2", 2.0, True, None])
def test_an_option_that_is_no_count_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=f"task multikey: keys={value!r} must be a whole number, 1 or more"):
        tasks.get("multikey", keys=value)


def test_a_text_may_hold_one_key_only_but_not_more_numbers_than_there_are() -> None:
    assert tasks.get("multikey", keys=1).sample(TOKENIZER, 400).document.count("special magic numbers for") == 1
    assert len(tasks.get("multikey", keys=9, digits=1).plant(Draw(random.Random(0), "eval")).statements) == 9
    with pytest.raises(ValueError, match="one text cannot hold that many numbers of 1 digits; ask for fewer"):
        tasks.get("multikey", keys=10, digits=1).plant(Draw(random.Random(0), "eval"))


def test_a_text_too_short_or_with_too_many_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens=60 cannot hold the facts and the question"):
        tasks.get("multikey").sample(TOKENIZER, 60)
    with pytest.raises(ValueError, match="all names of this split are taken; ask for fewer"):
        tasks.get("multikey", keys=500).sample(TOKENIZER, 9000)
    with pytest.raises(ValueError, match=r"depth=1.5 is outside the text"):
        tasks.get("passkey").sample(TOKENIZER, 512, depth=1.5)
    with pytest.raises(ValueError, match="split='test' is not a split"):
        generator(0, "test")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", tasks.names())
def test_a_tokenizer_that_loses_digits_is_refused(name: str) -> None:
    words = {word: index for index, word in enumerate(["<unk>", *{w for n in tasks.names() for w in _words(n)}])}
    core = Tokenizer(models.WordLevel({w: i for w, i in words.items() if not re.search(r"\d", w)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    broken = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    tasks.get(name).check(TOKENIZER)
    with pytest.raises(ValueError, match=f"task {name} cannot be expressed by this tokenizer: .* comes back as"):
        tasks.get(name).check(broken)


def _words(name: str) -> list[str]:
    planted = tasks.get(name).plant(Draw(random.Random(0), "eval"))
    return " ".join((*planted.statements, planted.questions[0].text, planted.questions[0].reply)).split()


def test_filler_holds_numbers_and_look_alikes_but_states_no_fact() -> None:
    filler = Filler(random.Random(0))
    text = " ".join(filler.sentence() for _ in range(3000))
    assert {len(number) for number in re.findall(r"\d+", text)} == {5, 7, 10}
    assert re.search(r"The \w+ key is \d+\.", text)
    assert re.search(r"One of the \w+ numbers in \w+ is \d+\.", text)
    for fact in ("The pass key is", "The sequence of digits is", "special magic", "VAR ", "The Dict is"):
        assert fact not in text


def test_statements_at_one_place_keep_their_order() -> None:
    text = hide(
        TOKENIZER,
        ["First one.", "Second one."],
        [0.5, 0.5],
        filler=Filler(random.Random(0)),
        tokens=200,
        around=lambda text: text,
    )
    assert "First one. Second one." in text


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
