"""What a training run will need, computed from the backbone's config alone."""

from __future__ import annotations

from typing import Any

import torch

from locret.backbone.adapters import Backbone, describe
from locret.heads.config import HeadsConfig
from locret.labels.labels import logit_bytes


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
        queries, keys and values before and after rotation, labels, the head's own), and their `total`.

    Raises:
        ValueError: For a backbone that retaining heads cannot work on.
    """
    backbone, text = describe(config), config.get_text_config()
    weights = HeadsConfig.for_model(config, hidden_dim).num_weights
    sizes = dtype.itemsize, 2 if autocast else 4
    plan = {
        "backbone": parameters * dtype.itemsize,
        "heads": weights * 4,
        "gradients": weights * 4,
        "optimizer": weights * 8,
        "one_layer": _one_layer(backbone, text, hidden_dim, *sizes, tokens, trained_tokens),
    }
    if kept_features:
        plan["features"] = len(backbone.layers) * trained_tokens * backbone.feature_dim * dtype.itemsize
    return {**plan, "total": sum(plan.values())}


def _one_layer(
    backbone: Backbone, text: Any, hidden_dim: int, size: int, head_size: int, tokens: int, trained: int
) -> int:
    width, feature, dim = text.hidden_size, backbone.feature_dim, backbone.head_dim
    queries, keys = backbone.num_heads * dim, backbone.num_kv_heads * dim
    always = 3 * width + 2 * dim  # embeddings, residual and normed states; cosines and sines
    reading = width + max(3 * getattr(text, "intermediate_size", 4 * width), 2 * feature)
    attended = feature + (queries + keys) + queries  # projections, rotated queries and keys, what attention returned
    labelling = logit_bytes(backbone.num_heads, dim, tokens) + (tokens * keys * 4 if size < 4 else 0)
    # Features, once more where the head computes in another dtype; its hidden states; scores, labels and differences.
    per_token = feature * (size + (head_size if head_size != size else 0)) + 3 * hidden_dim * head_size
    training = trained * (per_token + 16 * backbone.num_kv_heads) + 4 * hidden_dim * feature  # and a new gradient
    return max(tokens * size * (always + reading), tokens * size * (always + attended) + max(labelling, training))


def checkpoint_bytes(plan: dict[str, int], kept: int) -> int:
    """Return what a run writes: `kept` checkpoints, one more while it is written, and the heads."""
    return (kept + 1) * (plan["heads"] + plan["optimizer"]) + plan["heads"]
