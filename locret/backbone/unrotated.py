"""Which layers do not rotate their keys at all (SmolLM3, Cohere-2, EXAONE-4): found by looking, once per model.

No field of a config says it for all families, so where layers may differ a few tokens are run through them, and their
keys before and after are compared.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import nn

from locret.backbone.adapters import Backbone, find_decoder, input_device, unwrap
from locret.backbone.chunk import Attended
from locret.backbone.forward import run_decoder
from locret.backbone.instrument import LayerObserver, instrumented

_TOKENS = 8
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
                run_decoder(model, torch.arange(_TOKENS, device=input_device(model))[None])
            found = frozenset(still)
        _KNOWN[decoder] = found
    return _KNOWN[decoder]
