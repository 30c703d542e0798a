"""Timing several things side by side in one process, and writing down what came out and where.

Every repeat runs every side once, one after the other, so that a machine whose speed drifts slows all of them alike;
ratios are taken within a repeat, and reported as p20, p50 and p80.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from locret import __version__
from locret.cli import print_json
from locret.files import write_text
from locret.infer.speed.shapes import SHAPES, random_model
from locret.tables import markdown

K = TypeVar("K")
T = TypeVar("T")


def interleave(sides: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Run every side `repeats` times, in turns, after one round that warms up; return the seconds of each run."""

    def timed(side: Callable[[], object]) -> Callable[[], float]:
        def run_once() -> float:
            start = time.perf_counter()
            side()
            return time.perf_counter() - start

        return run_once

    seconds = in_turns({name: timed(side) for name, side in sides.items()}, repeats + 1)
    return {name: runs[1:] for name, runs in seconds.items()}


def in_turns(sides: Mapping[K, Callable[[], T]], rounds: int) -> dict[K, list[T]]:
    """Run every side once per round, one after the other; return what each came to, round by round."""
    found: dict[K, list[T]] = {name: [] for name in sides}
    for _ in tqdm(range(rounds), desc="measuring", disable=None):
        for name, side in sides.items():
            found[name].append(side())
    return found


def ratio(seconds: Mapping[str, Sequence[float]], top: str, bottom: str) -> dict[str, float]:
    """Return the quantiles of one side's seconds over another's, repeat by repeat."""
    return quantiles([a / b for a, b in zip(seconds[top], seconds[bottom], strict=True)])


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return p20, p50 and p80, to six digits."""
    points = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return {name: float(f"{value:.6g}") for name, value in zip(("p20", "p50", "p80"), points.tolist(), strict=True)}


def backbone(folder: str | None, shape: str = "cpu-512") -> PreTrainedModel:
    """Return the backbone in `folder` in float32, or one of a shape with random weights.

    Raises:
        ValueError: For an unknown shape.
    """
    if folder is None:
        if shape not in SHAPES:
            raise ValueError(f"--shape {shape} is unknown; choose {' or '.join(SHAPES)}")
        return random_model(SHAPES[shape])
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def where(options: Any, model: PreTrainedModel) -> dict[str, Any]:
    """Return the resolved options, the backbone's shape, versions and commit."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    config = model.config
    return {
        "options": asdict(options),
        "shape": {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "parameters": model.num_parameters(),
        },
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "locret": __version__,
        "commit": (head.stdout.strip() or "unknown") + (" with changes" if changed.stdout.strip() else ""),
    }


def table(ratios: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of a Markdown table."""
    points = ("p20", "p50", "p80")
    return markdown(("ratio", *points), ([name, *(f"{r[p]:.3f}" for p in points)] for name, r in ratios.items()))


def origin(record: Mapping[str, Any], module: str) -> list[str]:
    """Return the lines that say on what, with which command and with which versions a record was made."""
    place, options = record["where"], record["where"]["options"]
    flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in options.items() if v is not None and k != "output")
    shape = ", ".join(f"{name} {value}" for name, value in place["shape"].items())
    return [
        f"Backbone: {shape}. {options['repeats']} interleaved repeats, {options['threads']} CPU threads, "
        f"{options.get('dtype', 'float32')}.",
        "",
        f"`python -m {module} {flags}`",
        "",
        f"Commit {place['commit']}, torch {place['torch']}, transformers {place['transformers']}, "
        f"Python {place['python']}, {place['processor']}.",
        "",
    ]


def write(record: dict[str, Any], page: str, output: str | None) -> None:
    """Print a record as JSON; with `output` write it there instead, once as .json and once, for people, as .md."""
    if output is None:
        print_json(record)
        return
    base = Path(output)
    write_text(base.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    write_text(base.with_suffix(".md"), page)
    sys.stderr.write(f"wrote {base.with_suffix('.json')} and {base.with_suffix('.md')}\n")
