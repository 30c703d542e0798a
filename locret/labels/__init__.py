"""What retaining heads learn to predict, and the kernels that compute it."""

from locret.labels.base import LabelKind
from locret.labels.kinds import KINDS, get, names
from locret.labels.labels import answer_labels, prompt_scores

__all__ = ["KINDS", "LabelKind", "answer_labels", "get", "names", "prompt_scores"]
