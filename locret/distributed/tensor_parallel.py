"""Tensor parallel: every process holds some heads of every layer, and all work on the same rows.

transformers splits the weights by the backbone's own plan. What is ours is in the rooms that it concerns: a process
caches, scores and evicts the units of its own KV heads (`locret.backbone.head_ranks`), has the part of the retaining
heads that reads them (`locret.heads.shard`), and files hold all heads (`locret.cache.over_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed
from torch import nn

from locret.backbone.adapters import describe, on_rank, sharers_of
from locret.backbone.head_ranks import SPLIT


def load(config: Any, read: Callable[..., tuple[nn.Module, Any]]) -> tuple[nn.Module, Any]:
    """Load a backbone split by its heads.

    Args:
        config: The backbone's.
        read: transformers' `from_pretrained`.

    Raises:
        ValueError: If transformers has no plan for it, or its KV heads cannot be shared equally.
    """
    from transformers.distributed import DistributedConfig

    size = torch.distributed.get_world_size()
    text = config.get_text_config()
    if not getattr(text, "base_model_tp_plan", None):
        raise ValueError(
            f"transformers has no plan for tensor parallelism of {text.model_type} (base_model_tp_plan); use --shard "
            "fsdp"
        )
    if _splits_heads(text.base_model_tp_plan):
        on_rank(describe(config), size)
    model, found = read(distributed_config=DistributedConfig(tp_size=size))
    if sharers_of(model) is None:
        raise ValueError(f"transformers has not split {type(model).__name__}; use --shard fsdp")
    describe(model)
    return model, found


def _splits_heads(plan: dict[str, str]) -> bool:
    return any(name.endswith(".k_proj") and style == SPLIT for name, style in plan.items())
