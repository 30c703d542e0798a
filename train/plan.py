"""What a training run will need, in bytes, before a weight is read."""

from __future__ import annotations

import psutil
import torch


def memory_plan(backbone: int, weights: int) -> dict[str, int]:
    """Return bytes by purpose, of one process.

    Args:
        backbone: What the backbone's weights take on the device.
        weights: Numbers of all heads.

    Returns:
        `backbone`, `heads`, `gradients`, `optimizer` and their `total`. A row takes besides what the backbone takes to
        read it, and the tensors of one layer's head.
    """
    plan = {"backbone": backbone, "heads": weights * 4, "gradients": weights * 4, "optimizer": weights * 8}
    return {**plan, "total": sum(plan.values())}


def check_fits(plan: dict[str, int], device: torch.device) -> None:
    """Refuse a run whose weights alone are more than the device has; what rows take is only an estimate.

    Raises:
        ValueError: Naming what is too large.
    """
    swapped = psutil.virtual_memory().total + psutil.swap_memory().total
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else swapped
    training = plan["heads"] + plan["gradients"] + plan["optimizer"]
    if plan["backbone"] + training > memory:
        raise ValueError(
            f"--model takes {gibibytes(plan['backbone'])} of weights and --hidden-dim makes heads of "
            f"{gibibytes(training)} with gradients and optimizer, but {device} has {gibibytes(int(memory))}; choose a "
            "smaller backbone or --dtype, --load-in-4bit, --device-map auto, or lower --hidden-dim"
        )


def gibibytes(count: int) -> str:
    """Return bytes as people read them."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"
