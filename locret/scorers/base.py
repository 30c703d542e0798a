"""What a scorer is: options, and one method that rates the units a layer has just computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from locret.instrument import Chunk


class Scorer(ABC):
    """Rates cache units; larger means keep. Holds options and weights, never anything of a sequence."""

    name: ClassVar[str]

    def prepare(self, model: nn.Module) -> None:  # noqa: B027 - training-free scorers have nothing to prepare
        """Check that the scorer fits the model and put its weights on the model's devices. Called once per cache."""

    @abstractmethod
    def score(self, chunk: Chunk) -> Tensor:
        """Return (batch, kv_heads, new_tokens) scores of the chunk's new units, float32."""
