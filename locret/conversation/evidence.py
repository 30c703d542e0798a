"""What an answer stands on: how sure it is, where in the text it looked, and how likely a given answer would be.

Where units were evicted, an unsure answer may lack evidence.
"""

# A tokens of an answer, V words of the vocabulary, J segments of the text, K KV heads, G query heads of a group,
# S units, D head dim

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList

from locret.backbone.adapters import input_device
from locret.backbone.attention import View, attention_weights, capped
from locret.backbone.chunk import Attended
from locret.base.fields import Refusal
from locret.cache.layer import RetentionLayer
from locret.cache.reader import answering
from locret.cache.store import POSITIONS
from locret.conversation.document import decode, encode
from locret.generation import check_finite_logits
from locret.policy.policy import RetentionPolicy

if TYPE_CHECKING:
    from locret.conversation.context import Context

UNSURE = 0.9
"""Lead of an answer's least certain token over the runner-up, as probabilities, below which the answer is unsure."""
PASSAGES = 3
"""Passages that are named."""
LEAST_WIDTH = 32
"""Tokens of a segment as long as the text is short."""
_SINKS = 4
"""First tokens, where attention rests that looks at nothing (StreamingLLM)."""
_RESTING = 1e-3
"""Share of attention that is none: what is below it rests."""
_LEAST = 0.5
"""Of what stands for the first passage, what has to stand for another one."""
_SEGMENTS, _MOST_SEGMENTS = 3, 256
"""Neighbouring segments in a passage, as a needle may lie across two; and of a text: longer ones have wider ones."""


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Tokens of the text around what the answer looked at."""

    start: int
    """First token, counted as they were read, those of the chat template in front included."""
    end: int
    """After the last one."""
    attention: float
    """Share of the attention of the query head that looked at it most, in one of its segments."""
    text: str | None = None
    """What it says; None of a context from a file, which keeps a digest of its ids."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An answer, with what is known about the evidence for it; `str` gives its text."""

    text: str
    margin: float
    """Lead of the least certain token of the answer over the runner-up, as probabilities, 0 to 1."""
    passages: tuple[Passage, ...]
    """Where in the text the answer looked: first where one head at some of its tokens stands out most."""
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


