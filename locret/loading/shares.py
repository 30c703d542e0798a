"""What one process holds of a backbone that several share, in bytes: counted on the meta device, module by module."""

from __future__ import annotations

import re

import torch
from torch import nn

from locret.backbone.adapters import find_decoder


class WeightCount:
    """The weights of a backbone, counted on the meta device.

    Args:
        model: The backbone's sketch.
        dtype: Type of its weights.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.size = model, dtype.itemsize
        self.layers = list(find_decoder(model).layers)
        self.embedding = model.get_input_embeddings()  # type: ignore[operator]
        self.output = model.get_output_embeddings()  # type: ignore[operator]

    def of(self, *modules: nn.Module | None) -> int:
        """Return the bytes of some modules."""
        return self.size * sum(weight.numel() for part in modules if part is not None for weight in part.parameters())

    @property
    def total(self) -> int:
        """Bytes of all weights; those that two modules share are counted once."""
        return self.of(self.model)

    @property
    def largest_layer(self) -> int:
        """Bytes of the largest decoder layer."""
        return max(map(self.of, self.layers))

    def shard(self, ranks: int) -> int:
        """Return the bytes that each of `ranks` processes keeps under FSDP: its share of the rows of every weight."""
        rows = ((weight.shape[0] if weight.ndim else 1, weight.numel()) for weight in self.model.parameters())
        return self.size * sum(-(-count // ranks) * (numbers // count) for count, numbers in rows)

    def gathered(self) -> int:
        """Return the bytes that FSDP gathers at once: of the layer that runs, and of what comes before or after it."""
        decoder = find_decoder(self.model)
        behind = [part for part in decoder.children() if part is not decoder.layers and part is not self.embedding]
        return self.largest_layer + max(self.largest_layer, self.of(self.embedding), self.of(self.output, *behind))

    def split(self, ranks: int) -> int | None:
        """Return the bytes of one process of `ranks` under transformers' tensor-parallel plan; None without one."""
        plan: dict[str, str] = getattr(self.model, "_tp_plan", None) or {}
        total, found = 0, False
        for name, weight in self.model.named_parameters():
            module, _, own = re.sub(r"\.\d+\.", ".*.", name).rpartition(".")
            style = plan.get(f"{module}.{own}", plan.get(module, ""))
            across = ("colwise", "rowwise", "moe_tp_experts")
            divides = any(part in style for part in across) and not ("rowwise" in style and weight.ndim == 1)
            found |= divides
            total += -(-weight.numel() // ranks) if divides else weight.numel()
        return total * self.size if found else None
