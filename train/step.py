"""One training step in one pass: every layer's loss and gradient are computed while the backbone reads the text.

The backbone is frozen and a head's loss touches its own layer alone, so nothing flows back through the backbone. As
soon as a layer has attended, its head's inputs and labels are all there; its head goes forward and backward on the spot
and the layer's tensors are freed. A step costs about one backbone forward, and one layer's tensors of memory whatever
the number of layers.

Where each of many questions is asked by itself, the backbone still reads the text once: questions and answers go on
from its keys and values. Labels are whole only after the last answer, so the features of all layers are kept.
"""
# K KV heads, T prompt tokens that are trained on, F features

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from locret.backbone.adapters import describe, input_device
from locret.backbone.chunk import Attended
from locret.heads.heads import RetainingHeads
from locret.labels import kinds
from locret.labels.labels import labels_of_answers, layer_labels, observe, token_row
from locret.train.loss import fit_and_smoothness, top_overlap
from locret.train.training_options import PAPER, DataOptions, Loss


@dataclass(frozen=True)
class StepResult:
    """Losses of one row; all tensors are on the device and detached."""

    total: Tensor
    fit: Tensor
    """Regression or ranking loss, mean over layers."""
    smoothness: Tensor
    """Sum over layers."""
    overlap: Tensor
    """(layers,) share of the 10 % best tokens by label that are among the 10 % best by score."""
    tokens: int
    """Tokens read, prompt and answer."""


def train_step(
    model: nn.Module,
    heads: RetainingHeads,
    prompt_ids: Tensor,
    answer_ids: Tensor,
    loss: Loss | None = None,
    *,
    max_prompt_tokens: int = DataOptions.max_prompt_tokens,
    asked: Sequence[tuple[Tensor, Tensor]] = (),
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> StepResult:
    """Add the gradient of one row's loss to the heads' float32 gradients.

    Args:
        model: The frozen backbone, in evaluation mode, on the heads' device; autocast around the call is respected.
        heads: The heads to train.
        prompt_ids: (1, n) or (n,).
        answer_ids: (1, m) or (m,).
        loss: Labels and loss (None: the paper's).
        max_prompt_tokens: First prompt tokens to train on; labels are those of the whole text.
        asked: Ids of questions and their answers, each of which follows the prompt by itself: labels are the largest of
            all, and `answer_ids` is not read.
        backward: Called once per layer with the layer's share of the loss; the shares add up to the total.

    Raises:
        ValueError: For an unknown kind of label, or a prompt or answer that is empty or more than one row.
    """
    loss = loss or PAPER
    how = kinds.get(loss.label_kind), loss.include_last_prompt_token
    prompt_ids, parts, kept = token_row(prompt_ids, "prompt_ids"), list[Tensor](), dict[int, Tensor]()
    prompt, trained = prompt_ids.shape[1], min(prompt_ids.shape[1], max_prompt_tokens)

    def learn(layer: int, features_TF: Tensor, labels_KT: Tensor) -> None:
        parts.append(learn_layer(heads, layer, features_TF, labels_KT, loss, backward))

    def keep(chunk: Attended) -> None:
        kept[chunk.layer_idx] = heads.features(chunk, trained)[0].clone()

    def on_layer(chunk: Attended) -> None:
        labels_KT = layer_labels(chunk, prompt, *how, labelled=trained)
        learn(chunk.layer_idx, heads.features(chunk, trained)[0], labels_KT)

    if asked:
        backbone = describe(model)
        labels_LKT = labels_of_answers(model, prompt_ids, asked, *how, labelled=trained, on_document=keep)
        for layer, labels_KT in zip(backbone.layers, labels_LKT, strict=True):
            features_TF = kept.pop(layer)
            learn(layer, features_TF, labels_KT[: backbone.shape(layer).num_kv_heads].to(features_TF.device))
        tokens = prompt + sum(question.shape[-1] + answer.shape[-1] for question, answer in asked)
    else:
        ids = torch.cat([prompt_ids, token_row(answer_ids, "answer_ids")], dim=1)
        observe(model, ids.to(input_device(model)), on_layer)
        tokens = ids.shape[1]
    fits, smoothnesses, overlaps = torch.stack(parts, dim=1)
    fit, smoothness = fits.mean(), smoothnesses.sum()
    return StepResult(fit + loss.alpha * smoothness, fit, smoothness, overlaps, tokens)


def learn_layer(
    heads: RetainingHeads,
    layer_idx: int,
    features_TF: Tensor,
    labels_KT: Tensor,
    loss: Loss,
    backward: Callable[[Tensor], None],
) -> Tensor:
    """Call `backward` with one layer's share of the total; return (3,) its fit, smoothness and overlap, detached."""
    kind = features_TF.device.type
    # Of a head's weights no low-precision copy is kept after its layer is done.
    how = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    with torch.enable_grad(), torch.autocast(kind, *how, cache_enabled=False):
        scores_KT = heads[layer_idx](features_TF).T
        fit, smoothness = fit_and_smoothness(scores_KT, labels_KT, loss)
        # The fit is a mean over layers, smoothness a sum over them.
        backward(fit / len(heads) + loss.alpha * smoothness)
    overlap = top_overlap(scores_KT.detach(), labels_KT)[0]
    # Stacking copies: torch's smooth L1 loss is a scalar that holds on to the memory of all its terms.
    return torch.stack([fit.detach(), smoothness.detach(), overlap])
