"""A training step on states as eviction leaves them: the second stage, for heads that can already evict.

In use a head reads q, k and v of a backbone that has lost most of its cache; in the first stage it only ever sees them
with everything there. Here the prompt is read chunk by chunk with the current heads' own evictions, and the heads learn
from what they see there. The labels stay those of the first stage, from a pass over prompt and answer in which nothing
is evicted: what the answer would look at if it could.

Costs two forward passes a step instead of one, and keeps the features of all layers, (layers, tokens, (H + 2 K) D) in
the backbone's dtype, because smoothness and ranking compare tokens of different chunks.
"""

# K KV heads, T prompt tokens that are trained on, F features

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from locret.backbone.chunk import Chunk
from locret.cache.cache import RetentionCache
from locret.chunked_prefill import prefill
from locret.heads.heads import RetainingHeads
from locret.labels.labels import answer_labels, token_row
from locret.policy.policy import RetentionPolicy
from locret.scorers import Scorer
from locret.train.loss import ALPHA
from locret.train.step import MAX_PROMPT_TOKENS, LossArguments, StepResult, learn_layer, step_result


class _Recorder(Scorer):
    """Scores with the heads, and keeps what they were given."""

    name: ClassVar[str] = "recorder"

    def __init__(self, heads: RetainingHeads) -> None:
        self.heads = heads
        self.features: dict[int, list[Tensor]] = {layer: [] for layer in heads}

    def score(self, chunk: Chunk) -> Tensor:
        """Return scores (1, K, L)."""
        features_BLF = chunk.features()
        self.features[chunk.layer_idx].append(features_BLF[0])
        return self.heads[chunk.layer_idx](features_BLF).transpose(1, 2)  # type: ignore[no-any-return]


def train_step_under_eviction(
    model: nn.Module,
    heads: RetainingHeads,
    prompt_ids: Tensor,
    answer_ids: Tensor,
    *,
    policy: RetentionPolicy,
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
    """Do what `train_step` does, on features of a prompt that is read under eviction.

    Args:
        model: As for `train_step`, and the other arguments too.
        heads: Heads to train, which also decide what is evicted.
        prompt_ids: (1, n) or (n,).
        answer_ids: (1, m) or (m,).
        policy: How the prompt is read.
        alpha: See `train_step`.
        kind: See `answer_labels`.
        include_last_prompt_token: See `answer_labels`.
        objective: See `retention_loss`.
        floor: See `retention_loss`.
        temperature: See `retention_loss`.
        max_prompt_tokens: See `train_step`.
        earlier_answers: See `answer_labels`.
        backward: See `train_step`.

    Returns:
        The losses of the row; tokens are counted once.

    Raises:
        ValueError: For an unknown kind or objective, or a prompt or answer that is empty or more than one row.
    """
    prompt_ids, answer_ids = token_row(prompt_ids, "prompt_ids"), token_row(answer_ids, "answer_ids")
    trained = min(prompt_ids.shape[1], max_prompt_tokens)
    labels_LKT = answer_labels(model, prompt_ids, answer_ids, kind, include_last_prompt_token, earlier_answers)
    recorder = _Recorder(heads)
    prefill(model, prompt_ids[:, :trained], RetentionCache(model, recorder, policy))
    options: LossArguments = {"alpha": alpha, "objective": objective, "floor": floor, "temperature": temperature}
    parts = [
        learn_layer(heads, layer, torch.cat(recorder.features.pop(layer)), labels_KT, backward, **options)
        for layer, labels_KT in zip(heads, labels_LKT[..., :trained], strict=True)
    ]
    return step_result(parts, alpha, prompt_ids.shape[1] + answer_ids.shape[1])
