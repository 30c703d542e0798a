"""Tokens of a text read in blocks equal those of the text read whole."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from embedded import LLAMA3_WORDS
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from locret.conversation.document import GROWTH, TokenStream, leading_special_ids, read_text

WORDS = ["the", "key", "1234567", "größer", "日本語の文", "e\u0301a", "🙂🙃", "x.y", "don't", "--", "…", "A" * 9]
SPACES = [" ", " ", " ", "\n", "\n\n", "  ", "\t", " \n "]
ANY = st.characters(codec="utf-8", exclude_characters="\ufdd0")  # which keeps words of a text apart
SPECIAL = ["<unk>", "<s>", "<|end of turn|>"]
WINDOW, MARGIN = 256, 64


def sample_text(seed, words=300):
    chosen = random.Random(seed)
    return "".join(chosen.choice(WORDS) + chosen.choice(SPACES) for _ in range(words))


def trained(model, trainer, pre_tokenizer=None, normalizer=None):
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator([sample_text(seed) for seed in range(4)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def make_tokenizers():
    options = {"special_tokens": SPECIAL, "show_progress": False}
    bpe, letters = {"vocab_size": 500, **options}, pre_tokenizers.ByteLevel.alphabet()
    first = pre_tokenizers.Metaspace(prepend_scheme="first")
    llama2 = trained(models.BPE(unk_token="<unk>"), trainers.BpeTrainer(**bpe), first)
    # Trained word by word, used without any pre-tokenizer.
    replaced = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    llama2.backend_tokenizer.normalizer = normalizers.Sequence(replaced)
    llama2.backend_tokenizer.pre_tokenizer = None
    split = [pre_tokenizers.Split(LLAMA3_WORDS, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    llama3 = pre_tokenizers.Sequence(split)
    by_bytes = trainers.BpeTrainer(initial_alphabet=letters, **bpe)
    unigram = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", **options)
    return {
        "BPE without pre-tokenizer (Llama 2)": llama2,
        "byte-level BPE (GPT-2)": trained(models.BPE(), by_bytes, pre_tokenizers.ByteLevel(False), normalizers.NFC()),
        "byte-level BPE (Llama 3)": trained(models.BPE(), by_bytes, llama3, normalizers.NFC()),
        "Metaspace Unigram": trained(models.Unigram(), unigram, first),
        "word level": trained(
            models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(**options), pre_tokenizers.Whitespace()
        ),
    }


TOKENIZERS = make_tokenizers()
GPT2 = TOKENIZERS["byte-level BPE (GPT-2)"]


def token_stream(tokenizer, pieces, *, add_special_tokens=True, **sizes):
    if add_special_tokens:
        yield leading_special_ids(tokenizer)
    stream = TokenStream(tokenizer, **sizes)
    yield from stream.add(pieces)
    yield stream.finish()


def streamed(tokenizer, pieces, **arguments):
    return sum(token_stream(tokenizer, pieces, window=WINDOW, margin=MARGIN, **arguments), [])


texts = st.lists(
    st.one_of(st.sampled_from(WORDS + SPACES + SPECIAL), st.text(ANY, max_size=12)), min_size=150, max_size=400
).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=12)
@given(text=texts, size=st.integers(1, 700))
def test_tokens_read_in_pieces_equal_those_of_the_whole_text(name, text, size):
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert streamed(TOKENIZERS[name], pieces) == TOKENIZERS[name](text)["input_ids"]


def test_where_no_cut_can_be_proven_memory_stays_bounded_and_no_character_is_lost():
    # The merges learnt from "🙂🙃" join the end of one character to the start of the next: every cut splits a token.
    text = "start " + "🙂" * 5000
    lists = list(token_stream(GPT2, [text], window=WINDOW, margin=MARGIN, add_special_tokens=False))
    assert sum(lists, []) != GPT2(text, add_special_tokens=False)["input_ids"]  # else this tests nothing
    assert GPT2.decode(sum(lists, [])) == text
    assert max(len(GPT2.decode(ids)) for ids in lists) <= (GROWTH + 1) * WINDOW


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


@pytest.mark.parametrize("block_chars", [1, 3, 1000])
def test_blocks_never_split_a_character_and_a_byte_order_mark_is_not_text(tmp_path, block_chars):
    text = "größer 日本語 🙂 e\u0301\n" * 7
    (tmp_path / "text.txt").write_bytes(("\ufeff" + text.replace("\n", "\r\n")).encode())
    blocks = list(read_text(tmp_path / "text.txt", block_chars))
    assert "".join(blocks) == text
    assert max(map(len, blocks)) <= block_chars


def test_what_is_no_text_is_refused_by_name(tmp_path):
    (tmp_path / "latin.txt").write_bytes("größer".encode("latin-1"))
    with (tmp_path / "sparse.txt").open("wb") as file:
        file.truncate(2**40)
    for path, sentence in [
        ("no/such.txt", r"^--prompt-file no/such.txt: no such file; check the path, or use - for"),
        (tmp_path, r"^--prompt-file .*: that is a folder; give one text file$"),
        (tmp_path / "latin.txt", r"^--prompt-file .*latin.txt: not UTF-8 text \(.*\); if it is a text, convert it"),
        (tmp_path / "sparse.txt", r"^--prompt-file .*sparse.txt: begins with NUL, as sparse files do; give a text"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            list(read_text(path))
