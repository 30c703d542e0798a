"""Fully sharded weights: every process holds a slice of each layer and gathers a layer while it runs.

transformers loads them so: it builds the model without memory, puts PyTorch's `fully_shard` on it, and each process
reads its slices alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn


def load(device: torch.device, read: Callable[..., tuple[nn.Module, Any]], *, offload: bool) -> tuple[nn.Module, Any]:
    """Load a backbone in slices.

    Args:
        device: Where this process computes.
        read: transformers' `from_pretrained`.
        offload: Keep the slices in the host's memory until a layer runs.

    Raises:
        ValueError: If they are there anyway.
    """
    from torch.distributed.fsdp import FSDPModule
    from transformers.distributed import DistributedConfig

    if offload and device.type == "cpu":
        raise ValueError("--shard-offload cpu: without a GPU all weights are in the host's memory anyway; drop it")
    size = torch.distributed.get_world_size()
    model, found = read(distributed_config=DistributedConfig(fsdp_size=size, fsdp_cpu_offload=offload))
    if not isinstance(model, FSDPModule):
        raise ValueError(f"transformers has not sharded {type(model).__name__}; leave --shard fsdp out")
    # Of itself the root would keep what it gathered, and so would transformers' plan for the language-model head.
    model.set_reshard_after_forward(True)
    return model, found
