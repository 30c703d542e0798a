"""Which layers do not rotate their keys at all (SmolLM3, Cohere-2, EXAONE-4): found by looking, once per model.

No field of a config says it for all families, so where layers may differ a few tokens are run through them, and their
keys before and after are compared.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from locret.backbone.adapters import Backbone, find_decoder, input_device, unwrap
from locret.backbone.attention import MaskMemo, View
from locret.backbone.chunk import Attended, Projections
from locret.backbone.forward import run_decoder
from locret.backbone.instrument import instrumented

_TOKENS = 8
_KNOWN: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


class _Look:
    """An observer that notes which layers leave their keys as they are."""

    def __init__(self, backbone: Backbone) -> None:
        self.projections = {index: Projections(backbone.shape(index)) for index in backbone.layers}
        self.masks = MaskMemo()
        self.still: dict[int, Tensor] = {}

    def positions(self, tokens: Tensor) -> Tensor | None:
        """Number the tokens 0, 1, 2, ..."""
        return None

    def view(self, layer_idx: int, query: Tensor, scaling: float) -> View | None:
        """Attend to the pass's own tokens."""
        return None

    def attended(self, layer: Attended) -> None:
        """Compare keys before and after what would rotate them."""
        raw = layer.projections.key()
        self.still[layer.layer_idx] = (raw == layer.key).all() if raw.shape == layer.key.shape else torch.tensor(False)

    def finished(self, hidden: Tensor) -> None:
        """Need no end."""


@torch.no_grad()
def unrotated_layers(model: nn.Module, backbone: Backbone) -> frozenset[int]:
    """Return the full-attention layers that do not rotate their keys."""
    decoder = find_decoder(model)
    if decoder not in _KNOWN:
        config = unwrap(model).config.get_text_config()
        found = frozenset[int]()
        if not backbone.uniform or not all(getattr(config, "no_rope_layers", None) or [True]):
            look = _Look(backbone)
            with instrumented(model, look):
                run_decoder(model, torch.arange(_TOKENS, device=input_device(model))[None])
            found = frozenset(index for index, still in look.still.items() if still)
        _KNOWN[decoder] = found
    return _KNOWN[decoder]
