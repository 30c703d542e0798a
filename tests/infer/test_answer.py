"""Answers as they are written, and a question that is read with its text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from locret import LongContextModel, generate
from locret.conversation.chat import AnswerStreamer
from locret.conversation.document import Document, decode


def test_streamed_lines_keep_their_indentation_and_each_part_comes_as_soon_as_it_is_known() -> None:
    # A tokenizer that drops the space before a text's first word, as Llama-2's and Phi-3's do.
    vocabulary = ["<unk>", "<0x0A>", "▁", "▁▁", "▁def", "▁return", "▁x", "x", ":"]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    ids, written, after = [4, 6, 8, 1, 3, 5, 6, 1, 1, 3, 6, 7], list[str](), list[str]()
    streamer = AnswerStreamer(tokenizer, written.append)
    streamer.put(torch.tensor([[4, 4]]))  # the prompt
    for token in ids:
        streamer.put(torch.tensor([token]))
        after.append("".join(written))
    streamer.end()
    assert after[:5] == ["def", "def x", "def x:", "def x:\n", "def x:\n  "]
    assert "".join(written) == decode(tokenizer, ids) == "def x:\n   return x\n\n   xx"


@pytest.fixture(scope="module")
def lm(backbone: Path) -> LongContextModel:
    return LongContextModel.from_pretrained(backbone, scorer="random", dtype="float32")


def test_a_question_read_with_its_text_is_the_chat_template_around_both(lm: LongContextModel) -> None:
    pieces = ["\n  The ", "tower", " ", "\n", " waits.", " \n", "\n"]
    chat = lm.converse(Document("text", iter(pieces)), "Where?", progress=False)
    messages = [{"role": "user", "content": "The tower \n waits.\n\nWhere?"}]
    ids = lm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert chat.cache.seen == ids.shape[1]
    # This refuses a cache of other ids.
    out = generate(lm.model, ids, cache=chat.cache.copy(), max_new_tokens=4, do_sample=False)
    assert chat.say("Where?", max_new_tokens=4) == decode(lm.tokenizer, out[0, ids.shape[1] :].tolist())


def test_plain_text_keeps_its_white_space(backbone: Path) -> None:
    plain = LongContextModel.from_pretrained(backbone, scorer="random", dtype="float32", template="none")
    context = plain.read("\nThe tower\n", progress=False)
    chat = context.chat()
    chat.read_turn(None, 1)
    assert chat.cache.seen == len(plain.tokenizer("\nThe tower\n").input_ids)
