"""What an answer stands on: how sure it is, and how likely a given answer would be."""

# A tokens of an answer, V words of the vocabulary

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList

from locret.backbone.adapters import input_device
from locret.base.fields import Refusal
from locret.cache.reader import answering
from locret.conversation.document import encode
from locret.generation import check_finite_logits
from locret.policy.policy import RetentionPolicy

if TYPE_CHECKING:
    from locret.conversation.context import Context

UNSURE = 0.9
"""Lead of an answer's least certain token over the runner-up, as probabilities, below which the answer is unsure."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An answer, and how sure it is; `str` gives its text."""

    text: str
    margin: float
    """Lead of the least certain token of the answer over the runner-up, as probabilities, 0 to 1."""
    evicted: bool
    """Whether units of what was read are gone for good."""

    @property
    def flagged(self) -> bool:
        """Whether evidence may be gone: the answer is unsure, and units were evicted."""
        return self.margin < UNSURE and self.evicted

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {**asdict(self), "flagged": self.flagged}

    def __str__(self) -> str:
        return self.text


class Lead(LogitsProcessor):
    """Notes the least lead of a token over the runner-up, and changes nothing."""

    def __init__(self) -> None:
        self.least = 1.0

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        """Look at the (1, V) scores of the next token."""
        best = scores[0].float().softmax(-1).topk(2).values
        self.least = min(self.least, float(best[0] - best[1]))
        return scores


def answered(context: Context, question: str, max_new_tokens: int, options: dict[str, Any]) -> Answered:
    """Answer a question from a fork and say what the answer may lack; see `Context.ask`."""
    lead = Lead()
    processors = LogitsProcessorList([*(options.get("logits_processor") or ()), lead])
    settings = context.lm.settings(max_new_tokens, {**options, "logits_processor": processors})
    if settings.get("num_beams", 1) > 1:
        raise Refusal("evidence", True, f"watches one answer, but {settings['num_beams']} beams are searched; drop one")
    chat = context.chat()
    chat.read_turn(question, max_new_tokens)
    chat.write_answer(settings)
    held = [layer.fill + (0 if layer.tier is None else layer.tier.fill) for layer in chat.cache.governed]
    return Answered(text=str(chat.messages[-1]["content"]), margin=lead.least, evicted=min(held) < chat.cache.seen)


# -- likelihood -------------------------------------------------------------------------------------------------------


class Likelihood(NamedTuple):
    """What a model gives an answer: a measure for models too small to write it."""

    nats: float
    """Minus the logarithm of the probability of the whole answer."""
    hits: int
    """Tokens that are the likeliest at their place."""
    tokens: int
    """Tokens of the answer."""


def likelihood(context: Context, question: str, answer: str) -> Likelihood:
    """Return how likely an answer to a question about a context is; the context does not change."""
    lm, twin = context.lm, context.cache.copy()
    question_ids, answer_ids = context.question_ids(question)[0].tolist(), encode(lm.tokenizer, answer)
    twin.make_room(len(question_ids) + len(answer_ids))
    with answering(lm.model, twin):
        return likelihood_of(lm.model, [*question_ids, *answer_ids], len(answer_ids), twin)


def likelihood_of(model: nn.Module, ids: Sequence[int], answer: int, cache: Any = None) -> Likelihood:
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
    """Return the policy that keeps a share, 0 to 1, of a text's tokens in every KV head, its newest ones included.

    The newest `local_len` tokens always stay, at most an eighth of what stays.
    """
    units = max(8, round(tokens * share))
    local = min(local_len, max(1, units // 8))
    budget = units - local
    numbers: dict[str, Any] = {"stabilizers": min(64, budget // 4), "positions": "compact", **changes}
    return RetentionPolicy(budget=budget, chunk_size=chunk_size, local_len=local, **numbers)
