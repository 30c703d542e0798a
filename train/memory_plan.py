"""What a training run will need, in bytes and operations, computed from the backbone's config alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from locret.backbone.adapters import LayerShape, describe
from locret.heads.config import HeadsConfig
from locret.labels.labels import logit_bytes
from locret.loading.options import BackboneSource
from locret.loading.plan import sketch_of
from locret.train.training_options import BackboneOptions

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def known_config(source: BackboneSource) -> Any:
    """Return the default backbone's config as far as plans need it, so that nothing is fetched; None for others."""
    if source.model != BackboneOptions.model or source.revision is not None:
        return None
    from transformers import Phi3Config

    return Phi3Config(max_position_embeddings=131072, dtype=torch.bfloat16)  # the other numbers are its defaults


def backbone_parameters(config: Any) -> int:
    """Count the backbone's parameters without loading any, and check that its modules are where heads look for them.

    Raises:
        ValueError: If they are not.
    """
    return sum(parameter.numel() for parameter in sketch(config).parameters())


def sketch(config: Any) -> nn.Module:
    """Return the backbone on the meta device, without any weights, its modules where heads look for them.

    Raises:
        ValueError: If they are not.
    """
    model = sketch_of(config)
    describe(model)
    return model


def memory_plan(
    config: Any,
    parameters: int,
    *,
    hidden_dim: int,
    neighbours: int = 0,
    dtype: torch.dtype,
    autocast: bool,
    tokens: int,
    trained_tokens: int,
    asked_apart: bool = False,
    weighed_labels: bool = False,
    backbone_bytes: int | None = None,
) -> dict[str, int]:
    """Return bytes by purpose, of one process.

    Args:
        config: The backbone's config.
        parameters: What `backbone_parameters` counted.
        hidden_dim: d_R of the heads.
        neighbours: Tokens before each one that they look at too.
        dtype: Type of the backbone's weights.
        autocast: Whether the heads compute in two bytes instead of four.
        tokens: Tokens of the longest row, prompt and answer.
        trained_tokens: Prompt tokens of it that are trained on.
        asked_apart: Whether answers are trained on each by itself: the features of all layers are held at once, and a
            document's keys and values, once more for the question that goes on from it.
        weighed_labels: Whether labels weigh values behind the output projection, as `kvzip_plus` does.
        backbone_bytes: What the backbone's weights take on the device; None: all of them, in `dtype`.

    Returns:
        `backbone`, `heads`, `gradients`, `optimizer` and, where they are kept, `features` and `document` (exact, but
        for layers with a window, which are counted as if they held everything), `one_layer` (an
        estimate of the largest tensors that live at once while one layer is read and trained: hidden states, MLP,
        queries, keys and values before and after rotation, labels, the head's own), and their `total`.

    Raises:
        ValueError: For a backbone that retaining heads cannot work on.
    """
    heads = HeadsConfig.for_model(config, hidden_dim, neighbours=neighbours)
    weights = heads.num_weights
    sizes = dtype.itemsize, 2 if autocast else 4
    plan = {
        "backbone": parameters * dtype.itemsize if backbone_bytes is None else backbone_bytes,
        "heads": weights * 4,
        "gradients": weights * 4,
        "optimizer": weights * 8,
        "one_layer": layer_bytes(
            config,
            hidden_dim,
            *sizes,
            tokens,
            trained_tokens,
            neighbours=neighbours,
            weighed_labels=weighed_labels,
        ),
    }
    if asked_apart:
        plan["features"] = trained_tokens * sum(map(heads.width, heads.layers)) * dtype.itemsize
        backbone = describe(config)
        shapes = map(backbone.shape, range(backbone.num_layers))
        numbers = sum(shape.num_kv_heads * (shape.head_dim + shape.value_dim) for shape in shapes)
        plan["document"] = 2 * tokens * numbers * dtype.itemsize
    return {**plan, "total": sum(plan.values())}


def step_flops(config: Any, parameters: int, heads: int, tokens: int) -> int | None:
    """Return the floating-point operations of one row: the backbone's forward pass, and the heads' two passes.

    Labels and norms are left out, which are small beside them.

    Args:
        config: The backbone's config.
        parameters: What `backbone_parameters` counted.
        heads: Weights of the heads.
        tokens: Tokens of the row.

    Returns:
        The operations; None for a mixture of experts, where they depend on the router.
    """
    backbone, text = describe(config), config.get_text_config()
    if any(getattr(text, name, None) for name in _EXPERTS):
        return None
    embeddings = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2)
    shapes = map(backbone.shape, range(backbone.num_layers))
    widths = sum(shape.num_heads * (shape.query_dim + shape.value_dim) for shape in shapes)
    attention = widths * tokens  # causal: half of all pairs
    return int(tokens * (2 * (parameters - embeddings) + attention + 4 * heads))


