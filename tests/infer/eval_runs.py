"""Runs of `locret-eval` in processes of their own, and what they leave without the times, which differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locret.data.tasks import Sample, Task
from locret.data.tasks.prompts import build_prompt
from locret.infer.evaluation.methods import Prompt, Setup, SharedText

MODULE = "locret.infer.evaluation.command"
RECORD: dict[str, Any] = {
    **{"task": "passkey", "version": 1, "tokens": 300, "index": 0, "method": "random"},
    **{"budget": 64, "chunk_size": 32, "stabilizers": 16, "score": 1.0, "prediction": "48213", "targets": ["48213"]},
    **dict.fromkeys(("prompt_tokens", "generated_tokens", "kept_units", "peak_units", "cache_bytes", "peak_bytes"), 9),
    **dict.fromkeys(("prefill_seconds", "decode_seconds"), 0.5),
}
"""A line of samples.jsonl."""
TIMES = ("prefill_seconds", "decode_seconds", "prefill_tokens_per_second", "decode_tokens_per_second")


def environment() -> dict[str, str]:
    """Return this process's environment for processes that run on one CPU thread, without devices or a network."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(processes: int, *arguments: object) -> subprocess.Popen[str]:
    """Start `locret-eval` with its arguments in so many processes."""
    launch = [sys.executable, "-m"]
    if processes > 1:
        # accelerate starts several GPU processes this way; its own launcher for CPUs needs MPI.
        launch += ["torch.distributed.run", f"--nproc_per_node={processes}", "--standalone", "-m"]
    line = [*launch, MODULE, *map(str, arguments)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return exit code, output and errors."""
    try:
        out, err = process.communicate(timeout=500)
    finally:
        process.kill()
    return process.returncode, out, err


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
