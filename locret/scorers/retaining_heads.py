"""Retaining-head scores: a small trained MLP rates each unit once, when it enters the cache.

Paper:     Locret, arXiv 2410.01805, section 3.2.
Formula:   s = W2 act(W1 [q; k; v]), one score per KV head; q, k, v before rotation.
Deviates:  never.
Cost:      O(L) per chunk; a score does not change later. Query-agnostic. Trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from locret.backbone.adapters import ranks_of
from locret.heads.config import HeadsConfig
from locret.heads.heads import RetainingHeads, sharded
from locret.labels import KINDS
from locret.scorers.base import FeatureScorer, Scorer


@dataclass(frozen=True, kw_only=True, eq=False)
class RetainingHeadScorer(FeatureScorer):
    """Rank units with trained retaining heads."""

    name: ClassVar[str] = "retaining_heads"
    over_ranks: ClassVar[bool] = True
    needs: ClassVar[str] = "trained heads; give --heads FOLDER"

    heads: RetainingHeads
    """Trained heads."""

    @property
    def head_shares(self) -> tuple[float, ...] | None:
        return recommended_shares(self.heads.config)

    def prepare(self, model: nn.Module) -> RetainingHeads:
        """Return the heads, each on its layer's device; where processes share heads, its part."""
        self.heads.check_matches(model)
        return sharded(self.heads, ranks_of(model)).follow(model)

    def identity(self, prepared: RetainingHeads) -> dict[str, Any]:
        return {"weights": prepared.fingerprint()}

    def relative(self, prepared: RetainingHeads) -> bool:
        """Yes, unless a regression taught labels that compare across heads: a ranking leaves each head's level open."""
        label, training = prepared.config.label or {}, prepared.config.training or {}
        kind = KINDS.get(str(label.get("kind")))
        return kind is None or not kind.comparable or training.get("objective") != "regression"


def recommended_shares(config: HeadsConfig) -> tuple[float, ...] | None:
    """Return the shares of the KV heads in the policy that heads recommend; None: none."""
    found = (config.policy or {}).get("head_shares")
    return None if found is None else tuple(found)


def as_scorer(scorer: RetainingHeads | Scorer) -> Scorer:
    """Return what the engine rates units with: trained heads as a scorer, any scorer as it is."""
    return RetainingHeadScorer(heads=scorer) if isinstance(scorer, RetainingHeads) else scorer
