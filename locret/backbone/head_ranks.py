"""The processes that the attention heads of a backbone are spread over: tensor parallelism.

Every process has the same tokens and hidden states, and as many neighbouring KV heads, with their query heads, as the
others: it projects, caches, scores and evicts these alone. What needs all heads of a layer asks the others here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Self

SPLIT = "colwise"
"""The style of transformers' plans by which each process computes heads of its own."""


@dataclass(frozen=True)
class HeadRanks:
    """This process among those that share the heads; every method but `own` is called in all of them alike."""

    rank: int
    size: int
    group: Any
    """Their process group."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this: a process group cannot be copied."""
        return self

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum of what the processes have."""
        total = own.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def mean(self, own: Tensor) -> Tensor:
        """Return the mean of what the processes have."""
        return self.sum(own) / self.size

    def largest(self, own: Tensor) -> Tensor:
        """Return the largest of what the processes have, number by number."""
        most = own.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return most

    def gather(self, own: Tensor, dim: int) -> Tensor:
        """Return what the processes have side by side; theirs are of one shape."""
        own = own.detach().contiguous()
        # Not every backend knows every dtype, but all of them copy bytes.
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather([_bytes(part) for part in parts], _bytes(own), group=self.group)
        return torch.cat(parts, dim=dim)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """Return this process's part of what runs over all heads, as a view."""
        own = self.part(whole.shape[dim])
        return whole.narrow(dim, own.start, own.stop - own.start)

    def in_first(self, act: Callable[[], None]) -> None:
        """Do something in the first process, such as writing a file, while the others wait."""
        failure: Exception | None = None
        if self.rank == 0:
            try:
                act()
            except (ValueError, OSError) as error:
                failure = error
        told = [None if failure is None else (isinstance(failure, OSError), str(failure))]
        dist.broadcast_object_list(told, src=dist.get_global_rank(self.group, 0), group=self.group)
        if failure is not None:
            raise failure
        if told[0] is not None:
            raise (OSError if told[0][0] else ValueError)(told[0][1])

    def part(self, count: int) -> slice:
        """Return which of so many things, an equal number for each process, are this process's."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def find(base: nn.Module, modules: list[nn.Module]) -> HeadRanks | None:
    """Return the processes that a transformers model spreads its heads over; None: all heads are here."""
    if sharing(base) is None:
        return None
    found = [_mesh_of(module) for module in modules]
    if all(mesh is None for mesh in found):
        return None
    plan = getattr(base, "tp_plan", None)
    if not isinstance(plan, dict):
        raise ValueError(
            f"{type(base).__name__} holds parts of its weights but has no tp_plan that says which; use another version "
            "of transformers (5.17 to 5.23)"
        )
    names = {module: name for name, module in base.named_modules()}
    split = [
        mesh is not None and plan.get(name, plan.get(re.sub(r"\d+", "*", name))) == SPLIT
        for name, mesh in zip((f"{names[module]}.q_proj" for module in modules), found, strict=True)
    ]
    if not any(split):
        return None
    if not all(split):
        raise ValueError(
            f"tensor parallelism splits the heads of {sum(split)} of {len(split)} layers of {type(base).__name__}, but "
            "a cache needs the same of all; load it without --shard tp"
        )
    mesh = found[0]
    return HeadRanks(mesh.get_local_rank(), mesh.size(), mesh.get_group())


def sharing(base: nn.Module) -> HeadRanks | None:
    """Return the processes that share the weights of a transformers model by tensor parallelism, heads or not."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    if any(isinstance(module, FSDPModule) for module in base.modules()):
        return None  # whose weights are whole where they are used
    for weight in base.parameters():
        if isinstance(weight, DTensor) and weight.device_mesh.size() > 1:
            mesh = weight.device_mesh
            return HeadRanks(mesh.get_local_rank(), mesh.size(), mesh.get_group())
    return None


def _mesh_of(module: nn.Module) -> Any:
    """Return the mesh that the rows of an attention module's query projection are spread over.

    Of all projections, because layers that attend to the units of others have no more.
    """
    from torch.distributed.tensor import DTensor, Shard

    weight = getattr(getattr(module, "q_proj", None), "weight", None)
    if not isinstance(weight, DTensor) or weight.placements != (Shard(0),) or weight.device_mesh.size() == 1:
        return None
    return weight.device_mesh
