"""The processes that share an evaluation, as `torchrun` or `accelerate launch` start them; alone, nothing changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from locret.cli.command import FAILURE, USAGE_ERROR

_PATIENCE = timedelta(days=30)
"""How long processes wait for each other: one may have far longer prompts than the others."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Processes:
    """This process among those of the evaluation."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Number of this process on its machine: its CUDA device."""

    @property
    def is_main(self) -> bool:
        """Whether this process keeps the output folder and reports."""
        return self.rank == 0

    def share(self, items: Sequence[_T]) -> Sequence[_T]:
        """Return the items that this process takes: every n-th, so that long and short ones are spread evenly."""
        return items[self.rank :: self.count]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Take a step in every process and wait for all; what fails in one ends all of them, and is said once.

        Raises:
            SystemExit: If another process failed, which says why.
            OSError: If another process is gone.
        """
        failure: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            failure = error
        if self.count == 1:
            if failure is not None:
                raise failure
            return
        codes = self._gather(0 if failure is None else FAILURE if isinstance(failure, OSError) else USAGE_ERROR)
        failed = [rank for rank, code in enumerate(codes) if code]
        if failure is not None and failed[0] == self.rank:
            raise failure
        if failed:
            raise SystemExit(codes[failed[0]])

    def _gather(self, value: Any) -> list[Any]:
        """Return what every process gave, by rank."""
        from accelerate.utils import gather_object

        try:
            return gather_object([value])  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise OSError(
                "another process of this evaluation has ended early; all answers so far are on disk, --resume goes on"
            ) from error


@contextmanager
def joined() -> Iterator[Processes]:
    """Find the other processes that a launcher has started, and take leave of them at the end.

    Raises:
        OSError: If one of them cannot be reached.
    """
    rank, count = (os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if count == "1":
        yield Processes()
        return
    from accelerate import PartialState

    try:
        # Processes only tell each other how they are; what they compute stays on the device that --device names.
        state = PartialState(cpu=True, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:  # ValueError: variables that are missing, or no numbers
        raise OSError(
            f"process {rank} of {count} cannot reach the others ({str(error).splitlines()[0]}); start them with "
            "torchrun or accelerate launch"
        ) from error
    try:
        yield Processes(state.process_index, state.num_processes, state.local_process_index)
    finally:
        state.destroy_process_group()
