"""`locret kernels`: train LoCoCo's merging kernels on a frozen backbone, beside the retaining heads they work with.

locret kernels --model checkpoints/tiny --heads checkpoints/tiny-heads --dataset rows.jsonl --policy.budget 64 \
    --slots 8 --output runs/tiny-loco
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.base.fields import Range, check_ranges
from locret.cli.command import bars_on_terminals, parse_options, print_json, run
from locret.loading.options import BackboneSource
from locret.policy.policy import NO_MERGER, RetentionPolicy
from locret.policy.resolve import PolicyFlags, resolve

if TYPE_CHECKING:
    from torch import nn

    from locret.mergers.kernels import MergingKernels


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """What is trained, on what, and where it goes."""

    heads: str
    """Retaining heads that say which units stay: a folder, or their Hub id."""
    dataset: str
    """Rows to read, as locret-train takes them."""
    output: str
    """Folder for the kernels; a new one, or one of kernels, whose files are replaced."""
    policy: RetentionPolicy = field(default_factory=PolicyFlags)
    """How rows are read. Kernels work for the number of slots they are made for, within any budget above it."""
    slots: int | None = None
    """Units that every KV head merges into; if none, an eighth of the budget (LoCoCo's share in Locret's table)."""
    kernel_size: int = 21
    """Units that a convolution sees at once, an odd number (LoCoCo)."""
    steps: int = 200
    """Rows to train on, one in each step (Locret's run of LoCoCo)."""
    lr: float = 5.0e-3
    """Learning rate at the first step; it falls linearly to 0."""
    seed: int = 0
    """Seed of fresh kernels and of the order of the rows."""
    max_prompt_tokens: int = 10240
    """First prompt tokens of a row that are read."""
    log_every: int = 10
    """Steps between two lines about the loss."""
    json: bool = False
    """Print one JSON object at the end."""

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(("steps", "max_prompt_tokens", "log_every", "kernel_size"), Range(1)))
        if self.kernel_size % 2 == 0:
            raise ValueError(f"--kernel-size {self.kernel_size} is not odd; use such as 21")
        if type(self.policy) is not RetentionPolicy:
            object.__setattr__(self, "policy", resolve(vars(self.policy), {}))
        policy = self.policy
        plain = policy.positions == "compact" and policy.merge == NO_MERGER and policy.when == "chunk"
        if not plain or policy.has_host or not policy.exact_bits:
            raise ValueError(
                '--policy must evict chunk by chunk with positions="compact", without host_budget, bits and merge: the '
                "kernels merge"
            )
        slots = max(1, policy.budget // 8) if self.slots is None else self.slots
        if not 1 <= slots <= policy.budget - policy.stabilizers:
            raise ValueError(
                f"--slots {slots} is not between 1 and the {policy.budget - policy.stabilizers} units of "
                f"--policy.budget {policy.budget} that are not stabilizers; change it"
            )
        object.__setattr__(self, "slots", slots)


def command(argv: Sequence[str] | None = None) -> int:
    (backbone, options), _ = parse_options(
        "locret kernels", "Train LoCoCo's merging kernels on a frozen backbone.", [BackboneSource, KernelOptions], argv
    )
    with bars_on_terminals():
        summary = _train(backbone, options)
    if options.json:
        print_json(summary)
    else:
        sys.stdout.write(
            f"kernels saved to {options.output}: {summary['loss']:.3f} of the error of eviction alone is left "
            f"(before training {summary['loss_before']:.3f})\n"
        )
    return 0


def _train(backbone: BackboneSource, options: KernelOptions) -> dict[str, Any]:
    import torch

    from locret.backbone.adapters import describe
    from locret.data.training.stream import TrainingStream, load_rows
    from locret.heads import checkpoint
    from locret.heads.heads import RetainingHeads
    from locret.loading import device_of_source, load_config, load_model, load_tokenizer, resolve_dtype
    from locret.mergers.kernels import KernelsConfig, MergingKernels

    config, device = load_config(backbone), device_of_source(backbone)
    heads = RetainingHeads.from_pretrained(options.heads)
    heads.check_matches(config)
    assert options.slots is not None
    kernels = MergingKernels.for_model(config, options.slots, options.kernel_size, options.seed)
    stream = TrainingStream(
        load_rows(options.dataset),
        load_tokenizer(backbone),
        seed=options.seed,
        max_length=describe(config).max_positions,
        source=options.dataset,
    )
    checkpoint.refuse_foreign(Path(options.output), KernelsConfig)
    model = load_model(backbone, config, device, resolve_dtype(backbone.dtype, config, device))
    losses = _steps(model, heads.follow(model), kernels.to(device), stream, options)
    facts = {"dataset": options.dataset, "steps": options.steps, "lr": options.lr, "seed": options.seed}
    kernels.config = kernels.config.annotated(
        policy=options.policy.to_dict(), training={**facts, "final_loss": losses[-1], "torch": torch.__version__}
    )
    kernels.save_pretrained(options.output)
    return {"output": options.output, "loss_before": losses[0], "loss": losses[-1], "steps": options.steps}


def _steps(model: nn.Module, heads: Any, kernels: MergingKernels, stream: Any, options: KernelOptions) -> list[float]:
    """Train; return the loss of the first steps and that of the last ones, each over `log_every` of them."""
    import torch
    from transformers import get_linear_schedule_with_warmup

    from locret.train.merging_step import merging_step

    optimizer = torch.optim.AdamW(kernels.parameters(), lr=options.lr, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, options.steps)
    losses: list[float] = []
    for step in range(1, options.steps + 1):
        ids = next(stream).prompt_ids[:, : options.max_prompt_tokens]
        losses.append(float(merging_step(model, heads, kernels, ids, options.policy).mean()))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % options.log_every == 0 or step == options.steps:
            recent = losses[-options.log_every :]
            sys.stderr.write(f"step {step}: {sum(recent) / len(recent):.4f} of the error is left\n")
    window = min(options.log_every, len(losses))
    return [sum(losses[:window]) / window, sum(losses[-window:]) / window]


if __name__ == "__main__":
    run(command, prog="locret kernels")
