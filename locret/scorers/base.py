"""What a scorer is: options, and one method that rates the units a layer has just computed, or all it holds."""

# B batch, K KV heads, L new tokens, S slots (units held before, then the new ones), E hidden size

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from locret.backbone.chunk import Chunk
from locret.base.registry import Chosen
from locret.heads.fingerprint import crc


class Rated(NamedTuple):
    """What a scorer with columns of its own returns."""

    scores: Tensor
    """As `Scorer.score` returns them."""
    columns: Mapping[str, Tensor]
    """(B, K, L) or (B, K, S), as many units as `scores`."""


class Scorer(Chosen):
    """Rates cache units; larger means keep. Holds options, never anything of a model or of a sequence.

    What it needs of a model `prepare` returns, and the cache keeps it. What outlives a chunk is the scores, and the
    columns that a scorer declares: the cache stores them with the units, evicts them with the units, and hands them
    back as `Chunk.stored_scores` and `Chunk.columns`. Subclasses are frozen dataclasses.
    """

    kind: ClassVar[str] = "scorer"
    needs: ClassVar[str] = ""
    """What to say where an option without a default is missing, if naming the option is not enough."""
    positions: ClassVar[str] = "compact"
    """Position mode of the method's own paper or code, which methods are compared with."""
    rates_answers: ClassVar[bool] = True
    """Whether the method is defined for generated tokens, so that a cache may evict while it generates; else they get
    zeros."""
    causal: ClassVar[bool] = True
    """Whether a unit is rated once, by what came before it, so that its score depends neither on chunks nor on time."""
    by_head: ClassVar[bool] = False
    """Whether a scorer that is not causal can rate one KV head after another, so that heads may hold different numbers
    of units: it then gets chunks with one row and one KV head."""

    columns: ClassVar[Mapping[str, torch.dtype]] = MappingProxyType({})
    """What the method remembers of every unit besides its score and position."""

    keep_recent = 0
    """Newest units that stay whatever their score; an option of this name says how many."""
    sinks = 0
    """First tokens of the text that stay whatever their score, likewise."""

    def recent(self, budget: int) -> int:
        """Return how many of the newest units the method itself keeps whatever their score, out of `budget`."""
        return self.keep_recent

    def sink_tokens(self, budget: int, recent: int) -> int:
        """Return how many first tokens of the text the method keeps whatever their score, besides `recent` units."""
        return self.sinks

    def relative(self, prepared: Any) -> bool:
        """Return whether scores are logarithms up to a constant of each head, rather than comparable among heads."""
        return False

    @property
    def fade(self) -> float:
        """Factor of the scores held when another text of a conversation is read."""
        return 1.0

    @property
    def head_shares(self) -> tuple[float, ...] | None:
        """Shares of the KV heads of all layers that the method has measured; None: it has none to recommend."""
        return None

    @property
    def lookback(self) -> int:
        """Last tokens of the prompt that must come in one forward pass when everything is rated at the prompt's end."""
        return 1

    def check_backbone(self, config: Any) -> None:
        """Check that the scorer fits a backbone, as far as its transformers config tells, before weights are loaded.

        Raises:
            ValueError: If it does not.
        """

    def check_budget(self, budget: int) -> None:
        """Check that a budget leaves something for the scores to decide.

        Raises:
            ValueError: If it does not.
        """
        if (sinks := self.sink_tokens(budget, 0)) >= budget:
            raise ValueError(
                f"scorer {self.name} always keeps the first {sinks} tokens, so budget={budget} leaves its scores "
                "nothing to decide; raise budget, or keep fewer of them"
            )

    def prepare(self, model: nn.Module) -> Any:
        """Check that the scorer fits the model, and return what it needs of it; called once per cache."""
        return None

    def identity(self, prepared: Any) -> dict[str, Any]:
        """Return plain data that tells this scorer from another of its name: a saved cache is bound to it."""
        options: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)} if is_dataclass(self) else {}
        return {name: f"{crc(value):08x}" if isinstance(value, Tensor) else value for name, value in options.items()}

    @abstractmethod
    def score(self, chunk: Chunk) -> Tensor | Rated:
        """Rate units of one layer.

        Returns:
            (B, K, L) float32 scores of the new units, which the cache keeps as they are; or (B, K, S) scores of all
            units, which replace those stored. What is returned for an empty slot (`Chunk.row_start`) does not matter.
            With `columns`, a `Rated` of both.
        """


class RevisingScorer(Scorer):
    """A scorer that rates all units anew with each chunk, in the positions of the text, as its paper does."""

    over_ranks: ClassVar[bool] = True
    positions: ClassVar[str] = "original"
    causal: ClassVar[bool] = False


class FeatureScorer(Scorer):
    """A scorer that rates a unit once, by its token's features, such as heads: generated units may wait for it."""

    def feature_source(self, prepared: Any) -> str:
        """Return which of `SOURCES` (`locret.backbone.chunk`) the features are that `score_features` is given."""
        return prepared.config.reads  # type: ignore[no-any-return]

    def score_features(self, prepared: Any, layer_idx: int, features_BLF: Tensor) -> Tensor:
        """Rate units of one layer by (B, L, F) features alone, by default with the layer's one of `prepared` heads.

        Returns:
            (B, K, L) float32.
        """
        scores_BLK: Tensor = prepared[layer_idx](features_BLF)
        return scores_BLK.transpose(1, 2)

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (B, K, L)."""
        features_BLF = chunk.projections.features(self.feature_source(chunk.prepared))
        return self.score_features(chunk.prepared, chunk.layer_idx, features_BLF)


@dataclass(frozen=True, kw_only=True)
class TokenPass:
    """A forward pass that is over, of L tokens."""

    ids_BL: Tensor
    """(B, L) token ids."""
    hidden_BLE: Tensor
    """(B, L, E) last hidden states, normalised, as the language-model head takes them."""
    before_B1E: Tensor | None
    """(B, 1, E) the same of the token before; None at the start of a text."""


class TokenScorer(Scorer):
    """A scorer that rates tokens after the whole forward pass, with one score for all layers and heads."""

    @abstractmethod
    def score_tokens(self, model: nn.Module, tokens: TokenPass) -> Tensor:
        """Rate the tokens of a forward pass.

        Args:
            model: The backbone with its language-model head.
            tokens: What went through it, and what came out.

        Returns:
            (B, L) float32.
        """

    def score(self, chunk: Chunk) -> Tensor:
        """Return zeros, to be replaced once the forward pass is over."""
        batch, kv_heads = chunk.key.shape[:2]
        return chunk.key.new_zeros(batch, kv_heads, chunk.new_tokens).float()
