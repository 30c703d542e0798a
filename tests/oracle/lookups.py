"""OmniKV (ICLR 2025) and Quest (arXiv 2406.10774), slowly: what is dense, and what is selected."""

from __future__ import annotations

import torch
from torch import Tensor

from oracle.sparse_reading import Visible


def dense_layers(filter_layers: tuple[int, ...], layers: int) -> list[int]:
    """Return the layers that attend to everything (Eq. 2).

    Those before the first filter layer, filter layers, and the layer after each, whose attention hides the transfer.
    """
    return [
        layer
        for layer in range(layers)
        if layer < filter_layers[0] or layer in filter_layers or layer - 1 in filter_layers
    ]


def window_weights(selector: str, window: int) -> list[float]:
    """Return alpha of the window's queries, oldest first (Section 4.2)."""
    if selector == "uniform":
        return [1.0] * window
    if selector == "exp":
        return [2.0 ** (t - window) for t in range(window)]
    return [0.0] * (window - 1) + [1.0]


def context_scores(query_NWD: Tensor, key_KTD: Tensor, candidates: int, scaling: float, selector: str) -> list[float]:
    """Return S_j = sum_t alpha_t max_h A[h, t, j] of every candidate (Eq. 3 and 4).

    Args:
        query_NWD: Queries of the observation window, the last ones of the T tokens.
        key_KTD: Keys of all tokens; each query sees those up to its own.
        candidates: The first so many tokens, all of them older than the window.
        scaling: Factor of the logits.
        selector: "uniform", "exp", "last", or "raw": as the released code has it, the last query's logits without
            softmax.
    """
    heads, window, _ = query_NWD.shape
    kv_heads, tokens, _ = key_KTD.shape
    total = [0.0] * candidates
    for t, alpha in enumerate(window_weights(selector, window)):
        if not alpha:
            continue
        best = [-float("inf")] * candidates
        for n in range(heads):
            seen_SD = key_KTD[n // (heads // kv_heads), : tokens - window + t + 1]
            logits_S = seen_SD.double() @ query_NWD[n, t].double() * scaling
            shares_S = logits_S if selector == "raw" else torch.softmax(logits_S, dim=0)
            best = [max(one, float(share)) for one, share in zip(best, shares_S[:candidates], strict=True)]
        total = [one + alpha * share for one, share in zip(total, best, strict=True)]
    return total


def best_tokens(scores_S: list[float], count: int) -> list[int]:
    """Return the best `count` candidates, ascending; the newer of two equals."""
    order = sorted(range(len(scores_S)), key=lambda s: (scores_S[s], s))
    return sorted(order[len(order) - min(count, len(order)) :])


def omnikv_visible(
    filter_layers: tuple[int, ...],
    layers: int,
    prompt: int,
    count: int,
    scaling: float,
    selector: str = "last",
    window: int = 16,
    newest: int = 0,
    prefill: int = 0,
) -> Visible:
    """Return the rule of `read_by_choice` that OmniKV follows (Algorithm 1; Appendix D.10 for `prefill`).

    Args:
        filter_layers: Layers that select, ascending.
        layers: Layers of the backbone.
        prompt: Tokens of the prompt, read densely; the last one, and those after them, are always visible.
        count: Tokens that a filter layer selects.
        scaling: Factor of the logits.
        selector: See `context_scores`.
        window: Queries of the observation window, w; "last" and "raw" look from the newest alone.
        newest: Last tokens before an answer, or before a chunk, that are no candidates but always visible.
        prefill: r: a chunk's queries, all weighing alike, select this many times as many tokens as the chunk has, or
            `count` if that is more; 0: the prompt is read densely.
    """
    dense, chosen = dense_layers(filter_layers, layers), list[int]()

    def visible(layer: int, query_NTD: Tensor, key_KTD: Tensor, start: int) -> list[list[int]] | None:
        answering, size = start >= prompt, query_NTD.shape[1] - start
        if start == 0 or not (answering or prefill):
            return None
        if layer in filter_layers:
            candidates = min(prompt - 1, start) - newest
            queries_NWD = query_NTD[:, -window:] if answering else query_NTD[:, start:]
            how = selector if answering else "uniform"
            scores = context_scores(queries_NWD, key_KTD, candidates, scaling, how)
            best = best_tokens(scores, count if answering else max(count, prefill * size))
            chosen[:] = [*best, *range(candidates, start)]
        return None if layer in dense else [list(chosen)] * len(query_NTD)

    return visible


def page_bounds(key_SD: Tensor, page: int) -> list[tuple[Tensor, Tensor]]:
    """Return each page's smallest and largest key, channel by channel; the last page may be short."""
    bounds = []
    for start in range(0, len(key_SD), page):
        members = key_SD[start : start + page]
        bounds.append((members.min(dim=0).values, members.max(dim=0).values))
    return bounds


def upper_bound(query_D: Tensor, low_D: Tensor, high_D: Tensor) -> float:
    """Return sum_d max(q_d low_d, q_d high_d): no key of the page has a larger product with the query."""
    return sum(max(float(q * low), float(q * high)) for q, low, high in zip(query_D, low_D, high_D, strict=True))


def quest_kept(query_ND: Tensor, key_KSD: Tensor, tokens: int, page: int = 16, last: bool = False) -> list[list[int]]:
    """Return the slots that each query head attends to, ascending.

    Args:
        query_ND: Post-rotary queries of one token.
        key_KSD: Post-rotary keys.
        tokens: Token budget.
        page: Tokens of a page.
        last: Always choose the last page, as the kernels do, as one of the pages.
    """
    group, result = len(query_ND) // len(key_KSD), []
    for n, query_D in enumerate(query_ND):
        key_SD = key_KSD[n // group]
        bounds = [upper_bound(query_D, low, high) for low, high in page_bounds(key_SD, page)]
        if last:
            bounds[-1] = float("inf")
        ranked = sorted(range(len(bounds)), key=lambda p: bounds[p], reverse=True)
        kept = sorted(ranked[: min(max(3, tokens // page), len(bounds))])
        result.append([s for p in kept for s in range(p * page, min((p + 1) * page, len(key_SD)))])
    return result


def quest_visible(
    prompt: int, tokens: int, page: int = 16, dense: int = 2, newest: int = 0, last: bool = False
) -> Visible:
    """Return the rule of `read_by_choice` that Quest's answers follow.

    Args:
        prompt: Tokens that are read densely; those after them are always visible.
        tokens: Token budget.
        page: Tokens of a page.
        dense: First layers, which attend to everything.
        newest: Last tokens of the prompt that are in no page but always visible.
        last: See `quest_kept`.
    """

    def visible(layer: int, query_NTD: Tensor, key_KTD: Tensor, start: int) -> list[list[int]] | None:
        if start < prompt or layer < dense:
            return None
        tail = range(prompt - newest, start)
        kept = quest_kept(query_NTD[:, -1], key_KTD[:, : prompt - newest], tokens, page, last)
        return [[*slots, *tail] for slots in kept]

    return visible
