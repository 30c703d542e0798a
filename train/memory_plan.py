"""What a training run will need, computed from the backbone's config alone."""

from __future__ import annotations

from typing import Any

import torch

from locret.adapters import describe
from locret.heads import RetainingHeads

_LABEL_BLOCK_BYTES = 64 * 2**20


def backbone_parameters(config: Any) -> int:
    """Count the backbone's parameters without loading any, and check that its modules are where heads look for them.

    Raises:
        ValueError: If they are not.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    describe(model)
    return sum(parameter.numel() for parameter in model.parameters())


def memory_plan(
    config: Any,
    parameters: int,
    *,
    hidden_dim: int,
    dtype: torch.dtype,
    autocast: bool,
    tokens: int,
    trained_tokens: int,
    kept_features: bool = False,
) -> dict[str, int]:
    """Return bytes by purpose.

    Args:
        config: The backbone's config.
        parameters: What `backbone_parameters` counted.
        hidden_dim: d_R of the heads.
        dtype: Type of the backbone's weights.
        autocast: Whether the heads compute in two bytes instead of four.
        tokens: Tokens of the longest row, prompt and answer.
        trained_tokens: Prompt tokens of it that are trained on.
        kept_features: Whether the features of all layers are held at once, as training under eviction does.

    Returns:
        `backbone`, `heads`, `gradients`, `optimizer` and, where they are kept, `features` (exact), `one_layer` (an
        estimate of the largest tensors that live at once while one layer is read and trained: hidden states, MLP,
        queries, keys and values before and after rotation, the head's own), and their `total`.

    Raises:
        ValueError: For a backbone that retaining heads cannot work on.
    """
    backbone, text = describe(config), config.get_text_config()
    size, head_size = dtype.itemsize, 2 if autocast else 4
    with torch.device("meta"):
        heads = RetainingHeads.for_model(config, hidden_dim)
    weights = sum(parameter.numel() for parameter in heads.parameters())
    width, feature = text.hidden_size, backbone.feature_dim
    reading = tokens * size * (3 * width + max(3 * getattr(text, "intermediate_size", 4 * width), 2 * feature))
    training = trained_tokens * (feature * (size + head_size) + 3 * hidden_dim * head_size)
    training += tokens * backbone.num_kv_heads * backbone.head_dim * 4  # keys in float32, for the labels
    training += trained_tokens * backbone.num_kv_heads * 4 * 4  # scores and labels, and their differences
    plan = {
        "backbone": parameters * size,
        "heads": weights * 4,
        "gradients": weights * 4,
        "optimizer": weights * 8,
        "one_layer": max(reading, tokens * size * (2 * width + 2 * feature) + training + _LABEL_BLOCK_BYTES),
    }
    if kept_features:
        plan["features"] = len(backbone.layers) * trained_tokens * feature * size
    return {**plan, "total": sum(plan.values())}


def checkpoint_bytes(plan: dict[str, int], kept: int) -> int:
    """Return what a run writes: `kept` checkpoints, one more while it is written, and the heads."""
    return (kept + 1) * (plan["heads"] + plan["optimizer"]) + plan["heads"]
