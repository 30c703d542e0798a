"""The retaining head of one layer: a small MLP that predicts how much future answers will need each cached token.

Paper:    Locret, arXiv 2410.01805, section 3.3: s = W2 act(W1 [q; k; v]), q, k and v before rotary embedding.
Weights:  float32 always. A head is megabytes where a backbone is gigabytes, and its updates vanish in bfloat16.
"""
# H query heads, K key/value heads, D head dim, R = hidden_dim, F = (H + 2 K) D features

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init
from transformers.activations import ACT2FN

from locret.backbone.head_ranks import HeadRanks


class Float32(nn.Module):
    """A module whose weights stay float32: `.to(device)` moves them, and no dtype that is asked for rounds them."""

    def _apply(self, fn: Any, recurse: bool = True) -> Float32:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)  # type: ignore[no-any-return, no-untyped-call]


class RetainingHead(Float32):
    """The MLP of one layer: `feature_dim` -> `hidden_dim` -> one score per KV head, without biases.

    Args:
        feature_dim: (H + 2 K) * D, the width of one token's concatenated q, k and v.
        hidden_dim: Width between the two layers, d_R (paper: 1024).
        num_kv_heads: K, the number of scores per token.
        activation: Name of the backbone's own activation, as transformers spells it.
        initializer_range: Standard deviation of the fresh weights, the backbone's own.
        generator: Source of the fresh weights; torch's global one if None.

    Raises:
        ValueError: For an activation that transformers does not know.
    """

    def __init__(
        self,
        feature_dim: int,
        hidden_dim: int,
        num_kv_heads: int,
        activation: str = "silu",
        *,
        initializer_range: float = 0.02,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if activation not in ACT2FN:
            raise ValueError(
                f"activation '{activation}' is unknown to transformers; use one of {', '.join(sorted(ACT2FN))}"
            )
        # skip_init: torch's own initialisation would draw from the global generator, and take as long again. It leaves
        # the meta device, where heads are only sketched, unless told to stay.
        device = "meta" if torch.get_default_device().type == "meta" else "cpu"
        self.fc1 = skip_init(nn.Linear, feature_dim, hidden_dim, bias=False, dtype=torch.float32, device=device)
        self.fc2 = skip_init(nn.Linear, hidden_dim, num_kv_heads, bias=False, dtype=torch.float32, device=device)
        self.activation = ACT2FN[activation]
        self.ranks: HeadRanks | None = None
        """The processes that share this head, each with the inputs and outputs of its own attention heads."""
        self._cast: tuple[Any, Tensor] | None = None
        for layer in (self.fc1, self.fc2):
            nn.init.normal_(layer.weight, std=initializer_range, generator=generator)

    def forward(self, features: Tensor) -> Tensor:
        """Score tokens.

        Where gradients are needed, the arithmetic is float32, or what autocast makes of it. Otherwise the large product
        (W1, all but a thousandth of the work) runs in the features' dtype, on a copy of W1 that is cast once and not
        per chunk; activation and W2 stay in float32, because scores rounded to bfloat16 tie at the selection boundary.

        Args:
            features: (..., F) with F = (H + 2 K) * D; q, k, v of a token before rotary embedding, in any float dtype.

        Returns:
            (..., K) float32 scores; higher is kept.

        Raises:
            ValueError: If the last dimension is not F.
        """
        if features.shape[-1] != self.fc1.in_features:
            raise ValueError(
                f"features are {features.shape[-1]} wide but this retaining head reads {self.fc1.in_features} "
                "((query heads + 2 KV heads) * head_dim); pass the concatenated q, k and v of its own layer"
            )
        if torch.is_autocast_enabled(features.device.type):
            self._cast = None
            return self._scores(self.fc1(features)).float()
        if torch.is_grad_enabled() and (features.requires_grad or self.fc1.weight.requires_grad):
            self._cast = None  # the next thing is likely an update of the weights; do not hold a stale copy in memory
            return self._scores(self.fc1(features.float()))
        return self._scores(F.linear(features, self._weight_as(features.dtype)).float())

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return (..., K) of (..., R) products with W1, which every process has a part of where they share the head."""
        if self.ranks is not None:
            hidden = self.ranks.sum(hidden)
        return self.fc2(self.activation(hidden))  # type: ignore[no-any-return]

    def _weight_as(self, dtype: torch.dtype) -> Tensor:
        """Return W1 in `dtype`, from the cached copy while W1 is unchanged."""
        weight: Tensor = self.fc1.weight
        if weight.dtype == dtype:
            return weight
        if weight.is_inference():  # such tensors do not count their changes, so a copy could go stale unnoticed
            return weight.to(dtype)
        key = (dtype, weight.device, weight.data_ptr(), weight._version)
        if self._cast is None or self._cast[0] != key:
            self._cast = (key, weight.detach().to(dtype))
        return self._cast[1]

    def _apply(self, fn: Any, recurse: bool = True) -> Float32:
        self._cast = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cast": None}
