"""The one place where decoder layers run without logits, in step with other processes, and what a look tells.

A layer of a sharded backbone (FSDP, ZeRO-3) comes together only where every process asks for it, so a process with
fewer chunks, or a shorter answer, would leave the others waiting for ever. Here the processes agree before each pass:
whoever has work left says so, and the others run a pass over one token of no meaning with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed
from torch import Tensor, nn
from transformers import Cache

from locret.backbone.adapters import find_decoder, input_device, unwrap
from locret.backbone.chunk import Attended
from locret.backbone.instrument import LayerObserver, instrumented
from locret.backbone.shape import Backbone

P = ParamSpec("P")
R = TypeVar("R")
_IN_STEP: set[nn.Module] = set()
"""Backbones whose processes are in step already: blocks may be nested."""


def gathering_root(model: nn.Module) -> Any | None:
    """Return the module at which a pass must begin, if processes gather the backbone's layers together; else None."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    from torch.distributed.fsdp import FSDPModule

    base = unwrap(model)
    by_deepspeed = hasattr(next(base.parameters()), "ds_id")
    return base if by_deepspeed or isinstance(base, FSDPModule) else None


@contextmanager
def in_step(model: nn.Module) -> Iterator[None]:
    """Let every process run as many passes as it needs until the block ends, for all of them at the same time.

    All processes must enter the block, in the same order as other blocks; without a sharded backbone it does nothing.
    A process that fails within it leaves the others waiting, and must end.
    """
    if (root := gathering_root(model)) is None or root in _IN_STEP:
        yield
        return

    def agree(*_: Any) -> None:
        _anybody(True)

    hook = root.register_forward_pre_hook(agree, prepend=True)
    _IN_STEP.add(root)
    try:
        yield
    finally:
        _IN_STEP.discard(root)
        hook.remove()
    while _anybody(False):
        _pass_along(root)


def keeping_step(function: Callable[P, R]) -> Callable[P, R]:
    """Keep the processes in step while a function runs passes of its first argument, the backbone."""

    @wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> R:
        with in_step(cast(nn.Module, args[0] if args else kwargs["model"])):
            return function(*args, **kwargs)

    return within


def _anybody(works: bool) -> bool:
    """Return whether any process has a pass to run; each says whether it has."""
    working = torch.tensor([int(works)])
    torch.distributed.all_reduce(working, torch.distributed.ReduceOp.MAX)
    return bool(working.item())


@torch.inference_mode(False)
@torch.no_grad()
def _pass_along(root: Any) -> Tensor:
    token = torch.zeros(1, 1, dtype=torch.long, device=input_device(root))
    return root(input_ids=token, use_cache=False, logits_to_keep=1).logits  # type: ignore[no-any-return]


def run_decoder(model: nn.Module, input_ids: Tensor, cache: Cache | None = None, **arguments: Any) -> None:
    """Run the decoder layers over (B, L) new tokens, for what observers and the cache, which is filled, see of them."""
    arguments |= {"input_ids": input_ids, "past_key_values": cache, "use_cache": cache is not None}
    if gathering_root(model) is not None:
        # Layers come together from the root on; the logits of one token cost nothing.
        unwrap(model)(logits_to_keep=1, **arguments)
    else:
        find_decoder(model)(**arguments)


_KNOWN: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


@torch.no_grad()
def unrotated_layers(model: nn.Module, backbone: Backbone) -> frozenset[int]:
    """Return the full-attention layers that do not rotate their keys."""
    decoder = find_decoder(model)
    if decoder not in _KNOWN:
        config = unwrap(model).config.get_text_config()
        found = frozenset[int]()
        if not backbone.uniform or not all(getattr(config, "no_rope_layers", None) or [True]):
            still = set[int]()

            def look(layer: Attended) -> None:
                raw = layer.projections.key()
                if raw.shape == layer.key.shape and bool((raw == layer.key).all()):
                    still.add(layer.layer_idx)

            with instrumented(model, LayerObserver(backbone, look)):
                run_decoder(model, torch.arange(8, device=input_device(model))[None])
            found = frozenset(still)
        _KNOWN[decoder] = found
    return _KNOWN[decoder]
