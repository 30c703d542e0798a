"""The optimizer of the heads: one AdamW for those of all layers, in one fused kernel where PyTorch has one."""

from __future__ import annotations

import torch
from torch import nn

from locret.train.training_options import OptimizerOptions

_FUSED = ("cuda", "cpu")


def head_optimizer(
    heads: nn.Module, options: OptimizerOptions
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Return the optimizer and the schedule of its learning rate.

    Args:
        heads: What is trained, on its device.
        options: Learning rate, schedule, moments and decay.
    """
    o, parameters = options, list(heads.parameters())
    fused = parameters[0].device.type in _FUSED or None
    optimizer = torch.optim.AdamW(
        parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=fused
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, o.warmup_steps, o.steps)
    )
    return optimizer, schedule


def learning_rate_factor(step: int, warmup_steps: int, steps: int) -> float:
    """Return the share of the learning rate at a step counted from 0: linear up to 1, then linear down to 0."""
    if step < warmup_steps:
        return step / warmup_steps
    return max(0.0, (steps - step) / max(1, steps - warmup_steps))
