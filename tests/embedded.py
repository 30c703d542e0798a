"""The tokenizer of the embedded backbone, which is quick to load and has a chat template, and texts that it knows."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex
from transformers import AutoTokenizer

from locret import shipped
from locret.data.tasks.made import filler_sentences

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 4096}
NAMES = (
    "Oslo Rome Paris Cairo Lima Quito Delhi Tokyo Seoul Hanoi Accra Tunis Dakar Lagos Miami Boston Dallas Denver "
    "Madrid London Dublin Berlin Vienna Prague"
)
INTRODUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards."
)
LLAMA3_WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How the tokenizer of Llama 3 parts words."""


def tiny_tokenizer() -> Any:
    """Return a fresh one, so that a test may change it."""
    return AutoTokenizer.from_pretrained(shipped.find("checkpoints/tiny"))


class ManyKeys(NamedTuple):
    """A text that states the numbers of many keys, and a question about one of them."""

    content: str
    """The user's turn; the question is its last line."""
    question: str
    reply: str


def many_keys(tokenizer: Any, tokens: int, *, keys: int = 8, depth: float = 0.3, seed: int = 0) -> ManyKeys:
    """Return a text whose whole chat prompt has at most so many tokens, the asked key at a share of it."""
    rng = random.Random(f"many keys/{seed}")
    facts = [(name, str(rng.randrange(10**6, 10**7))) for name in rng.sample(NAMES.split(), keys)]
    (name, number), *_ = facts
    needles = [f"One of the special magic numbers for {name} is: {number}." for name, number in facts]
    depths = [depth, *(rng.random() for _ in needles[1:])]
    question = f"What is the special magic number for {name} mentioned in the provided text?"
    sentences = list(islice(filler_sentences(seed), tokens // 5))
    while True:
        lines = list(sentences)
        for place, needle in sorted(zip(depths, needles, strict=True), reverse=True):
            lines.insert(int(place * len(sentences)), needle)
        content = f"{INTRODUCTION}\n{' '.join(lines)}\n{question}"
        turn = [{"role": "user", "content": content}]
        taken = len(tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"])
        if taken <= tokens:
            return ManyKeys(content, question, f"The special magic number for {name} is: {number}.")
        del sentences[-max(1, (taken - tokens) // 20) :]


def write_text(path: Path, size: int) -> Path:
    """Write a text of so many characters, with a fact in it."""
    sentence = "The red house stands near the river. The number of Oslo is 48213. "
    path.write_text((sentence * (size // len(sentence) + 1))[:size].strip() + "\n")
    return path
