"""What a training run will need, in bytes, computed from the backbone's config alone."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from locret.backbone.adapters import describe
from locret.backbone.shape import LayerShape
from locret.heads.config import HeadsConfig
from locret.labels.labels import logit_bytes
from locret.loading.weights import sketch_of


def backbone_parameters(config: Any) -> int:
    """Count the backbone's parameters without loading any.

    Raises:
        ValueError: If its modules are not where heads look for them.
    """
    model = sketch_of(config)
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
    asked_apart: bool = False,
    backbone_bytes: int | None = None,
) -> dict[str, int]:
    """Return bytes by purpose, of one process.

    Args:
        config: The backbone's config.
        parameters: What `backbone_parameters` counted.
        hidden_dim: d_R of the heads.
        dtype: Type of the backbone's weights.
        autocast: Whether the heads compute in half precision.
        tokens: Tokens of the row that is planned for.
        trained_tokens: Prompt tokens of it that are trained on.
        asked_apart: Whether questions are asked apart: features and the document's keys and values are kept then.
        backbone_bytes: What the backbone's weights take on the device; None: all of them, in `dtype`.

    Returns:
        `backbone`, `heads`, `gradients`, `optimizer` and, where they are kept, `features` and `document` (exact, but
        for layers with a window, which are counted as if they held everything), `one_layer` (an estimate of the largest
        tensors that live at once while one layer is read and trained), and their `total`.
    """
    heads, backbone = HeadsConfig.for_model(config, hidden_dim), describe(config)
    size, head_size = dtype.itemsize, 2 if autocast else 4
    text = config.get_text_config()
    inner = getattr(text, "intermediate_size", 4 * text.hidden_size)
    inner = max(inner) if isinstance(inner, list) else inner
    hidden = 3 * hidden_dim  # the head's hidden states

    def one_layer(shape: LayerShape) -> int:
        feature, heads, kv_heads = shape.feature_dim, shape.num_heads, shape.num_kv_heads
        queries, keys = heads * shape.query_dim, kv_heads * max(shape.head_dim, shape.value_dim)
        always = 3 * text.hidden_size + 2 * shape.head_dim  # embeddings, residual, normed states; cosines and sines
        reading = text.hidden_size + max(3 * inner, 2 * feature)
        attended = feature + 2 * queries + keys  # projections, rotated queries and keys, what attention returned
        labelling = logit_bytes(heads, shape.seen_dim, tokens) + (tokens * keys * 4 if size < 4 else 0)
        # Features, once more where the head computes in another dtype; its hidden states; scores, labels, differences.
        per_token = feature * (size + (head_size if head_size != size else 0)) + hidden * head_size + 16 * kv_heads
        training = trained_tokens * per_token + 4 * hidden_dim * feature  # and a new gradient
        return max(tokens * size * (always + reading), tokens * size * (always + attended) + max(labelling, training))

    weights = heads.num_weights
    plan = {
        "backbone": parameters * size if backbone_bytes is None else backbone_bytes,
        "heads": weights * 4,
        "gradients": weights * 4,
        "optimizer": weights * 8,
        "one_layer": max(map(one_layer, set(backbone.full_shapes))),
    }
    if asked_apart:
        shapes = map(backbone.shape, range(backbone.num_layers))
        numbers = sum(shape.num_kv_heads * (shape.head_dim + shape.value_dim) for shape in shapes)
        plan["features"] = trained_tokens * sum(map(heads.width, heads.layers)) * size
        plan["document"] = 2 * tokens * numbers * size
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


def checkpoint_bytes(plan: dict[str, int], kept: int) -> int:
    """Return what a run writes: `kept` checkpoints, one more while it is written, and the heads."""
    return (kept + 1) * (plan["heads"] + plan["optimizer"]) + plan["heads"]


def gibibytes(count: int) -> str:
    """Return bytes as people read them."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"
