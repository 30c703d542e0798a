"""What a training step costs beside one forward pass of the backbone over the same tokens, in time and in memory.

    python -m locret.infer.speed.lab.training_cost --output infer/speed/records/training_cost_cpu

training/forward    a whole optimizer step (one row, clipping, AdamW) over the plain backbone reading the same tokens
labels/forward      reading and labels of all layers, without heads
optimizer/forward   clipping and AdamW alone

Memory is counted in layers: what one decoder layer holds while it reads the same tokens (`training_setup`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from locret.cli import parse_options, run
from locret.infer.speed.cost import Pass, cost
from locret.infer.speed.lab.training_setup import TrainingSetup, layer_activations, peak_above, training, training_setup
from locret.infer.speed.machine import measure_rates, now
from locret.infer.speed.options import BenchOptions
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.record import device_name
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.runs import make_setup
from locret.infer.speed.side_by_side import interleave, origin, quantiles, ratio, table, where, write
from locret.labels.labels import check_kind
from locret.tables import markdown

_PAIRS = {
    "training/forward": ("training", "forward"),
    "labels/forward": ("labels", "forward"),
    "optimizer/forward": ("optimizer", "forward"),
}


@dataclass(frozen=True, kw_only=True)
class TrainingCostOptions:
    """What is measured, and how often."""

    shape: str = "cpu-512"
    """Backbone of random weights: cpu-512, cpu-deep, tiny, llama-3.1-8b, phi-3-mini-128k or qwen3-8b."""
    model: str | None = None
    """Instead of --shape: folder of a backbone, or its Hub id."""
    hidden_dim: int | None = None
    """Width between a head's two layers, d_R; the shape's if not given."""
    tokens: int = 2048
    """Prompt tokens of the row."""
    answer_tokens: int = 64
    """Answer tokens of the row."""
    label_kind: str = "logit"
    """logit or log_attention."""
    repeats: int = 10
    """Rounds in which everything is measured once."""
    threads: int | None = None
    """CPU threads; as many as PyTorch takes if not given."""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes the first CUDA device, else the CPU (for the larger shapes: nothing)."""
    dtype: str = "auto"
    """bfloat16, float16 or float32; auto takes the backbone's own on a GPU and float32 on the CPU."""
    output: str | None = None
    """Write the record to this path, once as .json and once as .md."""

    def __post_init__(self) -> None:
        check_kind(self.label_kind)
        for name in ("tokens", "answer_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)} is too small; give 1 or more")


def plan_of(options: Any, chosen: set[str], method: str, tokens: int, **more: Any) -> BenchPlan:
    """Return the plan of a benchmark of one method and length.

    Raises:
        ValueError: For anything that cannot be measured as asked, a GPU that is not here included.
    """
    names = ("shape", "model", "hidden_dim", "threads", "device", "dtype")
    given = {name: getattr(options, name) for name in names}
    plan = make_plan(BenchOptions(**given, **more, methods=method, lengths=tokens), chosen)
    if plan.device is None:
        raise ValueError(
            f"--shape {options.shape} --device {options.device}: no CUDA device is here, so its cost stays unknown; "
            "choose --shape cpu-512 or --device cpu"
        )
    torch.set_num_threads(plan.threads)
    return plan


def where_taken(options: Any, plan: BenchPlan, model: PreTrainedModel) -> dict[str, Any]:
    """Return `where`, with options as they were resolved and the device's name."""
    assert plan.device is not None
    named = {
        "threads": plan.threads,
        "hidden_dim": plan.hidden_dim,
        "device": str(plan.device),
        "dtype": plan.dtype_name,
    }
    place = where(replace(options, **named), model)
    if plan.model is not None:
        del place["options"]["shape"]
    return {**place, "device": device_name(plan.device)}


