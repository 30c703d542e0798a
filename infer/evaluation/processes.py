"""The processes that share an evaluation, as `torchrun` or `accelerate launch` start them; alone, nothing changes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from locret.cli import FAILURE, USAGE_ERROR

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
    def joined(self) -> Iterator[None]:
        """Find the other processes, and take leave of them at the end.

        Raises:
            OSError: If one of them cannot be reached.
        """
        if self.count == 1:
            yield
            return
        from torch import distributed

        try:
            distributed.init_process_group("gloo", timeout=_PATIENCE)
        except (RuntimeError, ValueError) as error:  # ValueError: MASTER_ADDR or MASTER_PORT is not set
            raise OSError(
                f"process {self.rank} of {self.count} cannot reach the others ({str(error).splitlines()[0]}); start "
                "them with torchrun or accelerate launch"
            ) from error
        try:
            yield
        finally:
            distributed.destroy_process_group()

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
        from torch import distributed

        found: list[Any] = [None] * self.count
        try:
            distributed.all_gather_object(found, value)
        except RuntimeError as error:
            raise OSError(
                "another process of this evaluation has ended early; all answers so far are on disk, --resume goes on"
            ) from error
        return found


def from_environment(environment: Mapping[str, str] = os.environ) -> Processes:
    """Return which process this is, from the variables that launchers set.

    Raises:
        ValueError: If they are no numbers or contradict each other.
    """
    words = {name: environment.get(name, default) for name, default in (("WORLD_SIZE", "1"), ("RANK", "0"))}
    words["LOCAL_RANK"] = environment.get("LOCAL_RANK", words["RANK"])
    try:
        count, rank, local_rank = (int(word) for word in words.values())
    except ValueError:
        shown = ", ".join(f"{name}={word}" for name, word in words.items())
        raise ValueError(f"{shown}: not all are whole numbers; unset them or start with torchrun") from None
    if not 0 <= rank < count:
        raise ValueError(f"RANK={rank} is not within WORLD_SIZE={count}; unset both or start with torchrun")
    return Processes(rank, count, local_rank)
