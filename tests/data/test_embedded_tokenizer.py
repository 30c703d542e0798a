"""The embedded tokenizer: exact round trips, numbers in pairs of digits, a chat template, and loading from disk."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from locret.data.text.embedded_tokenizer import build_tokenizer, vocabulary

TOKENIZER = build_tokenizer()
ANY_TEXT = 'It is: 48213, (not 71432)! "zebra_7" a-b\n\nThe pass key is 00905.\n 1 22 333'


def tokens(text):
    return TOKENIZER.convert_ids_to_tokens(TOKENIZER(text)["input_ids"])


def test_numbers_are_split_into_pairs_of_digits_from_the_left():
    assert tokens("48213 7 71432.") == ["48", "##21", "##3", "7", "71", "##43", "##2", "##."]


@pytest.mark.parametrize("text", ["The pass key is 48213.", "71432", "48 213", "4 8 2 1 3", "Hello, world!"])
def test_decoding_gives_back_the_text(text):
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12), max_size=8))
def test_any_printable_ascii_words_round_trip(words):
    text = " ".join(word for word in words if "<" not in word)  # "<eos>" and its kind would be special tokens
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_line_breaks_survive_and_other_white_space_shrinks_to_one_space():
    assert TOKENIZER.decode(TOKENIZER("one  two\t three\n\nfour \n five")["input_ids"]) == "one two three\n\nfour\nfive"


def test_token_counts_are_additive_over_words():
    parts = ANY_TEXT.split(" ")
    assert len(tokens(ANY_TEXT)) == sum(len(tokens(part)) for part in parts)


def test_characters_outside_ascii_become_the_unknown_token():
    assert tokens("is ü") == ["is", "<unk>"]


def test_offsets_point_at_the_characters_of_each_token():
    encoded = TOKENIZER("key is 48213.", return_offsets_mapping=True)
    assert encoded["offset_mapping"] == [(0, 3), (4, 6), (7, 9), (9, 11), (11, 12), (12, 13)]


def test_tensors_and_left_padding():
    batch = TOKENIZER(["The key", "The pass key is 48213"], padding=True, return_tensors="pt")
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (2, 7)
    assert batch["attention_mask"][0].tolist() == [0] * 5 + [1] * 2


def test_the_chat_template_writes_roles_ends_turns_and_opens_the_answer():
    messages = [{"role": "system", "content": "Be well."}, {"role": "user", "content": "Ask."}]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><system>Be well.<eos><user>Ask.<eos><assistant>"
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == TOKENIZER(text)["input_ids"]
    whole = TOKENIZER.apply_chat_template([*messages, {"role": "assistant", "content": "Yes."}], tokenize=False)
    assert whole == text + "Yes.<eos>"


def test_the_chat_template_refuses_an_unknown_role():
    with pytest.raises(Exception, match="unknown role tool; use system, user or assistant"):
        TOKENIZER.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_the_vocabulary_has_each_token_once_and_padding_first():
    assert len(set(vocabulary())) == len(vocabulary()) == len(TOKENIZER)
    assert TOKENIZER.convert_ids_to_tokens([0, 1, 2, 3]) == ["<pad>", "<bos>", "<eos>", "<unk>"]
    assert {f"{value:02d}" for value in range(100)} <= set(vocabulary())


def test_auto_tokenizer_loads_the_saved_folder_with_the_same_behaviour(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(ANY_TEXT)["input_ids"] == TOKENIZER(ANY_TEXT)["input_ids"]
    assert loaded.decode(loaded(ANY_TEXT)["input_ids"]) == TOKENIZER.decode(TOKENIZER(ANY_TEXT)["input_ids"])
    assert (loaded.chat_template, loaded.padding_side) == (TOKENIZER.chat_template, "left")
    assert (loaded.bos_token, loaded.eos_token, loaded.pad_token) == ("<bos>", "<eos>", "<pad>")