def check_fits(plan: dict[str, int], device: torch.device, hidden_dim: int) -> None:
    """Refuse a run whose weights alone are more than the device has; what rows take is only an estimate.

    Raises:
        ValueError: Naming what is too large.
    """
    memory = device_bytes(device)
    training = plan["heads"] + plan["gradients"] + plan["optimizer"]
    if plan["backbone"] > memory:
        raise ValueError(
            f"--model takes {gibibytes(plan['backbone'])} of weights, but {device} has {gibibytes(memory)}; choose a "
            "smaller backbone or --dtype, --load-in-4bit, --device-map auto, or a larger device"
        )
    if plan["backbone"] + training > memory:
        raise ValueError(
            f"--hidden-dim {hidden_dim} makes heads that take {gibibytes(training)} with gradients and optimizer, "
            f"besides {gibibytes(plan['backbone'])} of the backbone, but {device} has {gibibytes(memory)}; lower it"
        )


def device_bytes(device: torch.device) -> int:
    """Return the memory of a device, used or not; on a CPU with its swap space."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    import psutil

    return int(psutil.virtual_memory().total + psutil.swap_memory().total)


def gibibytes(count: int) -> str:
    """Return bytes as people read them."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"


def layer_bytes(
    config: Any,
    hidden_dim: int,
    size: int,
    head_size: int,
    tokens: int,
    trained: int,
    *,
    neighbours: int = 0,
    weighed_labels: bool = False,
) -> int:
    """Return the bytes that one layer works with; see `memory_plan`.

    Args:
        config: The backbone's.
        hidden_dim: d_R of the heads.
        size: Bytes of a number of the backbone.
        head_size: Bytes of a number in the heads' arithmetic.
        tokens: Tokens of the row.
        trained: Prompt tokens of it that are trained on.
        neighbours: See `memory_plan`.
        weighed_labels: See `memory_plan`.
    """
    text = config.get_text_config()
    width, inner = text.hidden_size, getattr(text, "intermediate_size", 4 * text.hidden_size)
    held = (4 if neighbours else 3) * hidden_dim  # the head's hidden states; with neighbours, those that are mixed too

    def one_layer(shape: LayerShape) -> int:
        feature, dim, heads, kv_heads = shape.feature_dim, shape.head_dim, shape.num_heads, shape.num_kv_heads
        queries, keys = heads * shape.query_dim, kv_heads * max(dim, shape.value_dim)
        always = 3 * width + 2 * dim  # embeddings, residual and normed states; cosines and sines
        reading = width + max(3 * (max(inner) if isinstance(inner, list) else inner), 2 * feature)
        attended = (
            feature + (queries + keys) + queries
        )  # projections, rotated queries and keys, what attention returned
        labelling = logit_bytes(heads, shape.seen_dim, tokens) + (tokens * keys * 4 if size < 4 else 0)
        if weighed_labels:
            labelling = max(labelling + trained * heads * 4, _weighing(shape, heads, width, size, trained))
        # Features, once more where the head computes in another dtype; its hidden states; scores, labels, differences.
        per_token = feature * (size + (head_size if head_size != size else 0)) + held * head_size
        training = trained * (per_token + 16 * kv_heads) + 4 * hidden_dim * feature  # and a new gradient
        return max(tokens * size * (always + reading), tokens * size * (always + attended) + max(labelling, training))

    return max(map(one_layer, set(describe(config).full_shapes)))


def _weighing(shape: LayerShape, heads: int, width: int, size: int, trained: int) -> int:
    """Return the bytes that the lengths of values behind the output projection take, before attention is looked at."""
    rows = heads * shape.value_dim
    columns = rows * (rows * size + width * (2 * size + 4))  # what the projection is asked, and what it says
    products = trained * shape.value_dim * (heads + shape.num_kv_heads) * 4 + rows * shape.value_dim * 4
    return max(columns, products)


def checkpoint_bytes(plan: dict[str, int], kept: int) -> int:
    """Return what a run writes: `kept` checkpoints, one more while it is written, and the heads."""
    return (kept + 1) * (plan["heads"] + plan["optimizer"]) + plan["heads"]
