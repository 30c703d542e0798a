"""The ways of spreading a frozen backbone over processes; each only loads, and never wraps what is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from locret.distributed import ranks
from locret.load_options import BackboneSource


def load_sharded(
    options: BackboneSource,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    read: Callable[..., tuple[nn.Module, Any]],
) -> tuple[nn.Module, Any]:
    """Load a backbone of which every process holds a part, joining the other processes if this one has not.

    Args:
        options: The backbone, and how it is to be sharded.
        config: The backbone's.
        device: Where this process computes.
        dtype: Type of the weights.
        read: transformers' `from_pretrained` but for what sharding adds to it.

    Returns:
        The backbone, and transformers' record of what was found.

    Raises:
        ValueError: If this backbone cannot be sharded so, or a package is missing.
        OSError: If the other processes cannot be reached.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--shard {options.shard} works on cpu and cuda, not on {device.type}; give --device cpu")
    ranks.join()
    if options.shard == "fsdp":
        from locret.distributed import fsdp

        return fsdp.load(device, read, offload=options.shard_offload == "cpu")
    if options.shard == "zero3":
        from locret.distributed import zero3

        return zero3.load(device, dtype, read, options.shard_offload, options.shard_offload_dir)
    from locret.distributed import tensor_parallel

    return tensor_parallel.load(config, read)


@contextmanager
def whole(parameter: nn.Parameter) -> Iterator[Tensor]:
    """Bring a parameter together that all processes hold a part of; all must enter the block."""
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter.data
    elif hasattr(parameter, "full_tensor"):
        yield parameter.full_tensor()
    else:
        yield parameter.data
