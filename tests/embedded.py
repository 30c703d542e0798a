"""The tokenizer of the embedded backbone, which is quick to load and has a chat template."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from locret import shipped


def tiny_tokenizer() -> Any:
    """Return a fresh one, so that a test may change it."""
    return AutoTokenizer.from_pretrained(shipped.find("checkpoints/tiny"))
