"""Gates that others published: KVzap, Fast KVzip and DMS. A gate rates a unit once, by the hidden states of its token.

Papers:    KVzap, arXiv 2601.07891; kvpress: KVzapPress. Gates: nvidia/KVzap-linear-*, nvidia/KVzap-mlp-*.
           Fast KVzip, arXiv 2601.17668; kvpress: FastKVzipPress. Gates: Jang-Hyun/Fast-KVzip.
           Dynamic Memory Sparsification, arXiv 2506.05345; software: NVIDIA Model-Optimizer, experimental/dms.
Formula:   KVzap: s = W h + b, or W2 gelu(W1 h + b1) + b2, of the normed hidden states h that the attention is given:
           the natural logarithm of the KVzip+ score, so scores compare across heads and layers.
           Fast KVzip: s = ln mean over the query heads g of 1 / (1 + sum over sinks m of exp(q_g (k_m - k) / sqrt(R) -
           b_g)), q and k normed projections of h. Its authors have s without the logarithm, which orders units alike.
           DMS: s = -alpha; alpha = scale (W norm(x) + b) - offset, x the residual stream before the layer
           (`dms_separate_alpha`); or alpha = scale q[-1] - offset, q[-1] the last number of the first query head of the
           KV head's group, before rotation, which attention then takes for 0 (nvidia/Qwen3-8B-DMS-8x).
Deviates:  their authors evict what is rated below a threshold (KVzap: -4 in its examples; DMS: alpha > 0), or the worst
           share over layers and heads (Fast KVzip), behind a window of the newest tokens, token by token (DMS). Here
           the best `budget` units stay after a chunk, and of the window as much as the budget has room for
           (+adaptive_heads compares the heads of a layer). float32.
Cost:      E K products per token and layer (linear), E R + R K (an MLP, R 512), E (G + 1) R K (Fast KVzip, R 16), or
           none (the decisions of DMS in the queries). Scores do not change later. Query-agnostic. Trained.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from locret.backbone.adapters import config_of, describe, lends_neuron, text_config
from locret.backbone.chunk import PROJECTIONS
from locret.base.fields import Range
from locret.heads import published
from locret.heads.fingerprint import weight_fingerprint
from locret.heads.heads import RetainingHeads
from locret.scorers.base import FeatureScorer

_SHARE = 4
"""Of the budget, the part that a window takes at most which was not asked for."""
_READ: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], RetainingHeads]] = WeakKeyDictionary()
"""Gates of a backbone that have been read: a cache is made for every text, and a gate may have gigabytes."""


@dataclass(frozen=True, kw_only=True)
class PublishedGateScorer(FeatureScorer):
    """Rank units with a gate; a subclass per method says how its files are read."""

    positions: ClassVar[str] = "original"
    ranges = {"window": Range(0), "sinks": Range(0)}
    read: ClassVar[Callable[..., published.Read]]
    their_window: ClassVar[int]
    """Newest tokens that stay in the authors' own code."""

    path: str
    """Folder, file or Hub id of the gate."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    window: int | None = None
    """Newest units that always stay; if none is given, as many as in the authors' code, but a quarter of the budget at
    most."""
    sinks: int = 0
    """First tokens of the text that always stay."""

    def recent(self, budget: int) -> int:
        return min(self.their_window, budget // _SHARE) if self.window is None else self.window

    def check_budget(self, budget: int) -> None:
        if self.recent(budget) + self.sinks >= budget:
            raise ValueError(
                f"scorer {self.name}: window={self.recent(budget)} and sinks={self.sinks} leave nothing of budget="
                f"{budget} for its scores; lower them, or raise budget"
            )

    def check_backbone(self, config: Any) -> None:
        """Read the gate for a backbone whose weights are not there yet."""
        self._read(config)

    def prepare(self, model: nn.Module) -> Any:
        """Return the gate, each layer's on its device."""
        read, key = _READ.setdefault(model, {}), (self.name, self.path, self.revision)
        if key not in read:
            read[key] = RetainingHeads._with_weights(*self._read(model))
        return read[key].follow(model)  # which may have moved since

    def _read(self, model_or_config: Any) -> published.Read:
        return self._told(type(self).read, self.path, model_or_config, self.revision)  # type: ignore[no-any-return]

    def _told(self, read: Callable[..., Any], *args: Any) -> Any:
        try:
            return read(*args)
        except ValueError as error:
            raise ValueError(f"scorer {self.name}: {error}") from error

    def identity(self, prepared: Any) -> dict[str, Any]:
        """Return a fingerprint of the gate's weights, and what stays besides."""
        return {"weights": weight_fingerprint(prepared), "window": self.window, "sinks": self.sinks}


@dataclass(frozen=True, kw_only=True)
class KVzapScorer(PublishedGateScorer):
    """Keep what KVzap expects a repetition of the text to need."""

    name: ClassVar[str] = "kvzap"
    needs: ClassVar[str] = "a KVzap model; write kvzap:path=FOLDER, or kvzap:path=nvidia/KVzap-mlp-Qwen3-8B"
    read = staticmethod(published.read_kvzap)
    their_window: ClassVar[int] = 128


@dataclass(frozen=True, kw_only=True)
class FastKVzipScorer(PublishedGateScorer):
    """Keep what the gates of Fast KVzip rate best."""

    name: ClassVar[str] = "fast_kvzip"
    needs: ClassVar[str] = "gates; write fast_kvzip:path=FOLDER, or fast_kvzip:path=Jang-Hyun/Fast-KVzip"
    read = staticmethod(published.read_fast_kvzip)
    their_window: ClassVar[int] = 4096

    sinks: int = 4
    """First tokens of the text that always stay (the authors: 4)."""


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
    read = staticmethod(published.read_dms)

    def check_backbone(self, config: Any) -> None:
        if self._numbers["separate"]:
            super().check_backbone(config)
        else:
            self._neuron(config)

    def prepare(self, model: nn.Module) -> Any:
        """Return the adapters, or where the decisions are in the queries."""
        return super().prepare(model) if self._numbers["separate"] else self._neuron(model)

    @cached_property
    def _numbers(self) -> dict[str, Any]:
        # Once: every cache asks, and a model on the Hub is asked for over the network.
        return self._told(published.dms_config, self.path, self.revision)  # type: ignore[no-any-return]

    @property
    def their_window(self) -> int:  # type: ignore[override]
        return int(self._numbers["window"])

    def _neuron(self, model_or_config: Any) -> _Neuron:
        numbers, config = self._numbers, config_of(model_or_config)
        if not lends_neuron(config) or published.dms_numbers(text_config(config).to_dict(), "it") != numbers:
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
        if isinstance(prepared, RetainingHeads):
            return super().identity(prepared)
        return {"neuron": vars(prepared), "window": self.window, "sinks": self.sinks}

    def feature_source(self, prepared: Any) -> str:
        return PROJECTIONS if isinstance(prepared, _Neuron) else super().feature_source(prepared)

    def score_features(self, prepared: Any, layer_idx: int, features_BLF: Tensor) -> Tensor:
        """Return scores (B, K, L)."""
        if not isinstance(prepared, _Neuron):
            return super().score_features(prepared, layer_idx, features_BLF)
        scores_BKL: Tensor = prepared.offset - prepared.scale * features_BLF[..., prepared.places[layer_idx]].float().mT
        return scores_BKL[:, :1].expand_as(scores_BKL) if prepared.per_layer else scores_BKL
