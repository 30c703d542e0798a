"""The server's own engine: transformers' continuous batching in this process, with contexts as shared pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from locret.engines.prefix import Prefix
from locret.engines.transformers import NoRoom as PagesTaken
from locret.engines.transformers import NotRunning as Stopped
from locret.engines.transformers import PagedContexts, Sampling, Written
from locret.infer.serve.engine import Asked, NoRoom, NotRunning, Step
from locret.infer.serve.turns import Turns, told


class TransformersEngine:
    """What writes answers, many at once, in memory that was planned at the start: `PagedContexts`.

    All methods may be called from any thread.

    Args:
        model: The backbone that contexts are read with; reading goes on beside the answers.
        turns: The turns of readers, who give way to answers; None: nobody reads beside.
        kv_bytes: Memory for contexts and answers.
        page_size: Units of one page.
        max_batch_tokens: Tokens that one forward pass takes.
        max_requests: Answers that one forward pass continues.

    Raises:
        ValueError: If a setting is impossible, or the backbone is none whose contexts are ordinary prefixes.
    """

    def __init__(
        self,
        model: nn.Module,
        turns: Turns | None = None,
        *,
        kv_bytes: int,
        page_size: int = 32,
        max_batch_tokens: int = 512,
        max_requests: int = 128,
    ) -> None:
        self._contexts = PagedContexts(
            model,
            kv_bytes=kv_bytes,
            page_size=page_size,
            max_batch_tokens=max_batch_tokens,
            max_requests=max_requests,
        )
        self._turns = Turns() if turns is None else turns
        self.longest = self._contexts.longest
        """Most positions that one answer can have: `Asked.length` may not be larger."""

    @property
    def planned_bytes(self) -> int:
        """Bytes that are allocated at the start and never exceeded."""
        return self._contexts.planned_bytes

    @property
    def running(self) -> bool:
        """Whether it answers."""
        return self._contexts.running

    @property
    def used_bytes(self) -> int:
        """Bytes of keys and values that contexts and running answers take now."""
        return self._contexts.used_bytes

    def start(self) -> None:
        """Allocate the pages and begin to answer; returns when the engine is ready.

        Raises:
            ValueError: If the backbone cannot be run like that.
        """
        self._contexts.start()

    def stop(self) -> None:
        """End all answers, each with an error, and give back memory and threads; idempotent."""
        self._contexts.stop()

    def hold(self, prefix: Prefix) -> None:
        """Take in a prefix, unless it is there; the one that was asked least recently makes room for it.

        Raises:
            NoRoom: If running answers use all there is.
            NotRunning: If the engine does not run.
            ValueError: If it could never be held.
        """
        with _told_apart():
            self._contexts.hold(prefix)

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
        return told(self._turns, lambda step: self._submit(asked, step), on_step)

    def _submit(self, asked: Asked, on_step: Callable[[Step], None]) -> Callable[[], None]:
        def on_token(written: Written) -> None:
            on_step(Step(**vars(written)))

        sampling = Sampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            seed=asked.seed,
            top_logprobs=asked.top_logprobs,
        )
        with _told_apart():
            return self._contexts.submit(
                asked.ids,
                asked.prefix,
                max_new_tokens=asked.max_new_tokens,
                on_token=on_token,
                end_ids=asked.end_ids,
                sampling=sampling,
            )


@contextmanager
def _told_apart() -> Iterator[None]:
    """Raise errors of the server's own for what is no fault of a question."""
    try:
        yield
    except PagesTaken as error:
        raise NoRoom(str(error)) from error
    except Stopped as error:
        raise NotRunning(str(error)) from error
