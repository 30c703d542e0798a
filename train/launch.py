"""Settings of the launcher (`accelerate launch`, or the environment) that would change a run, or do nothing here.

The options of `locret-train` say everything about a run, and `run.json` records them. A variable that overrides one of
them, or that is read by nobody, is refused; one that agrees is fine.
"""

from __future__ import annotations

import os

from locret.distributed.ranks import check_launcher

_OFF = ("", "no", "false", "0")
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "LOCAL_RANK")


def check(gradient_accumulation: int) -> None:
    """Refuse what accelerate's launcher asks for and this command does not do.

    Raises:
        ValueError: Naming variable and value, and the way out.
    """
    check_launcher()
    for name, way_out in (
        ("ACCELERATE_DYNAMO_BACKEND", "launch without it"),
        ("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "launch without it"),
        ("ACCELERATE_GRADIENT_CLIPPING", "unset it and use --clip and --clip-limit"),
    ):
        if os.environ.get(name, "").lower() not in _OFF:
            raise ValueError(f"{name}={os.environ[name]} has no effect here; {way_out}")
    _check_same("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", str(gradient_accumulation), "--gradient-accumulation")
    # Its launcher starts several CPU processes through MPI only; without, one runs, and the addresses are left over.
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("MASTER_PORT")
    if launched and not any(os.environ.get(name) for name in _SIZES):
        raise ValueError(
            f"MASTER_PORT={os.environ['MASTER_PORT']} says that several processes were asked for, but only one was "
            "started: accelerate launch needs MPI to start more on CPUs; use torchrun --nproc-per-node N -m "
            "locret.train.command, or --num_processes 1"
        )


def check_precision(precision: str) -> None:
    """Refuse another mixed precision than the options came to; "no" is what the launcher says when it was not asked.

    Raises:
        ValueError: Naming variable and value, and the way out.
    """
    if os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() != "no":
        _check_same("ACCELERATE_MIXED_PRECISION", precision, "--mixed-precision")


def is_main_process() -> bool:
    """Return whether this is the first process of those that a launcher started, by the environment alone."""
    return next((os.environ[name] for name in _RANKS if os.environ.get(name)), "0") == "0"


def _check_same(name: str, ours: str, flag: str) -> None:
    given = os.environ.get(name)
    if given and given.strip().lower() != ours:
        raise ValueError(f"{name}={given} is not what {flag} says ({ours}); unset it, or launch with {flag} {given}")
