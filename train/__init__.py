"""Training: labels, loss, the one-pass trainer and the `locret-train` command.

Only what needs no more than torch, transformers, huggingface_hub and safetensors is imported here.
"""

from locret.labels.labels import answer_labels, prompt_scores
from locret.train.loss import retention_loss, top_overlap
from locret.train.step import StepResult, train_step
from locret.train.training_options import Loss

__all__ = ["Loss", "StepResult", "answer_labels", "prompt_scores", "retention_loss", "top_overlap", "train_step"]
