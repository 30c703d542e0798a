"""Training: labels, loss, the one-pass trainer and the `locret-train` command.

Nothing is imported before it is used, and then only what needs no more than torch, transformers, huggingface_hub and
safetensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locret.base.plugins import on_demand

if TYPE_CHECKING:
    from locret.labels.labels import answer_labels, prompt_scores
    from locret.train.loss import retention_loss, top_overlap
    from locret.train.step import StepResult, train_step
    from locret.train.training_options import Loss

__all__ = ["Loss", "StepResult", "answer_labels", "prompt_scores", "retention_loss", "top_overlap", "train_step"]

_HOMES = {
    **dict.fromkeys(("answer_labels", "prompt_scores"), "locret.labels.labels"),
    **dict.fromkeys(("retention_loss", "top_overlap"), "locret.train.loss"),
    **dict.fromkeys(("StepResult", "train_step"), "locret.train.step"),
}
__getattr__ = on_demand(__name__, {**_HOMES, "Loss": "locret.train.training_options"})
