"""Prompts as token streams, answers as they are written, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from locret.conversation.chat import AnswerStreamer
from locret.conversation.templates import decode
from locret.infer.answer import prompt_ids
from locret.infer.infer_options import PromptOptions


@pytest.fixture(scope="module")
def sentencepiece() -> Any:
    """Return a tokenizer that drops the space before a text's first word, as Llama-2's and Phi-3's do."""
    vocabulary = ["<unk>", "<0x0A>", "▁", "▁▁", "▁def", "▁return", "▁x", "x", ":"]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, [], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def streamed(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return what has been handed out after each token, and at the end."""
    written: list[str] = []
    streamer, parts = AnswerStreamer(tokenizer, written.append), []
    streamer.put(torch.tensor([[4, 4]]))  # the prompt
    for token in ids:
        before = len(written)
        streamer.put(torch.tensor([token]))
        parts.append("".join(written[before:]))
    before = len(written)
    streamer.end()
    return [*parts, "".join(written[before:])]


def test_streamed_lines_keep_their_indentation(sentencepiece: Any) -> None:
    ids = [4, 6, 8, 1, 3, 5, 6, 1, 1, 3, 6, 7]
    parts = streamed(sentencepiece, ids)
    assert decode(sentencepiece, ids) == "def x:\n   return x\n\n   xx"
    assert "".join(parts) == decode(sentencepiece, ids)
    assert parts[:5] == ["", "def ", "", "x:\n", "  "], "whole words appear as soon as they are known"


def test_streamed_text_of_the_embedded_tokenizer_is_the_decoded_text(backbone: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    text = "The pass key is 48213.\nYes, it's here.\n\nNo."
    ids = tokenizer(text, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    assert "".join(streamed(tokenizer, ids)) == text


def test_prompt_is_the_chat_template_around_the_trimmed_text(backbone: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    pieces = ["\n  The ", "tower", " ", "\n", " waits.", " \n", "\n"]
    ids = [token for block in prompt_ids(tokenizer, pieces, PromptOptions(), "Where?") for token in block]
    messages = [{"role": "user", "content": "The tower \n waits.\n\nWhere?"}]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_plain_text_keeps_its_white_space(backbone: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    blocks = prompt_ids(tokenizer, ["\nThe tower\n"], PromptOptions(template="none"))
    assert [token for block in blocks for token in block] == tokenizer("\nThe tower\n").input_ids


def test_prompt_is_tokenised_as_it_is_asked_for(backbone: Path) -> None:
    tokenizer, pulled = AutoTokenizer.from_pretrained(backbone), []

    def pieces() -> Any:
        for index in range(1000):
            pulled.append(index)
            yield "The tower waits near the river. " * 1000

    blocks = prompt_ids(tokenizer, pieces(), PromptOptions())
    for _ in range(3):
        next(blocks)
    assert len(pulled) < 50


@pytest.mark.slow
def test_importing_the_answer_loads_no_parser_no_data_sets_and_no_plots() -> None:
    code = (
        "import sys, locret.infer.answer, locret.pictures;"
        "print(sorted({'datasets', 'peft', 'matplotlib'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
