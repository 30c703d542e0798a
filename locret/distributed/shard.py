"""The ways of spreading a frozen backbone over processes; each only loads, and never wraps what is trained.

fsdp     every process holds a slice of each layer and gathers a layer while it runs (PyTorch's `fully_shard`)
zero3    the same by DeepSpeed, whose parts may also rest on a disk
tp       every process holds some heads of every layer, and all work on the same rows (transformers' plan): it caches,
         scores and evicts the units of its own KV heads, and has the part of the retaining heads that reads them
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from locret.backbone.adapters import describe, on_rank, sharers_of
from locret.backbone.head_ranks import SPLIT
from locret.backbone.shape import Backbone
from locret.distributed import ranks
from locret.loading.options import BackboneSource

_BLOCKS, _BLOCK = 64, 4096
_OF_HEADS = (".q_proj", ".kv_b_proj")
"""Projections that a plan splits where it splits heads; the second is that of latent attention."""
Read = Callable[..., tuple[nn.Module, Any]]
"""transformers' `from_pretrained` but for what sharding adds to it."""


def load_sharded(
    options: BackboneSource, config: Any, device: torch.device, dtype: torch.dtype, read: partial[tuple[nn.Module, Any]]
) -> tuple[nn.Module, Any]:
    """Load a backbone of which every process holds a part, joining the other processes if this one has not."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--shard {options.shard} works on cpu and cuda, not on {device.type}; give --device cpu")
    ranks.join()
    folder = Path(read.args[0])
    if folder.is_dir():  # whatever disk each process has, all are to load the same weights
        files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".json"))
        facts = {path.name: _digest(path) for path in files}
        ranks.Ranks(*ranks.launched()).agree(facts, "give all processes the same --model")
    if options.shard == "fsdp":
        return _load_fsdp(device, read, offload=options.shard_offload == "cpu")
    if options.shard == "zero3":
        return _load_zero3(dtype, read, options.shard_offload, options.shard_offload_dir)
    return load_split(config, read)


def _digest(path: Path) -> str:
    """Return a digest of a file's size and of blocks of it, as many for a large file as for a small one."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for block in range(_BLOCKS):
            file.seek(block * max(0, size - _BLOCK) // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()[:16]


def _load_fsdp(device: torch.device, read: Read, *, offload: bool) -> tuple[nn.Module, Any]:
    from torch.distributed.fsdp import FSDPModule
    from transformers.distributed import DistributedConfig

    if offload and device.type == "cpu":
        raise ValueError("--shard-offload cpu: without a GPU all weights are in the host's memory anyway; drop it")
    size = torch.distributed.get_world_size()
    model, found = read(distributed_config=DistributedConfig(fsdp_size=size, fsdp_cpu_offload=offload))
    if not isinstance(model, FSDPModule):
        raise ValueError(f"transformers has not sharded {type(model).__name__}; leave --shard fsdp out")
    # Of itself the root would keep what it gathered, and so would transformers' plan for the language-model head.
    model.set_reshard_after_forward(True)
    return model, found


def _load_zero3(dtype: torch.dtype, read: Read, offload: str | None, folder: str | None) -> tuple[nn.Module, Any]:
    if find_spec("deepspeed") is None:
        raise ValueError("--shard zero3 needs the deepspeed package, which is not installed; install it, or use fsdp")
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    # A module's weights come when it runs and go when it has run; DeepSpeed would hold on to a small backbone's.
    held = ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance", "param_persistence_threshold")
    zero: dict[str, Any] = {"stage": 3, **{f"stage3_{name}": 0 for name in held}}
    if offload is not None:
        zero["offload_param"] = {"device": offload, **({"nvme_path": folder} if folder else {})}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": 2**31}
    if precision := {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype):
        config[precision] = {"enabled": True}
    alive = HfDeepSpeedConfig(config)  # from_pretrained builds under zero.Init while this object lives
    model, found = read()
    del alive
    engine, *_ = deepspeed.initialize(model=model.eval().requires_grad_(False), config=config)
    # It follows the order of modules, which must be the same in all processes; modules without weights, such as the
    # rotary embedding, are called outside of passes too, whenever a process moves keys.
    for module in engine.module.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()) if next(module.parameters(), None) is None else ():
                if (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith("deepspeed"):
                    del hooks[key]
    return engine.module, found


def load_split(config: Any, read: Read) -> tuple[nn.Module, Any]:
    """Load a backbone split by its heads."""
    from transformers.distributed import DistributedConfig

    size = torch.distributed.get_world_size()
    part_of(config, size)
    model, found = read(distributed_config=DistributedConfig(tp_size=size))
    if sharers_of(model) is None:
        raise ValueError(f"transformers has not split {type(model).__name__}; use --shard fsdp")
    describe(model)
    return model, found


def part_of(config: Any, size: int) -> Backbone:
    """Return a backbone as each of so many processes will have it: where its plan splits heads, with some of them."""
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
