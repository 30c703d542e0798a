"""The optimizer of the heads: one AdamW for those of all layers, in one fused kernel where PyTorch has one."""

from __future__ import annotations

import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup

from locret.train.training_options import OptimizerOptions

_FUSED = ("cuda", "cpu")


def head_optimizer(
    heads: nn.Module, options: OptimizerOptions
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """Return the optimizer and the schedule of its learning rate: linear up from 0, then linear down to 0.

    Args:
        heads: What is trained, on its device.
        options: Learning rate, schedule, moments and decay.
    """
    o, parameters = options, list(heads.parameters())
    fused = parameters[0].device.type in _FUSED or None
    optimizer = torch.optim.AdamW(
        parameters, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=fused
    )
    return optimizer, get_linear_schedule_with_warmup(optimizer, o.warmup, o.steps)
