"""Protected spans and shares, by loops: which tokens one KV head holds after every chunk of a read."""

from __future__ import annotations


def kept_with_protection(
    scores: list[float],
    chunks: list[int],
    budgets: list[int],
    stabilizers: list[int],
    pins: list[tuple[int, int]],
    shares: list[tuple[int, int, int]],
) -> list[list[int]]:
    """Return the positions held after each chunk, where a unit's score does not change.

    Args:
        scores: Of each token.
        chunks: Tokens of each chunk; what is left of the text is read after the last eviction.
        budgets: Units that stay after each chunk.
        stabilizers: Newest units that stay after each chunk, as far as what is protected leaves room.
        pins: Start and end of tokens that all stay.
        shares: Start, end, and how many units stay at least.

    Returns:
        Ascending positions after each chunk, and with the rest of the text at last.
    """
    held: list[int] = []
    history, read = [], 0
    for size, most, newest in zip(chunks, budgets, stabilizers, strict=True):
        held += range(read, read + size)
        read += size
        stays = {token for token in held if any(start <= token < end for start, end in pins)}
        for start, end, units in shares:
            mine = [token for token in held if start <= token < end]
            mine.sort(key=lambda token: (token in stays, scores[token], token), reverse=True)
            stays |= set(mine[:units])
        assert len(stays) <= most
        stays |= set(held[len(held) - min(newest, most - len(stays)) :])
        others = sorted(
            (token for token in held if token not in stays), key=lambda token: (scores[token], token), reverse=True
        )
        held = sorted([*stays, *others[: max(0, most - len(stays))]])
        history.append(list(held))
    history.append([*held, *range(read, len(scores))])
    return history
