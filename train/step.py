"""One training step in one pass: every layer's loss and gradient are computed while the backbone reads the text.

The backbone is frozen and a head's loss touches its own layer alone, so nothing flows back through the backbone. As
soon as a layer has attended, its head's inputs and labels are all there; its head goes forward and backward on the spot
and the layer's tensors are freed. A step costs about one backbone forward, and one layer's tensors of memory whatever
the number of layers.
"""
# K KV heads, T prompt tokens that are trained on, F features

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from locret.backbone.chunk import Attended
from locret.heads.heads import RetainingHeads
from locret.labels.labels import check_kind, layer_labels, observe, token_row
from locret.train.loss import ALPHA, retention_loss, top_overlap

MAX_PROMPT_TOKENS = 10240
"""Prompt tokens trained on; labels come from the whole text all the same (the original code's truncation)."""


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
    *,
    alpha: float = ALPHA,
    kind: str = "logit",
    include_last_prompt_token: bool = False,
    objective: str = "regression",
    floor: float | None = None,
    temperature: float = 1.0,
    max_prompt_tokens: int = MAX_PROMPT_TOKENS,
    earlier_answers: Sequence[tuple[int, int]] = (),
    backward: Callable[[Tensor], None] = Tensor.backward,
) -> StepResult:
    """Add the gradient of one row's loss to the heads' float32 gradients.

    Args:
        model: The frozen backbone, in evaluation mode, on the heads' device; autocast around the call is respected.
        heads: The heads to train.
        prompt_ids: (1, n) or (n,).
        answer_ids: (1, m) or (m,).
        alpha: Weight of the smoothness term.
        kind: Label kind, see `answer_labels`.
        include_last_prompt_token: See `answer_labels`.
        objective: See `retention_loss`.
        floor: See `retention_loss`; the overlap is that of the labels without it.
        temperature: See `retention_loss`.
        max_prompt_tokens: First prompt tokens to train on; labels are those of the whole text.
        earlier_answers: See `answer_labels`.
        backward: Called once per layer with the layer's share of the loss; the shares add up to the total.

    Returns:
        The losses of the row.

    Raises:
        ValueError: For an unknown kind or objective, or a prompt or answer that is empty or more than one row.
    """
    check_kind(kind)
    prompt_ids, answer_ids = token_row(prompt_ids, "prompt_ids"), token_row(answer_ids, "answer_ids")
    prompt, trained = prompt_ids.shape[1], min(prompt_ids.shape[1], max_prompt_tokens)
    parts: list[Tensor] = []

    options: LossArguments = {"alpha": alpha, "objective": objective, "floor": floor, "temperature": temperature}

    def on_layer(chunk: Attended) -> None:
        labels_KT = layer_labels(
            chunk, prompt, kind, include_last_prompt_token, labelled=trained, earlier_answers=earlier_answers
        )
        features_TF = _first_features(chunk, trained)
        parts.append(learn_layer(heads, chunk.layer_idx, features_TF, labels_KT, backward, **options))

    ids = torch.cat([prompt_ids, answer_ids], dim=1).to(next(model.parameters()).device)
    observe(model, ids, on_layer)
    return step_result(parts, alpha, ids.shape[1])


class LossArguments(TypedDict):
    """Keyword arguments of `retention_loss`."""

    alpha: float
    objective: str
    floor: float | None
    temperature: float


def learn_layer(
    heads: RetainingHeads,
    layer_idx: int,
    features_TF: Tensor,
    labels_KT: Tensor,
    backward: Callable[[Tensor], None],
    **options: Unpack[LossArguments],
) -> Tensor:
    """Call `backward` with one layer's share of the total; return (3,) its fit, smoothness and overlap, detached."""
    with torch.enable_grad(), _without_cast_cache(features_TF.device.type):
        scores_KT = heads[layer_idx](features_TF).T
        _, fit, smoothness = retention_loss(scores_KT, labels_KT, **options)
        # The fit is a mean over layers, smoothness a sum over them.
        backward(fit / len(heads) + options["alpha"] * smoothness)
    overlap = top_overlap(scores_KT.detach(), labels_KT)[0]
    # Stacking copies: torch's smooth L1 loss is a scalar that holds on to the memory of all its terms.
    return torch.stack([fit.detach(), smoothness.detach(), overlap])


def step_result(parts: list[Tensor], alpha: float, tokens: int) -> StepResult:
    """Combine what `learn_layer` returned for every layer."""
    fits, smoothnesses, overlaps = torch.stack(parts, dim=1)
    fit, smoothness = fits.mean(), smoothnesses.sum()
    return StepResult(fit + alpha * smoothness, fit, smoothness, overlaps, tokens)


def _first_features(chunk: Attended, tokens: int) -> Tensor:
    """Return the first tokens' features, (T, F), without building those of the whole text."""
    parts = {name: part[:, :tokens] for name, part in chunk.projections.parts.items()}
    return replace(chunk.projections, parts=parts).features()[0]


@contextlib.contextmanager
def _without_cast_cache(device_type: str):  # type: ignore[no-untyped-def]
    """Under autocast, keep no low-precision copy of a head's weights after its layer is done."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False):
        yield