def measure(options: TrainingCostOptions, chosen: set[str]) -> dict[str, Any]:
    """Return ratios, seconds, bytes, rates and where they were taken.

    Raises:
        ValueError: For anything that cannot be measured as asked.
        OSError: If a Hub refuses or cannot be reached.
    """
    plan = plan_of(options, chosen, "locret", options.tokens + options.answer_tokens, repeats=options.repeats)
    row = training_setup(make_setup(plan), options.answer_tokens, options.label_kind)
    stepped = row.with_own_heads()
    held = measure_bytes(row, plan)  # the first step of all, so that gradients and the optimizer's state are in it
    stepped.row()
    sides: dict[str, Callable[[], object]] = {
        "training": row.step,
        "forward": row.forward,
        "labels": row.labels,
        "optimizer": stepped.update,
        "rates": lambda: rates.append(measure_rates(row.model.device, plan.dtype).flops_per_second),
    }
    rates: list[float] = []
    seconds = interleave({name: _finished(side, row.model.device) for name, side in sides.items()}, options.repeats)
    tokens = row.both_1S.shape[1]
    flops = cost(plan.sizes, [Pass(tokens, (0,) * len(plan.sizes.backbone.layers), 0)]).flops
    shares = {
        name: quantiles([flops / s / rate for s, rate in zip(seconds[name], rates[1:], strict=True)])
        for name in ("training", "forward")
    }
    return {
        "ratios": {name: ratio(seconds, *pair) for name, pair in _PAIRS.items()},
        "seconds": {name: quantiles(values) for name, values in seconds.items() if name != "rates"},
        "forward_flops": flops,
        "share_of_matrix_rate": shares,
        "bytes": held,
        "where": where_taken(options, plan, row.model),
    }


def measure_bytes(row: TrainingSetup, plan: BenchPlan) -> dict[str, int]:
    """Return bytes above the weights of backbone and heads; the heads take their first step.

    `layer` is one layer's activations, `first_step` what the first optimizer step allocates, gradients and the
    optimizer's state included, `row` what a row takes once those are there, `planned` what `locret-train --dry-run`
    says of `row`.
    """
    device = row.model.device
    layer = layer_activations(row.model, row.both_1S)
    first = peak_above(row.first_step, device)
    planned = training("memory_plan", "memory_plan")(
        row.model.config,
        0,
        hidden_dim=row.heads.config.hidden_dim,
        dtype=plan.dtype,
        autocast=plan.dtype != torch.float32,
        tokens=row.both_1S.shape[1],
        trained_tokens=row.prompt_1T.shape[1],
    )["one_layer"]
    return {
        "layer": layer,
        "forward": peak_above(row.forward, device),
        "first_step": first,
        "row": peak_above(row.row, device),
        "planned": planned,
    }


def to_markdown(record: dict[str, Any]) -> str:
    """Return the record as a page for people."""
    held = record["bytes"]
    names = {
        "layer": "one decoder layer reads the tokens",
        "forward": "the plain backbone reads them",
        "row": "training on them",
        "planned": "training, as `locret-train --dry-run` plans it",
        "first_step": "the first step: training, gradients, AdamW's state",
    }
    rows = ([text, f"{held[name]:,}", f"{held[name] / held['layer']:.2f}"] for name, text in names.items())
    shares = record["share_of_matrix_rate"]
    rate = ", ".join(f"{name} {share['p50']:.0%}" for name, share in shares.items())
    return "\n".join(
        [
            "# What a training step costs",
            "",
            *table(record["ratios"]),
            "",
            *markdown(("bytes above the weights of backbone and heads", "bytes", "layers"), rows),
            "",
            f"Operations of the forward pass per second, of the matrix rate measured beside it: {rate} (p50).",
            "",
            *origin(record, "locret.infer.speed.lab.training_cost"),
        ]
    )


def command(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the record if asked to."""
    (options,), chosen = parse_options(
        "training_cost", "Measure what a training step costs.", [TrainingCostOptions], argv
    )
    record = measure(options, chosen)
    write(record, to_markdown(record), options.output)
    return 0


def _finished(side: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the same, until the device is done with it."""

    def call() -> None:
        side()
        now(device)

    return call


if __name__ == "__main__":
    run(command)
