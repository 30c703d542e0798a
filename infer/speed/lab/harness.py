"""What the programs of the lab share: their options, timing side by side after one warm-up, and the record they write.

Every repeat runs every side once, one after the other, so that a machine whose speed drifts slows all of them alike;
ratios are taken within a repeat, and reported as p20, p50 and p80.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch

from locret.cli.command import parse_options, print_json
from locret.environment import versions
from locret.files import write_text
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.machine import now
from locret.infer.speed.methods import BenchMethod
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.record import device_name
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.runs import BenchSetup, new_run
from locret.infer.speed.side_by_side import in_turns, quantiles
from locret.tables import markdown

Seconds = Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class LabOptions:
    """The backbone, the machine, and how often everything is measured."""

    shape: str = "cpu-512"
    """Backbone of random weights: cpu-512, cpu-deep, tiny, llama-3.1-8b, phi-3-mini-128k or qwen3-8b."""
    model: str | None = None
    """Instead of --shape: folder of a backbone, or its Hub id."""
    hidden_dim: int | None = None
    """Width between a fresh head's two layers, d_R; the shape's if not given."""
    tokens: int = 4096
    """Prompt tokens."""
    threads: int | None = 1
    """CPU threads."""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes the first CUDA device, else the CPU (for the larger shapes: nothing)."""
    dtype: str = "auto"
    """bfloat16, float16 or float32; auto takes the backbone's own on a GPU and what suits the CPU there."""
    output: str | None = None
    """Write the record to this path, once as .json and once as .md."""

    def __post_init__(self) -> None:
        for name in ("tokens", "answer_tokens", "train_tokens", "top"):
            value = getattr(self, name, 1)
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} is too small; give 1 or more")

    def plan(self, chosen: set[str], methods: str, *lengths: int, **more: Any) -> BenchPlan:
        """Return the plan of a benchmark, with the options that it shares with `locret-bench`.

        Raises:
            ValueError: For anything that cannot be measured as asked, a GPU that is not here included.
        """
        own, shared = asdict(self), {f.name for f in fields(BenchOptions)}
        given = {name: value for name, value in own.items() if name in shared and value is not None}
        plan = make_plan(BenchOptions(**{**given, **more}, methods=methods, lengths=[*lengths]), chosen)
        if plan.device is None:
            raise ValueError(
                f"--shape {self.shape} --device {self.device}: no CUDA device is here, so its cost stays unknown; "
                "choose --shape cpu-512 or --device cpu"
            )
        torch.set_num_threads(plan.threads)
        return plan


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(LabOptions):
    """The backbone, the machine, and how a prompt is read."""

    budget: int | None = None
    """Cache units kept per KV head; the shape's if not given, as the next three."""
    chunk_size: int | None = None
    """Prompt tokens per forward pass."""
    stabilizers: int | None = None
    """Newest units kept after every chunk but the last."""
    local_len: int | None = None
    """Last tokens, never evicted."""


Options = TypeVar("Options", bound=LabOptions)


def program(
    name: str,
    title: str,
    kind: type[Options],
    measure: Callable[[Options, set[str]], dict[str, Any]],
    body: Callable[[Mapping[str, Any]], list[str]],
) -> Callable[[Sequence[str] | None], int]:
    """Return the command of a program: measures, and prints the record or writes it.

    Args:
        name: The module's.
        title: Of the page.
        kind: Its options.
        measure: Returns the record for options, and the names of those that the user set.
        body: Returns the lines of the page between its title and its origin.
    """
    module = f"locret.infer.speed.lab.{name}"

    def command(argv: Sequence[str] | None = None) -> int:
        (options,), chosen = parse_options(module, f"{title}.", [kind], argv)
        record = measure(options, chosen)
        if options.output is None:
            print_json(record)
            return 0
        page = "\n".join([f"# {title}", "", *body(record), "", *origin(record["where"], module)])
        files = [Path(options.output).with_suffix(end) for end in (".json", ".md")]
        for file, text in zip(files, (json.dumps(record, indent=1) + "\n", page), strict=True):
            write_text(file, text)
        sys.stderr.write(f"wrote {' and '.join(map(str, files))}\n")
        return 0

    return command


def reading(setup: BenchSetup, method: BenchMethod, tokens: int) -> Callable[[], object]:
    """Return what reads the first tokens of a prompt with a method, with a fresh cache each time."""
    return lambda: new_run(setup, method, tokens).read()


def interleave(sides: Mapping[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Run every side `repeats` times, in turns, after one round that warms up; return the seconds of each run."""

    def timed(side: Callable[[], object]) -> Callable[[], float]:
        def run_once() -> float:
            start = now(device)
            side()
            return now(device) - start

        return run_once

    seconds = in_turns({name: timed(side) for name, side in sides.items()}, repeats + 1)
    return {name: runs[1:] for name, runs in seconds.items()}


def compared(seconds: Seconds, pairs: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """Return the quantiles of every side's seconds, and of one side's over another's, repeat by repeat."""
    ratios = {
        name: quantiles([a / b for a, b in zip(seconds[top], seconds[bottom], strict=True)])
        for name, (top, bottom) in pairs.items()
    }
    return {"ratios": ratios, "seconds": {name: quantiles(values) for name, values in seconds.items()}}


def ratio_table(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of a record's ratios."""
    points = ("p20", "p50", "p80")
    rows = ([name, *(f"{found[p]:.3f}" for p in points)] for name, found in record["ratios"].items())
    return markdown(("ratio", *points), rows)


def where(options: LabOptions, plan: BenchPlan) -> dict[str, Any]:
    """Return the options as they were resolved, the backbone's shape, the device and versions."""
    assert plan.device is not None
    resolved = {**plan.resolved(), **plan.policy.to_dict(), "device": str(plan.device)}
    given = asdict(options)
    given |= {name: resolved.get(name) for name, value in given.items() if value in (None, "auto")}
    if plan.model is not None:
        del given["shape"]
    backbone = plan.sizes.backbone
    return {
        "options": given,
        "shape": {
            "layers": backbone.num_layers,
            "hidden": plan.config.get_text_config().hidden_size,
            "heads": backbone.num_heads,
            "kv_heads": backbone.num_kv_heads,
            "bytes": plan.sizes.weight_bytes,
        },
        "device": device_name(plan.device),
        **versions(),
    }


def origin(place: Mapping[str, Any], module: str) -> list[str]:
    """Return the lines that say on what, with which command and with which versions a record was made."""
    options = place["options"]
    shown = {k: v for k, v in options.items() if v is not None and k not in ("output", "trace")}
    flags = [f"--{name.replace('_', '-')} {value}" for name, value in shown.items()]
    shape = ", ".join(f"{name} {value}" for name, value in place["shape"].items())
    made = ", ".join(f"{name} {place[name]}" for name in versions())
    return [f"Backbone: {shape}. {place['device']}, {made}.", "", f"`python -m {module} {' '.join(flags)}`", ""]
