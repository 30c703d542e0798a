"""Tensor parallel: every process holds some heads of every layer, and all work on the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import nn


def load(device: torch.device, read: Callable[..., tuple[nn.Module, Any]]) -> tuple[nn.Module, Any]:
    """Load a backbone split by its heads."""
    from transformers.distributed import DistributedConfig

    return read(distributed_config=DistributedConfig(tp_size=torch.distributed.get_world_size(), tp_plan="auto"))
