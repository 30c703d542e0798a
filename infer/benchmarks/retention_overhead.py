"""What retention costs, as ratios measured side by side in one process.

    python -m locret.infer.benchmarks.retention_overhead --output infer/benchmarks/retention_overhead_cpu

prefill/floor      reading with retention over the same chunks against a static cache of the same length, without scores
                   and eviction
prefill 2N/N       reading twice as many tokens over reading N
training/forward   one training step over one plain forward of the decoder on the same tokens

Every repeat runs both sides of every ratio one after the other; reported are p20, p50 and p80 of the ratios. Ratios are
what holds on a machine whose speed drifts; the seconds are recorded beside them and mean little.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from locret import RetainingHeads, RetentionCache, RetentionPolicy, __version__, prefill
from locret.cli import parse_options, print_json, run
from locret.infer.benchmarks.floor import read_static
from locret.infer.benchmarks.shapes import CPU_512, CPU_512_HIDDEN_DIM, random_model


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """What is measured, and how often."""

    model: str | None = None
    """Folder of a backbone; a random Llama of 8 layers, hidden 512, 8 query / 2 KV heads of 64 if none."""
    hidden_dim: int = CPU_512_HIDDEN_DIM
    """Width between a head's two layers, d_R."""
    tokens: int = 8192
    """Prompt tokens, N."""
    answer_tokens: int = 64
    """Answer tokens of the training step."""
    train_tokens: int = 2048
    """Prompt tokens of the training step."""
    budget: int = 1024
    """Cache units kept per KV head."""
    chunk_size: int = 512
    """Tokens per forward pass."""
    stabilizers: int = 256
    """Newest units kept after every chunk but the last."""
    local_len: int = 64
    """Last tokens, never evicted."""
    repeats: int = 10
    """Times every pair is measured."""
    threads: int = 2
    """CPU threads."""
    output: str | None = None
    """Write the record to this path, once as .json and once as .md."""


def measure(options: BenchmarkOptions) -> dict[str, Any]:
    """Return ratios, seconds and where they were taken."""
    torch.set_num_threads(options.threads)
    model = _load(options.model)
    heads = RetainingHeads.for_model(model, options.hidden_dim, seed=0)
    policy = RetentionPolicy(
        budget=options.budget,
        chunk_size=options.chunk_size,
        stabilizers=options.stabilizers,
        local_len=options.local_len,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, 2 * options.tokens), generator=generator)

    def read(tokens: int) -> None:
        prefill(model, ids[:, :tokens], RetentionCache(model, heads, policy))

    sides: dict[str, Callable[[], object]] = {
        "prefill": lambda: read(options.tokens),
        "floor": lambda: read_static(
            model, ids[:, : options.tokens], options.budget, options.chunk_size, options.local_len
        ),
        "prefill_2n": lambda: read(2 * options.tokens),
        **_training_sides(model, heads, ids, options),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in tqdm(range(options.repeats + 1), desc="measuring", disable=None):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            if repeat:  # the first round warms up
                seconds[name].append(time.perf_counter() - start)
    pairs = {
        "prefill/floor": ("prefill", "floor"),
        "prefill 2N/N": ("prefill_2n", "prefill"),
        "training/forward": ("training", "forward"),
    }
    ratios = {
        name: _quantiles([a / b for a, b in zip(seconds[top], seconds[bottom], strict=True)])
        for name, (top, bottom) in pairs.items()
    }
    return {
        "ratios": ratios,
        "seconds": {k: _quantiles(v) for k, v in seconds.items()},
        "where": _where(options, model),
    }


def _training_sides(
    model: PreTrainedModel, heads: RetainingHeads, ids: Tensor, options: BenchmarkOptions
) -> dict[str, Callable[[], object]]:
    # The trainer is not imported at the top: inference does not depend on training, only this comparison does.
    from importlib import import_module

    step: Callable[..., object] = import_module("locret.train.step").train_step
    prompt = ids[:, : options.train_tokens]
    answer = ids[:, options.train_tokens : options.train_tokens + options.answer_tokens]
    both, decoder = torch.cat([prompt, answer], dim=1), model.get_decoder()

    def training() -> None:
        step(model, heads, prompt, answer)
        heads.zero_grad()

    @torch.no_grad()
    def forward() -> None:
        decoder(input_ids=both, use_cache=False)

    return {"training": training, "forward": forward}


def _load(folder: str | None) -> PreTrainedModel:
    if folder is None:
        return random_model(CPU_512)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def _quantiles(values: list[float]) -> dict[str, float]:
    points = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return {name: round(float(value), 4) for name, value in zip(("p20", "p50", "p80"), points, strict=True)}


def _where(options: BenchmarkOptions, model: PreTrainedModel) -> dict[str, Any]:
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


def to_markdown(record: dict[str, Any]) -> str:
    """Return the record as a page for people."""
    where, options = record["where"], record["where"]["options"]
    rows = [f"| {name} | {r['p20']:.3f} | {r['p50']:.3f} | {r['p80']:.3f} |" for name, r in record["ratios"].items()]
    flags = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in options.items() if v is not None and k != "output")
    shape = ", ".join(f"{name} {value}" for name, value in where["shape"].items())
    return "\n".join(
        [
            "# What retention costs",
            "",
            "| ratio | p20 | p50 | p80 |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            f"Backbone: {shape}. {options['repeats']} interleaved repeats, {options['threads']} CPU threads, float32.",
            "",
            f"`python -m locret.infer.benchmarks.retention_overhead {flags}`",
            "",
            f"Commit {where['commit']}, torch {where['torch']}, transformers {where['transformers']}, "
            f"Python {where['python']}, {where['processor']}.",
            "",
        ]
    )


def command(argv: Any = None) -> int:
    """Measure, print, and write the record if asked to."""
    (options,), _ = parse_options("retention_overhead", "Measure what retention costs.", [BenchmarkOptions], argv)
    record = measure(options)
    if options.output is None:
        print_json(record)
        return 0
    import json

    base = Path(options.output)
    base.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    base.with_suffix(".md").write_text(to_markdown(record))
    sys.stderr.write(f"wrote {base.with_suffix('.json')} and {base.with_suffix('.md')}\n")
    return 0


if __name__ == "__main__":
    run(command)
