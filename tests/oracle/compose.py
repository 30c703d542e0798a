"""Texts that were read apart, joined unit by unit: what `locret.cache.compose` does, in float64 and by plain loops."""

# K KV heads, S units, D head dim, R rotated dims

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """What one layer holds of a text; all KV heads hold as many units."""

    keys: Tensor
    """(K, S, D), rotated to 0, 1, ..., S - 1."""
    values: Tensor
    """(K, S, D)."""
    scores: Tensor
    """(K, S)."""
    positions: Tensor
    """(K, S) in the text, ascending."""
    tokens: int
    """Tokens of the text."""
    skip: int = 0
    """Tokens at its beginning whose units are dropped."""


def turned(key: Tensor, angles: Tensor) -> Tensor:
    """Turn a (D,) key by the (R / 2,) angles of its pairs, which are the two halves of R."""
    half = len(angles)
    pairs = torch.complex(key[:half].double(), key[half : 2 * half].double())
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag, key[2 * half :].double()])


def composed(
    texts: list[Text],
    frequencies: Tensor,
    dropped: list[int],
    budget: int | None = None,
    *,
    fair: bool = True,
    local: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Join one layer of several texts.

    Args:
        texts: In their order.
        frequencies: (R / 2,) radians per position.
        dropped: Units per KV head that each text loses for its skipped tokens.
        budget: Units per KV head of the whole; None: all.
        fair: Whether each text has an equal share of the budget beside the local units, else the best scores win.
        local: Newest units of the whole that stay whatever their score.

    Returns:
        (K, C, D) keys, rotated to 0, 1, ..., C - 1, their (K, C, D) values, and (K, C) positions in the joined text.
    """
    heads = []
    for head in range(texts[0].keys.shape[0]):
        units, offset = [], 0
        for text, lost in zip(texts, dropped, strict=True):
            units.append(_without(_units(text, head, frequencies, offset), offset, lost))
            offset += text.tokens - text.skip
        if budget is not None and fair:
            newest = min(local, budget, len(units[-1]))
            shares = _shares(budget - newest, [*(len(own) for own in units[:-1]), len(units[-1]) - newest])
            shares[-1] += newest
            units = [
                _best(own, share, newest if own is units[-1] else 0) for own, share in zip(units, shares, strict=True)
            ]
        whole = [unit for own in units for unit in own]
        heads.append(whole if budget is None else _best(whole, budget, local))
    keys = [[turned(unit[2], rank * frequencies) for rank, unit in enumerate(whole)] for whole in heads]
    return (
        torch.stack([torch.stack(of_head) for of_head in keys]),
        torch.stack([torch.stack([unit[3] for unit in whole]) for whole in heads]),
        torch.tensor([[unit[1] for unit in whole] for whole in heads]),
    )


_Unit = tuple[float, int, Tensor, Tensor]
"""Score, position in the joined text, un-rotated key, value."""


def _units(text: Text, head: int, frequencies: Tensor, offset: int) -> list[_Unit]:
    found = []
    for rank in range(text.keys.shape[1]):
        position = int(text.positions[head, rank]) - text.skip + offset
        key = turned(text.keys[head, rank], -rank * frequencies)
        found.append((float(text.scores[head, rank]), position, key, text.values[head, rank]))
    return found


def _without(units: list[_Unit], first: int, lost: int) -> list[_Unit]:
    """Drop so many units: those from before the text's own first position, then the worst, of equal ones the oldest."""
    order = sorted(units, key=lambda unit: (unit[1] >= first, unit[0], unit[1]))
    return sorted(order[lost:], key=lambda unit: unit[1])


def _best(units: list[_Unit], budget: int, local: int) -> list[_Unit]:
    """Return the newest `local` units and the best others, of equal ones the newest, in their order."""
    newest = units[len(units) - local :]
    others = sorted(units[: len(units) - local], key=lambda unit: (-unit[0], -unit[1]))
    return sorted([*others[: max(budget - len(newest), 0)], *newest], key=lambda unit: unit[1])


def _shares(budget: int, held: list[int]) -> list[int]:
    """Hand out units one by one, to the text that has the fewest, as long as it holds more."""
    shares = [0] * len(held)
    for _ in range(min(budget, sum(held))):
        nth = min((nth for nth in range(len(held)) if shares[nth] < held[nth]), key=lambda nth: (shares[nth], nth))
        shares[nth] += 1
    return shares
