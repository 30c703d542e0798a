"""Do scores computed from a prefix mark the same units as scores computed from the whole text?

Paper:    Locret, arXiv 2410.01805, Figure 1 and appendix B: the top 10 % of units by a score of the prefix against the
          top 10 % by the same score of the full context. The paper gives no formula and no numbers.
Formula:  k = ceil(share * n); |P_n intersected with F_n| / k, averaged over layers, KV heads and texts, where P_n are
          the k best units of the prefix of n tokens. F_n differs by curve:
            itself      the k best of those n units by the score of the whole text
            everywhere  the best ceil(share * N) of all N units by the score of the whole text; divided by the smaller k
            oracle      the k best of those n units by the labels of the true answer
            eviction    both sides within the n units: scores of a bounded read against scores of an unbounded one
Deviates: the paper's curve for causal scores is below 1, which `itself` cannot show: a score that depends on nothing
          later is 1 by construction. `eviction` is what moves such scores, and `oracle` says whether they are right.
"""

# L layers, K KV heads, G query heads of a group, P prefixes, R queries of a block, N tokens, n of them in a prefix

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill, scorers
from locret.backbone.adapters import input_device
from locret.backbone.chunk import Attended, Chunk
from locret.labels.labels import observe
from locret.scorers import Rated, Scorer
from locret.scorers.retaining_heads import as_scorer

CURVES = ("itself", "everywhere", "oracle", "eviction")
ATTENTION = "accumulated attention"
"""The method H2O keeps units by: the attention each has received so far, summed over queries."""
SHARE = 0.1
_BLOCK_ELEMENTS = 2**24

Curves = dict[str, list[float | None]]
"""A value per prefix for each of `CURVES`; None where a curve is not defined."""


def best(scores: Tensor, count: int) -> Tensor:
    """Return a bool mask over the last dimension: the `count` best scores, newer units first among equals."""
    order = scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    mask = torch.zeros_like(scores, dtype=torch.bool)
    return mask.scatter(-1, scores.shape[-1] - 1 - order[..., :count], True)


def overlap(one: Tensor, other: Tensor, share: float = SHARE) -> float:
    """Return the share of the best units that two scores of the same units agree on, averaged over heads.

    Args:
        one: (L, K, n) scores.
        other: (L, K, n) scores.
        share: What part of the units counts as best.
    """
    count = math.ceil(share * one.shape[-1])
    both = best(one, count) & best(other, count)
    return float(both.sum(-1).double().mean() / count)


def overlap_everywhere(prefix: Tensor, whole: Tensor, share: float = SHARE) -> float:
    """Return the overlap of the best units of a prefix with the best of the whole text, by the smaller number of them.

    Args:
        prefix: (L, K, n) scores of the prefix.
        whole: (L, K, N) scores of the whole text.
        share: What part of the units counts as best, on either side.
    """
    length = prefix.shape[-1]
    few, many = math.ceil(share * length), math.ceil(share * whole.shape[-1])
    both = best(prefix, few) & best(whole, many)[..., :length]
    return float(both.sum(-1).double().mean() / min(few, many))


def read_scores(
    model: nn.Module, scorer: RetainingHeads | Scorer | str, ids: Tensor, policy: RetentionPolicy
) -> Tensor:
    """Read a prompt within a policy and return the score each unit got when it entered the cache.

    Args:
        model: The backbone.
        scorer: Retaining heads, a scorer, or the name of a training-free one.
        ids: (1, N) token ids.
        policy: How the prompt is read; a budget of N or more evicts nothing.

    Returns:
        (L, K, N) float32, evicted units included.
    """
    recorder = _Recorder(scorer)
    cache = RetentionCache(model, recorder, policy)
    prefill(model, ids, cache)
    return torch.stack([torch.cat(recorder.rows[layer], dim=-1) for layer in cache.backbone.layers])


class _Recorder(Scorer):
    """Passes scores on and remembers them, for one read."""

    name = "recorder"

    def __init__(self, scorer: RetainingHeads | Scorer | str) -> None:
        scorer = scorers.get(scorer) if isinstance(scorer, str) else scorer
        self.scorer = as_scorer(scorer)
        self.rows: dict[int, list[Tensor]] = {}

    @property
    def neighbours(self) -> int:
        return self.scorer.neighbours

    def prepare(self, model: nn.Module) -> object:
        return self.scorer.prepare(model)

    def sink_tokens(self, budget: int, recent: int) -> int:
        return self.scorer.sink_tokens(budget, recent)

    def score(self, chunk: Chunk) -> Tensor:
        rated = self.scorer.score(chunk)
        scores = rated.scores if isinstance(rated, Rated) else rated
        # Units are compared by what they scored when they entered, whether or not the method rates them again.
        newest = scores[:, :, -chunk.new_tokens :]
        if chunk.sinks:
            newest = newest.masked_fill(chunk.positions < chunk.sinks, torch.inf)
        self.rows.setdefault(chunk.layer_idx, []).append(newest[0].detach().float().cpu())
        return scores


