"""Tokens of a text read in blocks equal those of the text read whole."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from locret.conversation.text_stream import GROWTH, read_text, token_stream

WORDS = [
    "the",
    "pass",
    "key",
    "is",
    "1234567",
    "größer",
    "日本語の文",
    "e\u0301a",
    "🙂🙃",
    "x.y",
    "don't",
    "--",
    "…",
    "A" * 9,
]
SPACES = [" ", " ", " ", "\n", "\n\n", "  ", "\t", " \n "]
WINDOW, MARGIN = 256, 64
LLAMA3_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sample_text(seed, words=300):
    chosen = random.Random(seed)
    return "".join(chosen.choice(WORDS) + chosen.choice(SPACES) for _ in range(words))


def trained(model, trainer, *, normalizer=None, pre_tokenizer=None, bos=True):
    tokenizer = Tokenizer(model)
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator([sample_text(seed) for seed in range(4)], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


SPECIAL = ["<unk>", "<s>", "<|end of turn|>"]


def byte_level(splitter=None):
    byte_trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    if splitter is None:
        pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(splitter, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    return trained(models.BPE(), byte_trainer, normalizer=normalizers.NFC(), pre_tokenizer=pre_tokenizer)


def make_tokenizers():
    bpe_trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    unigram_trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    word_trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    first = pre_tokenizers.Metaspace(prepend_scheme="first")
    llama2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    llama2_trained = trained(models.BPE(unk_token="<unk>"), bpe_trainer, pre_tokenizer=first)
    llama2_trained.backend_tokenizer.normalizer = llama2  # trained word by word, used without any pre-tokenizer
    llama2_trained.backend_tokenizer.pre_tokenizer = None
    return {
        "BPE without pre-tokenizer (Llama 2)": llama2_trained,
        "byte-level BPE (GPT-2)": byte_level(),
        "byte-level BPE (Llama 3)": byte_level(LLAMA3_WORDS),
        "Metaspace BPE": trained(models.BPE(unk_token="<unk>"), bpe_trainer, pre_tokenizer=first),
        "Metaspace Unigram": trained(models.Unigram(), unigram_trainer, pre_tokenizer=first),
        "word level": trained(
            models.WordLevel(unk_token="<unk>"), word_trainer, pre_tokenizer=pre_tokenizers.Whitespace()
        ),
    }


TOKENIZERS = make_tokenizers()


def pieces_of(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def streamed(tokenizer, pieces, **arguments):
    return [
        token for ids in token_stream(tokenizer, pieces, window=WINDOW, margin=MARGIN, **arguments) for token in ids
    ]


texts = st.lists(
    st.one_of(st.sampled_from(WORDS + SPACES + SPECIAL), st.text(max_size=12)), min_size=150, max_size=400
).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(text=texts, size=st.integers(1, 700))
@pytest.mark.slow
def test_tokens_read_in_pieces_equal_those_of_the_whole_text(name, text, size):
    tokenizer = TOKENIZERS[name]
    assert streamed(tokenizer, pieces_of(text, size)) == tokenizer(text)["input_ids"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_of_many_windows_is_really_cut(name):
    text = sample_text(9, words=2000)
    lists = list(token_stream(TOKENIZERS[name], [text], window=WINDOW, margin=MARGIN, add_special_tokens=False))
    assert len(lists) > 30
    assert sum(lists, []) == TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("piece", ["7", "31415926535", "日本語", "ab", " ", "\n", "word"])
@pytest.mark.parametrize("name", ["byte-level BPE (GPT-2)", "byte-level BPE (Llama 3)", "Metaspace BPE"])
def test_text_without_word_boundaries_keeps_its_tokens(name, piece):
    text = "start " + piece * (3001 // len(piece)) + " end"
    assert streamed(TOKENIZERS[name], [text]) == TOKENIZERS[name](text)["input_ids"]


def test_an_unknown_word_longer_than_any_window_is_still_one_token():
    assert streamed(TOKENIZERS["word level"], ["a" * 5000], add_special_tokens=False) == [0]


@pytest.mark.slow
def test_where_no_cut_can_be_proven_memory_stays_bounded_and_no_character_is_lost():
    # The merges learnt from "🙂🙃" join the end of one character to the start of the next: every cut splits a token.
    tokenizer = TOKENIZERS["byte-level BPE (GPT-2)"]
    text = "start " + "🙂" * 5000
    lists = list(token_stream(tokenizer, [text], window=WINDOW, margin=MARGIN, add_special_tokens=False))
    assert sum(lists, []) != tokenizer(text, add_special_tokens=False)["input_ids"]  # else this tests nothing
    assert tokenizer.decode(sum(lists, [])) == text
    assert max(len(tokenizer.decode(ids)) for ids in lists) <= (GROWTH + 1) * WINDOW


def test_special_tokens_lead_once_and_only_if_asked_for():
    tokenizer = TOKENIZERS["byte-level BPE (GPT-2)"]
    assert streamed(tokenizer, [])[:1] == [tokenizer.bos_token_id]
    assert streamed(tokenizer, [], add_special_tokens=False) == []
    assert streamed(tokenizer, pieces_of(sample_text(1), 50)).count(tokenizer.bos_token_id) == 1


def test_memory_does_not_grow_with_the_text():
    def peak(repeats):
        block = sample_text(3, words=500)
        tracemalloc.start()
        total = sum(map(len, token_stream(TOKENIZERS["word level"], (block for _ in range(repeats)), window=4096)))
        _, high = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return total, high

    (few, low), (many, high) = peak(5), peak(50)
    assert many > 9 * few
    assert high < 1.2 * low


def test_a_window_too_small_for_its_margin_is_refused():
    with pytest.raises(ValueError, match="window=100 cannot hold cuts with margin=64; use window >= 4"):
        token_stream(TOKENIZERS["word level"], [], window=100, margin=64)


@pytest.mark.parametrize("block_chars", [1, 2, 3, 1000])
def test_blocks_never_split_a_character(tmp_path, block_chars):
    text = "größer 日本語 🙂 e\u0301\n" * 7
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    blocks = list(read_text(path, block_chars))
    assert "".join(blocks) == text
    assert max(map(len, blocks)) <= block_chars


def test_a_byte_order_mark_is_not_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffhello\r\nyou".encode())
    assert "".join(read_text(path)) == "hello\nyou"


def test_standard_input_is_read_as_utf8():
    code = "import sys; from locret.conversation.text_stream import read_text as read\n"
    code += "sys.stdout.buffer.write(''.join(read('-', 2)).encode())"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(
        [sys.executable, "-c", code], input="größer 🙂".encode(), capture_output=True, env=environment
    )
    assert done.stdout.decode() == "größer 🙂", done.stderr.decode()


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"^--prompt-file no/such.txt: no such file; check the path, or use - for"):
        read_text("no/such.txt")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^--prompt-file .*: that is a folder; give one text file$"):
        read_text(tmp_path)


def test_a_file_without_permission_is_named(tmp_path, monkeypatch):
    def refuse(*_arguments, **_named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)  # root may read anything, so the system's refusal is played
    with pytest.raises(ValueError, match=r"secret.txt: cannot be read \(Permission denied\); check its permissions$"):
        read_text(tmp_path / "secret.txt")


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("größer".encode("latin-1"))
    with pytest.raises(ValueError, match=r"^--prompt-file .*latin.txt: not UTF-8 text \(.*\); convert it"):
        list(read_text(path))
