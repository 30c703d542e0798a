"""How many units each layer needs: budgets of layers, measured on the rows that are held out by what answers lose.

Layers are not alike: some look at neighbours and hardly at the text, others find what is asked. How much attention a
layer pays does not tell which: layers that pay much may decide nothing. So each layer alone is read within a few units,
and within as many as a uniform budget has, while all others keep everything; what the right answers lose by the former
and not by the latter is what more units are worth there. Half of the budget stays uniform, because an answer needs
something of every layer (the floor of Ada-KV, arXiv 2407.11550); the other half is shared out by what was lost.
"""

# L layers

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from locret.backbone.adapters import describe, input_device, unwrap
from locret.backbone.passes import keeping_step
from locret.cache.cache import RetentionCache
from locret.cache.reader import answering
from locret.chunked_prefill import prefill
from locret.policy.growth import LEAST_SHARE
from locret.policy.policy import RetentionPolicy
from locret.scorers import RetainingHeadScorer

if TYPE_CHECKING:
    from locret.data.training.stream import TrainingExample
    from locret.heads.heads import RetainingHeads

logger = logging.getLogger(__name__)

BLOCK = 256
"""Tokens of an answer whose logits are held at once."""
LEAST_LOST = 0.01
"""Nats per answer token, over all layers, below which a difference is noise."""
FEW = 4
"""A layer is read within the budget, and within so many times less, where one that matters loses answers."""


def layer_shares(
    model: nn.Module,
    heads: RetainingHeads,
    rows: Sequence[TrainingExample],
    budget: int,
    policy: RetentionPolicy,
) -> tuple[float, ...]:
    """Return the share of each full-attention layer in a budget, 1 on average.

    Every row is read twice per layer, by chunks as inference does. Where right answers lose next to nothing, all layers
    are alike, which a warning says.

    Args:
        model: The backbone.
        heads: Trained heads, which choose the units.
        rows: Rows to measure on.
        budget: Units per KV head, 8 or more.
        policy: Its `chunk_size`, `local_len` and `positions` are read with.

    Raises:
        ValueError: If no row has more tokens than that and the local ones.
    """
    lost_L = torch.zeros(len(describe(unwrap(model)).layers))
    longer = check_longer(rows, budget, policy.local_len)
    for row in tqdm(longer, desc="layer shares", unit="row", disable=None):
        lost_L += _lost(model, heads, row, budget, policy) / len(longer)
    if float(lost_L.clamp(min=0).sum()) < LEAST_LOST:
        logger.warning(
            "--layer-shares %d: right answers lose next to nothing by it, so all layers are recorded as alike; lower "
            "it",
            budget,
        )
    return shares_of(lost_L)


def check_longer(rows: Sequence[TrainingExample], budget: int, local_len: int) -> list[TrainingExample]:
    """Return the rows that a budget and the local tokens do not hold whole: in the others all layers are alike.

    Raises:
        ValueError: If there are none.
    """
    longer = [row for row in rows if _document(row).shape[1] > budget + local_len]
    if not longer:
        most = max(_document(row).shape[1] for row in rows)
        raise ValueError(
            f"--layer-shares {budget} holds every held-out row whole with the {local_len} local tokens, the longest of "
            f"which has {most:,}, so all layers would be alike; lower it or --policy.local-len, or give longer rows"
        )
    return longer


def shares_of(lost_L: Tensor) -> tuple[float, ...]:
    """Return shares, 1 on average, from what answers lose by each layer; all alike if they lose next to nothing."""
    lost_L = lost_L.clamp(min=0)
    total, layers = float(lost_L.sum()), len(lost_L)
    parts = torch.full_like(lost_L, 1 / layers) if total < LEAST_LOST else lost_L / total
    return tuple(round(LEAST_SHARE + (1 - LEAST_SHARE) * layers * part, 3) for part in parts.tolist())


def _lost(
    model: nn.Module, heads: RetainingHeads, row: TrainingExample, budget: int, policy: RetentionPolicy
) -> Tensor:
    """Return (L,) nats per answer token that each layer alone loses within few units and not within the budget."""
    prompt, device = row.prompt_ids.to(input_device(model)), input_device(model)
    asked = row.asked or ((prompt[:, -1:], row.answer_ids),)
    pairs = [(question.to(device), answer.to(device)) for question, answer in asked]
    document = _document(row).to(device)
    layers = len(describe(unwrap(model)).layers)
    found = []
    for nth in range(layers):
        few, enough = (
            _loss(model, _read(model, heads, document, _alone(nth, layers, units, document.shape[1]), policy), pairs)
            for units in (budget // FEW, budget)
        )
        found.append(few - enough)
    return torch.tensor(found)


def _document(row: TrainingExample) -> Tensor:
    """Return the tokens of a row that are read before anything is asked."""
    return row.prompt_ids if row.asked else row.prompt_ids[:, :-1]


def _alone(nth: int, layers: int, units: int, tokens: int) -> list[int]:
    """Return budgets of all layers: one has so many units, the others all tokens or a few more, equal in the mean."""
    others = units + layers * -(-max(0, tokens - units) // layers)
    return [units if layer == nth else others for layer in range(layers)]


def _read(
    model: nn.Module, heads: RetainingHeads, document: Tensor, units: Sequence[int], policy: RetentionPolicy
) -> RetentionCache:
    own = RetentionPolicy(
        budget=sum(units) // len(units),
        chunk_size=int(policy.chunk_size),  # numbers that nobody gave follow the budget, and would change with it
        stabilizers=0,
        local_len=int(policy.local_len),
        positions=policy.positions,
        layer_budgets="shares",
        layer_shares=tuple(float(one - 1) for one in units),  # the first unit of each layer is not shared out
    )
    cache = RetentionCache(model, RetainingHeadScorer(heads=heads), own)
    prefill(model, document, cache)
    return cache


@torch.no_grad()
@keeping_step
def _loss(model: nn.Module, cache: RetentionCache, pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the mean negative log-likelihood per token of right answers, each asked of a fork of what was kept.

    Long answers go by blocks, so that there are logits of few tokens at once.
    """
    found = []
    for question, answer in pairs:
        ids, fork, lost = torch.cat([question, answer[:, :-1]], dim=1), cache.copy(), 0.0
        with answering(model, fork):
            for block, wanted in _blocks(ids, answer):
                kept = max(1, wanted.shape[1])
                logits = model(input_ids=block, past_key_values=fork, use_cache=True, logits_to_keep=kept).logits
                if wanted.numel():
                    lost += float(cross_entropy(logits[0].float(), wanted[0].to(logits.device), reduction="sum"))
        found.append(lost / answer.shape[1])
    return sum(found) / len(found)


def _blocks(ids: Tensor, answer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens to read, (1, l), with those of the answer that the last of them predict, at most as many."""
    before = ids.shape[1] - answer.shape[1]
    for block, start in zip(ids.split(BLOCK, dim=1), range(0, ids.shape[1], BLOCK), strict=True):
        yield block, answer[:, max(0, start - before) : max(0, start + block.shape[1] - before)]
