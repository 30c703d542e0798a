"""ZeRO-3 of DeepSpeed: like fully sharded weights, and the parts may also rest on a disk.

DeepSpeed gets the frozen backbone and no optimizer; what is trained stays outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn


def load(
    device: torch.device,
    dtype: torch.dtype,
    read: Callable[..., tuple[nn.Module, Any]],
    offload: str | None,
    folder: str | None,
) -> tuple[nn.Module, Any]:
    """Load a backbone whose parts DeepSpeed brings together layer by layer.

    Args:
        device: Where this process computes.
        dtype: Type of the weights.
        read: transformers' `from_pretrained`.
        offload: Where parts rest, "cpu" or "nvme"; None: on the device.
        folder: On the disk of "nvme".

    Raises:
        ValueError: If DeepSpeed is not installed.
    """
    if find_spec("deepspeed") is None:
        raise ValueError("--shard zero3 needs the deepspeed package, which is not installed; install it, or use fsdp")
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = _config(dtype, offload, folder)
    alive = HfDeepSpeedConfig(config)  # from_pretrained builds under zero.Init while this object lives
    model, found = read()
    del alive
    engine, *_ = deepspeed.initialize(model=model.eval().requires_grad_(False), config=config)
    _forget_weightless(engine.module)
    return engine.module, found


def _forget_weightless(model: nn.Module) -> None:
    """Take DeepSpeed's hooks off the modules that have no weights.

    It follows the order of modules, which must be the same in all processes; the rotary embedding is called outside of
    passes too, whenever a process moves keys.
    """
    for module in model.modules():
        if next(module.parameters(), None) is None:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if _is_deepspeeds(hook)]:
                    del hooks[key]


def _is_deepspeeds(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed")


def _config(dtype: torch.dtype, offload: str | None, folder: str | None) -> dict[str, Any]:
    # A module's weights come when it runs and go when it has run; DeepSpeed would hold on to a small backbone's.
    zero: dict[str, Any] = {
        "stage": 3,
        **dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"), 0),
        "stage3_param_persistence_threshold": 0,
    }
    if offload is not None:
        zero["offload_param"] = {"device": offload, **({"nvme_path": folder} if folder else {})}
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "steps_per_print": 2**31,
        **({precision: {"enabled": True}} if precision else {}),
    }
