"""What retaining heads learn to predict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from locret.base.plugins import on_demand
from locret.labels.kinds import KINDS, LabelKind, get, names

if TYPE_CHECKING:
    from locret.labels.labels import answer_labels, prompt_scores

__all__ = ["KINDS", "LabelKind", "answer_labels", "get", "names", "prompt_scores"]

__getattr__ = on_demand(__name__, dict.fromkeys(("answer_labels", "prompt_scores"), "locret.labels.labels"))
