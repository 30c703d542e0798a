"""What runs of `locret-eval` leave, without the times, which differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locret.data.tasks import Sample, Task
from locret.data.tasks.prompts import build_prompt
from locret.infer.evaluation.methods import Prompt, Setup, SharedText

RECORD: dict[str, Any] = {
    **{"task": "passkey", "version": 1, "tokens": 300, "index": 0, "method": "random"},
    **{"budget": 64, "chunk_size": 32, "stabilizers": 16, "score": 1.0, "prediction": "48213", "targets": ["48213"]},
    **dict.fromkeys(("prompt_tokens", "generated_tokens", "kept_units", "peak_units", "cache_bytes", "peak_bytes"), 9),
    **dict.fromkeys(("prefill_seconds", "decode_seconds"), 0.5),
}
"""A line of samples.jsonl."""
TIMES = ("prefill_seconds", "decode_seconds", "prefill_tokens_per_second", "decode_tokens_per_second")


def records(folder: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    lines = (folder / name).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def cells(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in cell.items() if k not in TIMES} for cell in results(folder)["cells"]]


def prompts(setup: Setup, task: Task, samples: Sequence[Sample]) -> list[Prompt]:
    """Return the prompts of questions about one text."""
    import torch

    text = SharedText(setup, task, samples[0])
    built = [build_prompt(task, one, setup.tokenizer) for one in samples]
    return [Prompt(torch.tensor([b.ids]), one, text) for one, b in zip(samples, built, strict=True)]
