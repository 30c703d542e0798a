"""How likely a given answer is, from what a context has kept: a measure for models too small to write it."""
# A tokens of an answer, V words of the vocabulary

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from locret.backbone.adapters import input_device
from locret.cache.reader import answering
from locret.generation import check_finite_logits
from locret.policy.policy import RetentionPolicy

if TYPE_CHECKING:
    from locret.conversation.context import Context


class Likelihood(NamedTuple):
    """What a model gives an answer."""

    nats: float
    """Minus the logarithm of the probability of the whole answer."""
    hits: int
    """Tokens that are the likeliest at their place."""
    tokens: int
    """Tokens of the answer."""


def likelihood(context: Context, question: str, answer: str) -> Likelihood:
    """Return how likely an answer to a question about a context is; the context does not change.

    Raises:
        ValueError: For an empty question.
    """
    lm, twin = context.lm, context.cache.copy()
    question_ids, answer_ids = context.question_ids(question)[0].tolist(), ids_of(lm.tokenizer, answer)
    twin.reserve(0, len(question_ids) + len(answer_ids))
    with answering(lm.model, twin):
        return after(lm.model, [*question_ids, *answer_ids], len(answer_ids), twin)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text that begins nothing."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def after(model: nn.Module, ids: Sequence[int], answer: int, cache: Any = None) -> Likelihood:
    """Return how likely the last `answer` of some tokens are, behind what a cache holds, which grows by all of them."""
    tokens_1L = torch.tensor([list(ids)], device=input_device(model))
    with torch.inference_mode():
        out = model(input_ids=tokens_1L, past_key_values=cache, use_cache=cache is not None, logits_to_keep=answer + 1)
        check_finite_logits(model, out.logits[0])
        logs_AV = out.logits[0, :-1].float().log_softmax(-1)
    targets_A: Tensor = tokens_1L[0, -answer:].to(logs_AV.device)
    nats = -float(logs_AV.gather(1, targets_A[:, None]).double().sum())
    return Likelihood(nats, int((logs_AV.argmax(-1) == targets_A).sum()), answer)


def policy_of_share(
    tokens: int, share: float, *, chunk_size: int = 256, local_len: int = 32, **changes: Any
) -> RetentionPolicy:
    """Return the policy that keeps a share of a text's tokens in every KV head, its newest ones included.

    Args:
        tokens: Of the text.
        share: 0 to 1.
        chunk_size: Tokens of a forward pass.
        local_len: Newest tokens that always stay; at most an eighth of what stays.
        changes: Other numbers of the policy.
    """
    units = max(8, round(tokens * share))
    local = min(local_len, max(1, units // 8))
    budget = units - local
    numbers: dict[str, Any] = {"stabilizers": min(64, budget // 4), "positions": "compact", **changes}
    return RetentionPolicy(budget=budget, chunk_size=chunk_size, local_len=local, **numbers)
