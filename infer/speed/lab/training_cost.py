"""What a training step costs compared with a forward pass of the backbone over the same tokens, in time and memory.

    python -m locret.infer.speed.lab.training_cost --output infer/speed/records/training_cost_cpu

training/forward    a whole optimizer step (one row, clipping, AdamW) over the plain backbone reading the same tokens
labels/forward      reading and labels of all layers, without heads
optimizer/forward   clipping and AdamW alone

Memory is counted in layers: what one decoder layer holds while it reads the same tokens (`training_setup`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from locret import labels
from locret.cli.command import run
from locret.infer.speed.cost import Pass, cost
from locret.infer.speed.lab.harness import LabOptions, compared, interleave, program, ratio_table, where
from locret.infer.speed.lab.training_setup import TrainingSetup, layer_activations, peak_above, training_setup
from locret.infer.speed.machine import measure_rates
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.runs import make_setup
from locret.infer.speed.side_by_side import quantiles
from locret.tables import markdown
from locret.train.memory_plan import memory_plan

_PAIRS = {f"{name}/forward": (name, "forward") for name in ("training", "labels", "optimizer")}


@dataclass(frozen=True, kw_only=True)
class TrainingCostOptions(LabOptions):
    """What is measured, and how often."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        labels.get(self.label_kind)


def measure(options: TrainingCostOptions, chosen: set[str]) -> dict[str, Any]:
    """Return ratios, seconds, bytes, rates and where they were taken.

    Raises:
        ValueError: For anything that cannot be measured as asked.
        OSError: If a Hub refuses or cannot be reached.
    """
    plan = options.plan(chosen, "locret", options.tokens + options.answer_tokens)
    row = training_setup(make_setup(plan), options.answer_tokens, options.label_kind)
    stepped, device = row.with_own_heads(), row.model.device
    held = measure_bytes(row, plan)  # the first step of all, so that gradients and the optimizer's state are in it
    stepped.row()
    rates: list[float] = []
    sides = {
        "training": row.step,
        "forward": row.forward,
        "labels": row.labels,
        "optimizer": stepped.update,
        "rates": lambda: rates.append(measure_rates(device, plan.dtype).flops_per_second),
    }
    seconds = interleave(sides, options.repeats, device)
    tokens = row.both_1S.shape[1]
    flops = cost(plan.sizes, [Pass(tokens, (0,) * len(plan.sizes.backbone.layers), 0)]).flops
    shares = {
        name: quantiles([flops / s / rate for s, rate in zip(seconds[name], rates[1:], strict=True)])
        for name in ("training", "forward")
    }
    return {
        **compared(seconds, _PAIRS),
        "forward_flops": flops,
        "share_of_matrix_rate": shares,
        "bytes": held,
        "where": where(options, plan),
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
    planned = memory_plan(
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


def body(record: Mapping[str, Any]) -> list[str]:
    """Return the lines of the page."""
    held = record["bytes"]
    names = {
        "layer": "one decoder layer reads the tokens",
        "forward": "the plain backbone reads them",
        "row": "training on them",
        "planned": "training, as `locret-train --dry-run` plans it",
        "first_step": "the first step: training, gradients, AdamW's state",
    }
    rows = ([text, f"{held[name]:,}", f"{held[name] / held['layer']:.2f}"] for name, text in names.items())
    rate = ", ".join(f"{name} {share['p50']:.0%}" for name, share in record["share_of_matrix_rate"].items())
    return [
        *ratio_table(record),
        "",
        *markdown(("bytes above the weights of backbone and heads", "bytes", "layers"), rows),
        "",
        f"Operations of the forward pass per second, of the matrix rate measured in the same run: {rate} (p50).",
    ]


command = program("training_cost", "What a training step costs", TrainingCostOptions, measure, body)

if __name__ == "__main__":
    run(command)
