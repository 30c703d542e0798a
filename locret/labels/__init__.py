"""What retaining heads learn to predict, and the kernels that compute it."""

from locret.labels.labels import answer_labels, prompt_scores

__all__ = ["answer_labels", "prompt_scores"]