class Watch:
    """Follows the attention of an answer's queries to segments of the text, one token at a time.

    Args:
        layers: How many layers the cache governs, which all count alike.
        tokens: Tokens of the text; what was said later is in no segment.
        first: Where what was read begins, behind the template's own words.
    """

    def __init__(self, layers: int, tokens: int, first: int = 0) -> None:
        self.tokens, self.width, self.first = tokens, LEAST_WIDTH, max(first, _SINKS)
        while -(-tokens // self.width) > _MOST_SEGMENTS:
            self.width *= 2
        self._segments = -(-tokens // self.width)
        self._sums: list[Tensor | None] = [None] * layers
        self._queries = [0] * layers

    def found(self) -> Tensor:
        """Return (3, J) float32: shares of a query head's attention that a segment got, and how far one came and went.

        They are the largest, the mean, and the largest lead of a head's mean over the tokens over its geometric mean:
        a head that rests looks at one place at every token.
        """
        pairs = zip(self._sums, self._queries, strict=True)
        seen = [one / count for one, count in pairs if one is not None]
        shares_HJ, logs_HJ = torch.cat(seen, 1) if seen else torch.zeros(2, 1, self._segments)
        resting_HJ = logs_HJ.exp() - _RESTING if max(self._queries) > 1 else 0.0
        return torch.stack([shares_HJ.amax(0), shares_HJ.mean(0), (shares_HJ - resting_HJ).amax(0)])

    def see(self, nth: int, layer: Attended, view: View, held: RetentionLayer) -> None:
        """Look at what the one new query of each head attends to in the layer that is `nth` of those with units."""
        heads = layer.projections.shape.num_kv_heads
        queries_KGD = layer.query[0, :, 0].unflatten(0, (heads, -1))
        sums_KGJ = torch.zeros(*queries_KGD.shape[:2], self._segments)
        for part in held.store.parts(view, 1, False):
            own = slice(None) if part.where is None else slice(part.where[1], part.where[1] + 1)
            logits_KGS = queries_KGD[own].float() @ part.keys[0].float().transpose(-1, -2) * layer.scaling
            logits_KGS = capped(logits_KGS, layer.softcap)
            sinks = None if layer.learned_sinks is None else layer.learned_sinks.view(heads, -1, 1)[own]
            weights_KGS, positions_KS = attention_weights(logits_KGS, sinks), part.columns[POSITIONS][0].long()
            there_KS = (positions_KS >= self.first) & (positions_KS < self.tokens)
            seen_KGS = weights_KGS.masked_fill(~there_KS[:, None], 0.0).cpu()
            segments_KS = (positions_KS // self.width).clamp(0, self._segments - 1).cpu()
            sums_KGJ[own].scatter_add_(2, segments_KS[:, None].expand_as(seen_KGS), seen_KGS)
        before, both_2HJ = self._sums[nth], torch.stack([sums_KGJ, (sums_KGJ + _RESTING).log()]).flatten(1, 2)
        self._sums[nth] = both_2HJ if before is None else before + both_2HJ
        self._queries[nth] += 1

    def passages(self, found_3J: Tensor) -> tuple[Passage, ...]:
        """Return passages apart from each other, around the segments of `found` that single heads looked at most."""
        # Where many heads look, or one all the time, they rest; what an answer stands on, few find at few tokens.
        (most_J, mean_J, lead_J), found = found_3J, list[Passage]()
        left_J = lead_J / mean_J.clamp_min(1e-6).sqrt()
        least = _LEAST * left_J.max()
        while len(found) < PASSAGES and left_J.max() > 0 and left_J.max() >= least:
            best = int(left_J.argmax())
            first = best - _SEGMENTS // 2  # may lie before the text, whose first passage is narrower
            end = min((first + _SEGMENTS) * self.width, self.tokens)
            start = max(first * self.width, min(self.first, end - 1))
            found.append(Passage(start=start, end=end, attention=float(most_J[best])))
            left_J[max(0, first - _SEGMENTS // 2) : first + _SEGMENTS + _SEGMENTS // 2] = -torch.inf
        return tuple(found)


def answered(context: Context, question: str, max_new_tokens: int, options: dict[str, Any]) -> Answered:
    """Answer a question from a fork and say what the answer may lack; see `Context.ask`."""
    leads, policy = list[float](), context.cache.policy

    def note(input_ids: Tensor, scores: Any) -> Any:
        best = scores[0].float().softmax(-1).topk(2).values
        leads.append(float(best[0] - best[1]))
        return scores

    processors = LogitsProcessorList([*(options.get("logits_processor") or ()), note])
    settings = context.lm.settings(max_new_tokens, {**options, "logits_processor": processors})
    if policy.recalls_blocks:
        rule = f"looks at the units that are held, but {policy.recall_by} recalls blocks; leave evidence out"
        raise Refusal("evidence", True, rule)
    if settings.get("num_beams", 1) > 1:
        raise Refusal("evidence", True, f"watches one answer, but {settings['num_beams']} beams are searched; drop one")
    chat = context.chat()
    chat.read_turn(question, max_new_tokens)
    opening = len(encode(context.lm.tokenizer, context.talk.transcript.opening()))
    watch = chat.cache.watch = Watch(len(chat.cache.governed), context.cache.text_end, opening)
    chat.write_answer(settings)
    found, ranks = watch.found(), context.cache.ranks
    if ranks is not None:  # each has watched its own heads
        every = ranks.gather(found.to(input_device(context.lm.model)), 0).cpu().unflatten(0, (-1, 3))
        found = torch.stack([every[:, 0].amax(0), every[:, 1].mean(0), every[:, 2].amax(0)])
    held = [layer.fill + (0 if layer.tier is None else layer.tier.fill) for layer in chat.cache.governed]
    passages = watch.passages(found)
    if context.talk.ids is not None:
        read, tokenizer = context.talk.ids, context.lm.tokenizer
        passages = tuple(replace(one, text=decode(tokenizer, read[one.start : one.end].tolist())) for one in passages)
    return Answered(
        text=str(chat.messages[-1]["content"]),
        margin=min(leads, default=1.0),
        passages=passages,
        evicted=min(held) < chat.cache.seen,
    )


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
