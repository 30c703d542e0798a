"""The one place where the decoder layers of a backbone are called, however its weights are spread over processes."""

# B batch, L new tokens

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from locret.backbone.adapters import find_decoder, unwrap
from locret.backbone.passes import gathering_root

if TYPE_CHECKING:
    from transformers import Cache


def run_decoder(model: nn.Module, input_ids: Tensor, cache: Cache | None = None) -> None:
    """Run the decoder layers over new tokens, for what observers and the cache see of them.

    Args:
        model: The backbone.
        input_ids: (B, L).
        cache: Read and filled; None: none is used.
    """
    arguments: dict[str, Any] = {"input_ids": input_ids, "past_key_values": cache, "use_cache": cache is not None}
    if gathering_root(model) is not None:
        # Layers come together from the root on; the logits of one token cost nothing.
        unwrap(model)(logits_to_keep=1, **arguments)
    else:
        find_decoder(model)(**arguments)
