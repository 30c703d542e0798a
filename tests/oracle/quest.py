"""Quest (ICML 2024), slowly: pages with bounds of their keys, and the best pages of every query head."""

# N query heads, K KV heads, T tokens so far, S slots, D head dim

from __future__ import annotations

from torch import Tensor

from oracle.sparse_reading import Visible


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


def quest_pages(tokens: int, page: int, pages: int) -> int:
    """Return how many pages a query head attends to: min(max(3, tokens // page), pages)."""
    return min(max(3, tokens // page), pages)


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
        kept = sorted(ranked[: quest_pages(tokens, page, len(bounds))])
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
