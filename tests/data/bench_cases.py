"""What tests of published benchmarks share: a small tokenizer, golden prompts, the real files where they are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from locret.data.tasks.rows import Row

HERE = Path(__file__).resolve().parent
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
CHATML = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def golden(name: str) -> Any:
    """Return the golden prompts of a family, or the digests of real ones."""
    return json.loads((HERE / "golden_prompts" / f"{name}.json").read_text(encoding="utf-8"))


def word_tokenizer(*extra: str, bos: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each of w0 to w999, a bos token and a chat template."""
    words = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system", *extra]
    words += [f"w{index}" for index in range(1000)]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHATML
    return fast


def write_lines(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON Lines; bytes stand as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def entries(rows: Iterable[Any], place: str = "rows.jsonl:{}") -> list[Row]:
    """Return rows as a file would give them."""
    return [Row(number, place.format(number + 1), row) for number, row in enumerate(rows)]
