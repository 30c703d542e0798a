"""Texts to read."""

from __future__ import annotations

from pathlib import Path


def write_text(path: Path, size: int) -> Path:
    sentence = "The red house stands near the river. The number of Oslo is 48213. "
    path.write_text((sentence * (size // len(sentence) + 1))[:size].strip() + "\n")
    return path
