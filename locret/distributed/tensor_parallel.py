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

from locret.backbone.adapters import Backbone, describe, on_rank, sharers_of
from locret.backbone.head_ranks import SPLIT

_OF_HEADS = (".q_proj", ".kv_b_proj")
"""Projections that a plan splits where it splits heads; the second is that of latent attention."""


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
    part_of(config, size)
    model, found = read(distributed_config=DistributedConfig(tp_size=size))
    if sharers_of(model) is None:
        raise ValueError(f"transformers has not split {type(model).__name__}; use --shard fsdp")
    describe(model)
    return model, found


def part_of(config: Any, size: int) -> Backbone:
    """Return a backbone as each of so many processes will have it: where its plan splits heads, with some of them.

    Raises:
        ValueError: If transformers has no plan for it or one that changes what it computes, or its KV heads cannot be
            shared equally.
    """
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"transformers has no plan for tensor parallelism of {text.model_type} (base_model_tp_plan); use --shard "
            "fsdp"
        )
    backbone = describe(config)
    if any(getattr(text, "activation_sparsity_pattern", None) or ()):
        raise ValueError(
            f"an MLP of {text.model_type} is cut off at a quantile of all its numbers (activation_sparsity_pattern), "
            "of which --shard tp gives each process some; use --shard fsdp"
        )
    splits = any(name.endswith(_OF_HEADS) and style == SPLIT for name, style in plan.items())
    return on_rank(backbone, size) if splits else backbone
