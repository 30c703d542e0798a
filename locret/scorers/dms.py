"""DMS: each KV head decides when a token is read whether its unit goes once it has left a window.

Paper:     Dynamic Memory Sparsification, arXiv 2506.05345; software: NVIDIA Model-Optimizer, experimental/dms.
Formula:   alpha = scale (W norm(x) + b) - offset, x the residual stream before the layer (`dms_separate_alpha`); or
           alpha = scale q[-1] - offset, q[-1] the last number of the first query head of the KV head's group, before
           rotation, which attention then takes for 0 (nvidia/Qwen3-8B-DMS-8x). The score is -alpha.
Deviates:  DMS evicts a unit with alpha > 0, whatever the memory; here the best `budget` units stay, so where DMS would
           keep more the least certain of them go, and where it would keep fewer some that it would evict stay. Eviction
           is at chunk ends, not token by token.
Cost:      E K products per token and layer, or none. Scores do not change later. Query-agnostic. Trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from locret.backbone.adapters import describe, lends_neuron
from locret.backbone.chunk import PROJECTIONS
from locret.heads import gate_files
from locret.heads.heads import RetainingHeads
from locret.scorers.published_gate import PublishedGateScorer


@dataclass(frozen=True)
class _Neuron:
    """The decision of a backbone whose queries lend a number to it."""

    scale: float
    offset: float
    per_layer: bool
    places: dict[int, list[int]]
    """By layer, where the numbers of the KV heads are in a token's features."""


@dataclass(frozen=True, kw_only=True)
class DMSScorer(PublishedGateScorer):
    """Keep what DMS is least inclined to evict."""

    name: ClassVar[str] = "dms"
    needs: ClassVar[str] = "a model that DMS was trained on; write dms:path=FOLDER, or dms:path=org/name"
    read = staticmethod(gate_files.read_dms)
    their_window: ClassVar[int] = 512

    def check_backbone(self, config: Any) -> None:
        """See `PublishedGateScorer`."""
        if self._numbers["separate"]:
            super().check_backbone(config)
        else:
            self._neuron(config)

    def prepare(self, model: nn.Module) -> Any:
        """Return the adapters, or where the decisions are in the queries.

        Raises:
            ValueError: If adapters do not fit the backbone, or it is not the one whose queries hold the decisions.
        """
        return super().prepare(model) if self._numbers["separate"] else self._neuron(model)

    @cached_property
    def _numbers(self) -> dict[str, Any]:
        # Once: every cache asks, and a model on the Hub is asked for over the network.
        try:
            return gate_files.dms_config(self.path, self.revision)
        except ValueError as error:
            raise ValueError(f"scorer dms: {error}") from error

    def _authors_window(self) -> int:
        window: int = self._numbers["window"]
        return window

    def _neuron(self, model_or_config: Any) -> _Neuron:
        numbers, config = self._numbers, gate_files.unwrap_config(model_or_config)
        if not lends_neuron(config) or gate_files.dms_numbers(config.get_text_config().to_dict(), "it") != numbers:
            raise ValueError(
                f"scorer dms: the decisions of {self.path} are a number of its own queries (dms_separate_alpha=false), "
                f"which this backbone's are not; read with that model itself (--model {self.path})"
            )
        backbone, places = describe(model_or_config), {}
        for layer in backbone.layers:
            shape = backbone.shape(layer)
            group = shape.num_heads // shape.num_kv_heads
            places[layer] = [(head * group + 1) * shape.query_dim - 1 for head in range(shape.num_kv_heads)]
        return _Neuron(numbers["scale"], numbers["offset"], numbers["per_layer"], places)

    def identity(self, prepared: Any) -> dict[str, Any]:
        """Return what tells these decisions from others."""
        if isinstance(prepared, RetainingHeads):
            return super().identity(prepared)
        return {"neuron": vars(prepared), "window": self.window, "sinks": self.sinks}

    def feature_source(self, prepared: Any) -> str:
        """Return what the decision is made of."""
        return super().feature_source(prepared) if isinstance(prepared, RetainingHeads) else PROJECTIONS

    def score_features(self, prepared: Any, layer_idx: int, features_BLF: Tensor) -> Tensor:
        """Return scores (B, K, L)."""
        if isinstance(prepared, RetainingHeads):
            return super().score_features(prepared, layer_idx, features_BLF)
        scores_BKL: Tensor = prepared.offset - prepared.scale * features_BLF[..., prepared.places[layer_idx]].float().mT
        return scores_BKL[:, :1].expand_as(scores_BKL) if prepared.per_layer else scores_BKL
