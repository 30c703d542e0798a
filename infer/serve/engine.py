"""The server's engine: transformers' continuous batching in this process, beside which texts are read in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from locret.engines.prefix import Prefix
from locret.engines.transformers import PagedContexts, Sampling, Written
from locret.infer.serve.turns import Turns


class Engine(PagedContexts):
    """`PagedContexts` whose answers the readers give way to."""

    def __init__(self, model: nn.Module, turns: Turns, *, kv_bytes: int) -> None:
        super().__init__(model, kv_bytes=kv_bytes)
        self._turns = turns

    def submit(
        self,
        ids: Sequence[int],
        prefix: Prefix | None = None,
        *,
        max_new_tokens: int,
        on_token: Callable[[Written], None],
        end_ids: Iterable[int] | None = None,
        sampling: Sampling | None = None,
    ) -> Callable[[], None]:
        """Begin an answer, and let the readers know of it and of each of its tokens; as in `PagedContexts`."""
        turns, answer = self._turns, self._turns.answering()

        def told(written: Written) -> None:
            (turns.stepped if written.finish is None else turns.ended)(answer)
            on_token(written)

        try:
            cancel = super().submit(
                ids, prefix, max_new_tokens=max_new_tokens, on_token=told, end_ids=end_ids, sampling=sampling
            )
        except BaseException:
            turns.ended(answer)
            raise

        def cancelled() -> None:
            cancel()
            turns.ended(answer)

        return cancelled