def attention_sums(model: nn.Module, ids: Tensor, prefixes: Sequence[int]) -> list[Tensor]:
    """Return, for every prefix, the attention that each of its units received from the prefix's own queries.

    Softmax weights are summed over queries and over the query heads of a group, with nothing evicted (H2O's global
    statistics). One pass gives all prefixes, since a prefix's queries and keys do not depend on what follows.

    Args:
        model: The backbone.
        ids: (1, N) token ids.
        prefixes: Lengths n, ascending, at most N.

    Returns:
        (L, K, n) float32 for every prefix.
    """
    rows: list[list[Tensor]] = []
    device = input_device(model)
    observe(model, ids[:, : prefixes[-1]].to(device), lambda chunk: rows.append(_layer_attention_sums(chunk, prefixes)))
    return [torch.stack([layer[index] for layer in rows]) for index in range(len(prefixes))]


def _layer_attention_sums(chunk: Attended, prefixes: Sequence[int]) -> list[Tensor]:
    """Return the (K, n) sums of one layer for every prefix."""
    keys_KDN, kv_heads = chunk.key[0].float().mT, chunk.key.shape[1]
    queries_KGND = chunk.query[0].float().unflatten(0, (kv_heads, -1)) * chunk.scaling
    sums_KN = keys_KDN.new_zeros(kv_heads, keys_KDN.shape[-1])
    block = max(1, _BLOCK_ELEMENTS // (chunk.query.shape[1] * keys_KDN.shape[-1]))
    snapshots, start = [], 0
    for end in prefixes:
        while start < end:
            stop = min(start + block, end)
            logits_KGRn = queries_KGND[:, :, start:stop] @ keys_KDN[:, None, :, :stop]
            if chunk.softcap is not None:
                logits_KGRn = chunk.softcap * torch.tanh(logits_KGRn / chunk.softcap)
            future = torch.ones(stop - start, stop, dtype=torch.bool, device=sums_KN.device).triu(start + 1)
            sums_KN[:, :stop] += logits_KGRn.masked_fill_(future, -torch.inf).softmax(-1).sum((1, 2))
            start = stop
        snapshots.append(sums_KN[:, :end].cpu().clone())
    return snapshots


def default_prefixes(tokens: int, count: int = 8) -> list[int]:
    """Return `count` lengths in even steps up to the whole text.

    Raises:
        ValueError: If the text is shorter than that.
    """
    if tokens < count:
        raise ValueError(f"a text of {tokens} tokens has no {count} prefixes; give a longer one")
    return [tokens * (step + 1) // count for step in range(count)]


def measure(
    model: nn.Module,
    ids: Tensor,
    methods: Mapping[str, RetainingHeads | Scorer | str],
    policy: RetentionPolicy,
    prefixes: Sequence[int],
    labels: Tensor | None = None,
) -> dict[str, Curves]:
    """Return the curves of one text for every method, and for accumulated attention.

    Every prefix is read afresh, so that a score which looks ahead is seen to change.

    Args:
        model: The backbone, in evaluation mode.
        ids: (1, N) token ids.
        methods: By name: retaining heads, a scorer, or the name of a training-free one.
        policy: The bounded read of the curve `eviction`.
        prefixes: Lengths n, ascending, at most N.
        labels: (L, K, N) labels of the true answer, for the curve `oracle`.

    Returns:
        By method. Accumulated attention has no `eviction`: it has no score for a unit that is gone.
    """
    tokens = ids.shape[1]
    free = replace(policy, budget=max(tokens, policy.budget), decode_budget=None)
    curves = {}
    for name, method in methods.items():
        whole, bounded = read_scores(model, method, ids, free), read_scores(model, method, ids, policy)
        own = [whole if n == tokens else read_scores(model, method, ids[:, :n], free) for n in prefixes]
        curves[name] = _curves(own, whole, labels, bounded)
    sums = attention_sums(model, ids, [*prefixes, tokens])
    curves[ATTENTION] = _curves(sums[:-1], sums[-1], labels, None)
    return curves


def _curves(own: Sequence[Tensor], whole: Tensor, labels: Tensor | None, bounded: Tensor | None) -> Curves:
    lengths = [scores.shape[-1] for scores in own]
    labels = None if labels is None else labels.cpu()
    return {
        "itself": [overlap(scores, whole[..., :n]) for scores, n in zip(own, lengths, strict=True)],
        "everywhere": [overlap_everywhere(scores, whole) for scores in own],
        "oracle": [
            None if labels is None else overlap(scores, labels[..., :n]) for scores, n in zip(own, lengths, strict=True)
        ],
        "eviction": [None if bounded is None else overlap(bounded[..., :n], whole[..., :n]) for n in lengths],
    }


@dataclass(frozen=True)
class Consistency:
    """Curves of several texts: their means and standard errors, both as shares from 0 to 1."""

    prefixes: tuple[int, ...]
    texts: int
    means: dict[str, Curves]
    errors: dict[str, Curves]
    share: float = SHARE


def average(prefixes: Sequence[int], measured: Sequence[dict[str, Curves]]) -> Consistency:
    """Return means and standard errors over texts that were measured at the same prefixes."""
    means: dict[str, Curves] = {}
    errors: dict[str, Curves] = {}
    for name in measured[0]:
        means[name], errors[name] = {}, {}
        for curve in CURVES:
            columns = list(zip(*(text[name][curve] for text in measured), strict=True))
            means[name][curve] = [_over(column, _mean) for column in columns]
            errors[name][curve] = [_over(column, _standard_error) for column in columns]
    return Consistency(tuple(prefixes), len(measured), means, errors)


def _over(column: tuple[float | None, ...], what: Callable[[list[float]], float]) -> float | None:
    values = [value for value in column if value is not None]
    return what(values) if values else None


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _standard_error(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
