"""Generated texts: seeded, of the length asked for, with the facts where they belong and the question last."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys

import pytest

from locret.data.embedded_tokenizer import NAMES, build_tokenizer
from locret.data.filler import Filler, FillerOptions, generator
from locret.data.hidden_facts import Fact, ask, count_tokens, prompt_length
from locret.data.needles import command, facts_sample, passkey_sample, question_rows, stream_passkey, write_rows

TOKENIZER = build_tokenizer()


def test_the_same_seed_gives_the_same_sample_and_another_seed_another():
    assert passkey_sample(TOKENIZER, 256, seed=3) == passkey_sample(TOKENIZER, 256, seed=3)
    assert passkey_sample(TOKENIZER, 256, seed=3).text != passkey_sample(TOKENIZER, 256, seed=4).text


def test_the_same_seed_gives_the_same_text_in_another_process():
    code = (
        "from locret.data.needles import *; from locret.data.embedded_tokenizer import build_tokenizer;"
        "import sys; sys.stdout.write(passkey_sample(build_tokenizer(), 256, seed=3).text)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout == passkey_sample(TOKENIZER, 256, seed=3).text


@pytest.mark.parametrize("tokens", [32, 100, 512, 2048])
@pytest.mark.parametrize("seed", range(4))
def test_the_chat_prompt_has_exactly_the_tokens_asked_for(tokens, seed):
    assert prompt_length(TOKENIZER, passkey_sample(TOKENIZER, tokens, 0.5, seed).content) == tokens


def test_every_word_of_the_texts_is_in_the_vocabulary():
    text = facts_sample(TOKENIZER, 4096, 16, 17).content
    letters = [t for t in TOKENIZER.convert_ids_to_tokens(TOKENIZER(text)["input_ids"]) if re.fullmatch("##[a-z]", t)]
    assert len(letters) <= text.count("One ")  # the only word that is spelt


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_pass_key_stands_once_at_its_depth(depth):
    sample = passkey_sample(TOKENIZER, 2048, depth, seed=5)
    statement = f"The pass key is {sample.answer}. Remember it."
    assert sample.text.count("The pass key is") == sample.text.count(statement) == 1
    place = sample.text.index(statement) / (len(sample.text) - len(statement))
    assert place == pytest.approx(depth, abs=0.02)


def test_the_question_comes_after_the_text():
    sample = passkey_sample(TOKENIZER, 256)
    assert sample.content == sample.text + "\nWhat is the pass key?"
    assert sample.reply == f"The pass key is {sample.answer}."


def test_training_and_evaluation_never_share_a_text_for_any_pair_of_seeds():
    train = {passkey_sample(TOKENIZER, 128, seed=seed, split="train").text for seed in range(40)}
    evaluation = {passkey_sample(TOKENIZER, 128, seed=seed, split="eval").text for seed in range(40)}
    assert len(train) == len(evaluation) == 40
    assert not train & evaluation
    with pytest.raises(ValueError, match="split='test' is no split"):
        generator(0, "test")


def test_filler_holds_numbers_and_look_alikes_but_states_no_fact():
    filler = Filler(random.Random(0), FillerOptions())
    text = " ".join(filler.sentence() for _ in range(3000))
    assert len(re.findall(r"\b\d{5}\b", text)) > 150
    assert re.search(r"The \w+ key is \d{5}\.", text)
    assert "The pass key is" not in text
    assert not re.search(rf"The number of ({'|'.join(NAMES)}) is", text)


def test_filler_numbers_have_as_many_digits_as_the_facts():
    sample = facts_sample(TOKENIZER, 512, 4, 5, options=FillerOptions(digits=(3, 6)))
    assert {len(number) for number in re.findall(r"\d+", sample.text)} == {3, 6}


def test_a_question_for_many_facts_is_answered_by_their_sentences_in_order():
    facts = [Fact(None, "48213"), Fact("Oslo", "71432"), Fact("Rome", "10000")]
    assert ask(facts) == "What is the pass key? What are the numbers of Oslo, Rome?"
    assert ask(facts[1:2]) == "What is the number of Oslo?"
    sample = facts_sample(TOKENIZER, 512, 6, 7, seed=1)
    for sentence in re.findall(r"The [^.]*\.", sample.reply):
        assert sample.text.count(sentence) == 1
    assert sample.answer.split() == re.findall(r"\d+", sample.reply)
    assert len(sample.answer.split()) == 7


def test_an_answer_counts_only_with_all_numbers_in_order():
    sample = facts_sample(TOKENIZER, 512, 3, 2, seed=1)
    first, second = sample.answer.split()
    assert sample.is_answered_by(sample.reply)
    assert sample.is_answered_by(f"{first}, {second}, and so on 12345")
    assert not sample.is_answered_by(f"{second}, {first}")
    assert not sample.is_answered_by(first)
    assert not sample.is_answered_by(f"{first}0, {second}")


def test_rows_are_in_the_longalpaca_schema_and_end_with_the_question():
    rows = question_rows(TOKENIZER, 3, 512, seed=2, facts=8)
    for row in rows:
        assert list(row) == ["instruction", "input", "output", "file"]
        assert row["instruction"].splitlines()[-1].startswith("What is the pass key? What are the numbers of ")
        assert row["output"].startswith("The pass key is ")
        assert len(re.findall(r"\d+", row["output"])) == 9
    assert len({row["instruction"] for row in rows}) == 3


def test_the_command_writes_the_rows_as_json(tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["--rows", "2", "--tokens", "256", "--facts", "3", "--seed", "7", "--output", str(path)]
    assert command(arguments) == 0
    assert json.loads(path.read_text()) == question_rows(TOKENIZER, 2, 256, 7, facts=3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.json"]


def test_a_missing_output_folder_is_one_sentence_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match=r"output=.*missing/rows.json cannot be written \(No such file or directory\)"):
        write_rows([], tmp_path / "missing" / "rows.json")
    assert list(tmp_path.iterdir()) == []


def test_a_stream_states_the_key_once_in_pieces_of_bounded_size():
    for depth in (0.0, 0.5, 1.0):
        pieces, sample = stream_passkey(depth, seed=1, sentences=200)
        pieces = list(pieces)
        assert max(count_tokens(TOKENIZER, piece) for piece in pieces) < 1500
        text = "".join(pieces)
        assert text.count(f"The pass key is {sample.answer}.") == 1
        assert text.index("The pass key is ") / len(text) == pytest.approx(depth, abs=0.02)
        assert ".The" not in text


def test_a_stream_is_lazy():
    pieces, _ = stream_passkey(0.5, sentences=10**12)
    assert len(list(itertools.islice(pieces, 3))) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: passkey_sample(TOKENIZER, 10), "tokens=10 cannot hold the facts and the question, which take 22"),
        (lambda: passkey_sample(TOKENIZER, 256, 1.5), "depth=1.5 is outside the text"),
        (lambda: facts_sample(TOKENIZER, 256, 3, 5), "asked=5 does not fit 3 facts; ask for 1 to 4"),
        (lambda: facts_sample(TOKENIZER, 4096, 99, 1), f"facts=99 is more than the {len(NAMES)} names there are"),
        (lambda: FillerOptions(number_share=2.0), "number_share=2.0 is no share"),
        (lambda: FillerOptions(digits=()), "digits=() leaves no number to write"),
        (lambda: command(["--output", "x.json", "--rows", "0"]), "rows=0 leaves nothing to write"),
        (lambda: stream_passkey(sentences=0), "sentences=0 leaves no text"),
    ],
)
def test_bad_input_is_refused_with_the_setting_and_the_way_out(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
