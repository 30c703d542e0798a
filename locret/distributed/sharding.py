"""The ways of spreading a frozen backbone over processes; each only loads, and never wraps what is trained."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locret.distributed import ranks
from locret.loading.options import BackboneSource

_BLOCKS, _BLOCK = 64, 4096


def load_sharded(
    options: BackboneSource,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    read: partial[tuple[nn.Module, Any]],
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
    _agree_on_files(str(read.args[0]))
    if options.shard == "fsdp":
        from locret.distributed import fsdp

        return fsdp.load(device, read, offload=options.shard_offload == "cpu")
    if options.shard == "zero3":
        from locret.distributed import zero3

        return zero3.load(device, dtype, read, options.shard_offload, options.shard_offload_dir)
    from locret.distributed import tensor_parallel

    return tensor_parallel.load(config, read)


def _agree_on_files(folder: str) -> None:
    """Make sure that all processes load the same weights, from whatever disk each has.

    Raises:
        ValueError: If they do not.
    """
    if not os.path.isdir(folder):
        return  # a repository, of one revision
    rank, size, local_rank = ranks.launched()
    files = sorted(path for path in Path(folder).iterdir() if path.suffix in (".safetensors", ".bin", ".json"))
    facts = {path.name: _digest(path) for path in files}
    ranks.Ranks(rank, size, local_rank).agree(facts, "give all processes the same --model")


def _digest(path: Path) -> str:
    """Return a digest of a file's size and of blocks of it, as many for a large file as for a small one."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(_BLOCKS):
            file.seek(block * max(0, size - _BLOCK) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


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
