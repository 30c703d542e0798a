"""One answer that the server's engine is to write, its tokens, and why it cannot be written now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from locret.engines.prefix import Prefix

Finish = Literal["stop", "length", "error"]


class NoRoom(Exception):
    """Running answers need all the memory there is: what was asked has to wait until one of them ends."""


class NotRunning(ValueError):
    """The engine has not been started, or has ended: nothing is wrong with what was asked."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One answer that is to be written.

    Temperature, top_p and top_k mean what they mean in transformers; with a temperature of 0 the likeliest token is
    taken and the others have no effect.
    """

    ids: tuple[int, ...]
    """Token ids that follow the prefix, at least one; without a prefix the whole prompt."""
    prefix: Prefix | None = None
    """What has been read before."""
    max_new_tokens: int
    """Longest answer in tokens, the one that ends it included."""
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """Draw from this many likeliest tokens; 0 is all."""
    seed: int | None = None
    """Equal seeds give equal answers whatever else is answered meanwhile; None draws another one each time."""
    top_logprobs: int | None = None
    """Likeliest tokens that each step names with their log-probabilities, besides the chosen one's; None names none.
    Log-probabilities are those of the backbone: before temperature, top_p and top_k."""

    @property
    def units(self) -> int:
        """Positions that the prefix takes."""
        return 0 if self.prefix is None else self.prefix.units

    @property
    def length(self) -> int:
        """Positions that the answer may need in all."""
        return self.units + len(self.ids) + self.max_new_tokens


@dataclass(frozen=True, kw_only=True)
class Step:
    """One token of an answer, or why there are no more."""

    token: int | None
    """The new token, also where it is one that ends the answer; None with an error."""
    finish: Finish | None = None
    """Set in the last step: an end id was written, `max_new_tokens` were, or something failed."""
    logprob: float | None = None
    """Natural log-probability of the token, if it was asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities, the likeliest one first."""
    message: str = ""
    """What failed, in one sentence."""
