"""What the server asks of whatever writes answers: hold a prefix, take a question, hand over token after token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

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


class Engine(Protocol):
    """What writes answers, many at once, in memory that was planned at the start.

    All methods may be called from any thread.
    """

    @property
    def longest(self) -> int:
        """Most positions that one answer can have: `Asked.length` may not be larger."""
        ...

    @property
    def planned_bytes(self) -> int:
        """Bytes of keys and values that the engine never exceeds."""
        ...

    @property
    def running(self) -> bool:
        """Whether it answers: it was started, and has not ended since."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of keys and values that contexts and running answers take now."""
        ...

    def start(self) -> None:
        """Begin to answer; returns when the engine is ready.

        Raises:
            ValueError: If the engine cannot do what the options say.
            OSError: If it does not start.
        """
        ...

    def stop(self) -> None:
        """End all answers, each with an error, and give back memory and threads; idempotent."""
        ...

    def hold(self, prefix: Prefix) -> None:
        """Take in a prefix, unless it is there; the one that was asked least recently makes room for it.

        Raises:
            NoRoom: If running answers use all there is.
            NotRunning: If the engine does not run.
            ValueError: If it could never be held.
        """
        ...

    def ask(self, asked: Asked, on_step: Callable[[Step], None]) -> Callable[[], None]:
        """Write an answer; returns at once. The prefix is taken in first, as by `hold`, and stays while it is asked.

        Args:
            asked: What to answer.
            on_step: Called for each token, from a thread of the engine; must return quickly. The last call has a
                `finish`.

        Returns:
            What cancels the answer, idempotent: its memory is given back, and `on_step` is not called again, but for a
            call that is under way.

        Raises:
            NoRoom: If running answers use all there is.
            NotRunning: If the engine does not run.
            ValueError: If it could never be answered, as `asked.length` is above `longest`.
        """
        ...
