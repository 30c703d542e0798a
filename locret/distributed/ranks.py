"""The processes of a run, as torchrun, `accelerate launch` or `deepspeed` start them; alone, nothing changes.

Where one of them dies, the launcher ends the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from locret.cli.command import FAILURE, USAGE_ERROR
from locret.cli.options import flag_of

if TYPE_CHECKING:
    import torch

_JOINING = timedelta(minutes=10)
_PATIENCE = timedelta(days=30)
"""How long processes wait for each other: one may have far longer rows than the others."""
_ENGINES = {"DEEPSPEED": "zero3", "FSDP": "fsdp", "MEGATRON_LM": "fsdp", "PARALLELISM_CONFIG": "tp"}
"""What `accelerate launch` asks for by a variable ACCELERATE_USE_..., and the option that spreads the backbone here."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number of this process on its machine: its CUDA device."""
    data_rank: int = 0
    """Number of this process among those that have rows of their own."""
    data_size: int = 1
    """Into how many parts rows are dealt out; 1 where all processes work on the same ones."""
    shard: str | None = None
    """How the backbone is spread over the processes; None: each has a whole one."""

    @property
    def is_main(self) -> bool:
        """Whether this process keeps the output folder and reports."""
        return self.rank == 0

    def share(self, items: Sequence[_T]) -> Sequence[_T]:
        """Return the items that this process takes: every n-th, so that long and short ones are spread evenly."""
        return items[self.data_rank :: self.data_size]

    def under(self, shard: str | None) -> Ranks:
        """Return this process as one of a run that spreads its backbone so."""
        rows = (0, 1) if shard == "tp" else (self.rank, self.size)  # by tensor parallelism all work on the same ones
        return replace(self, shard=shard, data_rank=rows[0], data_size=rows[1])

    def own_device(self, device: torch.device) -> torch.device:
        """Return the device of this process: CUDA devices are dealt out to the processes of a machine."""
        if self.size > 1 and device.type == "cuda" and device.index is None:
            import torch

            return torch.device("cuda", self.local_rank % torch.cuda.device_count())
        return device

    def gather(self, value: Any) -> list[Any]:
        """Return what every process gave, by rank."""
        if self.size == 1:
            return [value]
        import torch.distributed

        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value)
        return found

    @contextmanager
    def together(self, *, on_backbone: bool = False) -> Iterator[None]:
        """Take a step in every process and wait for all; what fails in one ends all of them, and is said once.

        Args:
            on_backbone: Whether the step loads or runs the backbone. Where that is sharded, the others wait for a
                process that fails in the middle of it, so it must end, and they with it.
        """
        if on_backbone and self.shard is not None:
            yield
            self.gather(None)
            return
        failure: Exception | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            failure = error
        if self.size == 1:
            if failure is not None:
                raise failure
            return
        codes = self.gather(0 if failure is None else FAILURE if isinstance(failure, OSError) else USAGE_ERROR)
        failed = [rank for rank, code in enumerate(codes) if code]
        if failure is not None and failed[0] == self.rank:
            raise failure
        if failed:
            raise SystemExit(codes[failed[0]])  # one of those that failed says why

    def agree(self, facts: Mapping[str, Any], way_out: str = "start all processes with the same options") -> None:
        """Make sure that all processes work on the same run."""
        given = self.gather({name: repr(value) for name, value in facts.items()})
        for rank, other in enumerate(given):
            for name in dict.fromkeys([*given[0], *other]):
                first, second = (one.get(name, "not at all") for one in (given[0], other))
                if first != second:
                    raise ValueError(f"{name} is {first} in process 0 and {second} in process {rank}; {way_out}")

    def agree_on_options(self, groups: Iterable[Any]) -> None:
        """Make sure that all processes were given the same options, or would wait for each other for ever."""
        with self.together():
            self.agree({flag_of(name): value for one in groups for name, value in asdict(one).items()})


def launched() -> tuple[int, int, int]:
    """Return rank, size and local rank as the launcher has put them into the environment; (0, 1, 0) without one."""
    rank, size, local = (os.environ.get(n, d) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    try:
        return int(rank), int(size), int(local)
    except ValueError as error:
        raise _unreachable(rank, size, error) from error


def check_launcher() -> None:
    """Refuse what a launcher was asked for and would not be done."""
    for name, shard in ((f"ACCELERATE_USE_{engine}", shard) for engine, shard in _ENGINES.items()):
        if os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on", "y", "t"):
            raise ValueError(
                f"{name}={os.environ[name]}: heads are small and the backbone is frozen, so neither is wrapped; launch "
                f"without it, and add --shard {shard} to spread the backbone over the processes"
            )


def _unreachable(rank: object, size: object, error: Exception) -> OSError:
    return OSError(
        f"process {rank} of {size} cannot reach the others ({str(error).splitlines()[0]}); start them with torchrun or "
        "accelerate launch"
    )


def join() -> None:
    """Join the process group that the launcher has made room for, unless this process has."""
    import torch
    from torch import distributed
    from torch.distributed.rendezvous import rendezvous

    if distributed.is_initialized():
        return
    rank, size, local_rank = launched()
    on_gpus = torch.cuda.is_available() and distributed.is_nccl_available()
    if on_gpus:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    try:
        store, rank, size = next(rendezvous("env://", rank, size, timeout=_JOINING))
        # What processes tell each other is on the CPU, weights are on the GPUs.
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:  # ValueError: variables that are missing
        raise _unreachable(rank, size, error) from error


@contextmanager
def joined(way_out: str = "see what it says, and start all of them again") -> Iterator[Ranks]:
    """Find the other processes that a launcher has started, and take leave of them at the end."""
    check_launcher()
    rank, size, local_rank = launched()
    if size == 1:
        yield Ranks()
        return
    join()
    import torch.distributed

    try:
        yield Ranks(rank, size, local_rank, rank, size)
    except RuntimeError as error:
        # Gloo's errors have no class of their own.
        if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
            raise OSError(f"another of {size} processes has ended early; {way_out}") from error
        raise
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
