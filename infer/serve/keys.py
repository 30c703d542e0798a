"""Keys of contexts without a name: digests of what they follow, their token ids, and what is protected of them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from locret.infer.serve.entry import Entry
from locret.policy.protection import Span, clipped


def shrunk_key(entry: Entry, budget: int) -> str:
    """Return the key of a context with so many of another's units."""
    # Files of earlier versions, under the digest of other words, do not say where the text ends.
    return digest(entry.key, f"shrunk to {budget}, with its end", [])


def digest(base: str, what: str, ids: Sequence[int], protected: Sequence[Span] = ()) -> str:
    """Return the key of what was made of ids after `base`."""
    return next(key for _, key in digests(base, what, ids, [len(ids)], protected))


def digests(
    base: str, what: str, ids: Sequence[int], counts: Sequence[int], protected: Sequence[Span] = ()
) -> Iterator[tuple[int, str]]:
    """Yield for rising counts the digest of so many of the first ids and what is protected of them, in one pass."""
    total, done = hashlib.sha256(f"{base} {what} ".encode()), 0
    for count in counts:
        total.update(array("Q", ids[done:count]).tobytes())
        done, own = count, total.copy()
        if spans := clipped(protected, count):
            own.update(repr(sorted((one.start, one.end, str(one.share)) for one in spans)).encode())
        yield count, own.hexdigest()
