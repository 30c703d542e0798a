"""How many tokens go through the backbone at once, where that is left to the machine (`--chunk-size auto`).

A chunk attends to the budget and, on average, to half of itself: up to half the budget that costs at most a quarter
more attention, while what a chunk costs once (rotating and selecting what is kept, starting kernels) is spread over
more tokens. The paper's own settings for Phi-3 are near that (6,000 units, chunks of 3,072). Beyond 8,192 tokens
products of matrices gain nothing, and a chunk needs memory; so the chunk is halved until it fits into what is free.
"""

# E hidden size, I width of the MLP, H query heads, K KV heads, D head dim, F = (H + 2 K) D features, R width of a head

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from locret import RetainingHeads, RetentionPolicy
from locret.backbone.adapters import describe
from locret.scorers import Scorer

LARGEST, SMALLEST = 8192, 64
LEAST_USEFUL = 256
"""Below so many tokens products of matrices are slow, however small the budget."""
SHARE = 0.9
"""Of what is free; the rest is for what nobody plans, such as an allocator's fragments."""
_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class ChunkChoice:
    """A chunk size, and why."""

    chunk_size: int
    needed_bytes: int
    """Weights, cache and what a chunk works with, as planned."""
    free_bytes: int | None
    """What the device had free; None where it does not tell."""

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as plain data."""
        return asdict(self)


def choose(
    policy_of: Callable[[int], RetentionPolicy],
    needed: Callable[[RetentionPolicy], int],
    *,
    device: str,
    free: int | None,
    least: int = 1,
) -> ChunkChoice:
    """Return the largest useful chunk that fits.

    Args:
        policy_of: The policy with a given chunk size.
        needed: Bytes of a run with a given policy.
        device: For the message.
        free: Bytes there are; None: unknown, and taken as enough.
        least: Smallest chunk that the scorer and the policy can work with.

    Raises:
        ValueError: If not even the smallest chunk fits.
    """
    smallest = max(SMALLEST, least)
    size = LARGEST
    while size > max(LEAST_USEFUL, policy_of(size).budget // 2, smallest):
        size //= 2
    size = max(size, smallest)
    while True:
        policy = policy_of(size)
        bytes_ = needed(policy)
        if free is None or bytes_ <= SHARE * free:
            return ChunkChoice(size, bytes_, free)
        if size == smallest:
            raise ValueError(
                f"--chunk-size auto finds no size that fits: with {size} tokens a run takes {bytes_:,} bytes, but only "
                f"{free:,} are free on {device}; lower --budget, take a smaller --dtype, or free memory"
            )
        size = max(size // 2, smallest)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device can still give; None where it does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    available, left = psutil.virtual_memory().available, _left_in_group()
    return available if left is None else min(available, left)


def total_bytes(device: torch.device) -> int:
    """Return the bytes that a device has, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    limit = _group_bytes("memory.max")
    return psutil.virtual_memory().total if limit is None else min(psutil.virtual_memory().total, limit)


def _left_in_group() -> int | None:
    """Return what a container's limit leaves; None without one."""
    most, held = _group_bytes("memory.max"), _group_bytes("memory.current")
    return None if most is None or held is None else max(0, most - held)


def _group_bytes(name: str) -> int | None:
    try:
        return int((_GROUP / name).read_text())
    except (OSError, ValueError):  # "max" is neither a number nor a limit
        return None


def head_bytes(scorer: RetainingHeads | Scorer, dtype: torch.dtype) -> int:
    """Return the bytes of retaining heads, with the copies of their weights that a shorter dtype works with."""
    if not isinstance(scorer, RetainingHeads):
        return 0
    copies = 0 if dtype == torch.float32 else dtype.itemsize
    return sum(parameter.numel() * (4 + copies) for parameter in scorer.parameters())


def working_bytes(config: Any, scorer: RetainingHeads | Scorer, dtype: torch.dtype, tokens: int) -> int:
    """Return the bytes, at most, that a chunk works with in the layer that needs most, cache and workspace aside.

    A norm holds hidden states in float32, besides those it was given and those of the residual. Attention holds queries
    and keys before and after rotation, values, what it attends to and the scorer's features; the MLP holds two products
    and their combination. Cosines and sines of new and of cached positions are there all along.
    """
    backbone, text = describe(config), config.get_text_config()
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, list) else inner
    shapes = [backbone.shape(index) for index in range(backbone.num_layers)]
    attention = max(
        4 * shape.num_heads * shape.query_dim
        + 5 * shape.num_kv_heads * max(shape.head_dim, shape.value_dim)
        + shape.feature_dim
        for shape in shapes
    )
    head = 0
    if isinstance(scorer, RetainingHeads):
        head = scorer.config.hidden_dim * (dtype.itemsize + 2 * 4)
    layer = max(dtype.itemsize * max(attention, 3 * inner), dtype.itemsize * attention + head)
    angles = 2 * 2 * max(shape.head_dim for shape in shapes) * dtype.itemsize
    return tokens * (3 * hidden * dtype.itemsize + 2 * hidden * 4 + angles + layer)
