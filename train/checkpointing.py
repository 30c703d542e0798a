"""Checkpoints of a training run: weights that `from_pretrained` reads, and the state to go on bit by bit.

checkpoint-<step>/  config.json and model.safetensors (heads, or the embedded backbone), state.pt (optimizer, schedule,
                    random numbers, position in the data, resolved options; plain types and tensors, read with
                    weights_only)
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from locret.heads import checkpoint

STATE = "state.pt"
_NAME = re.compile(r"checkpoint-(\d+)")


def save(folder: Path, step: int, write_weights: Callable[[Path], None], state: Mapping[str, Any], keep: int) -> Path:
    """Write `checkpoint-<step>`, whole or not at all, then delete all but the newest `keep`.

    `write_weights` is given the folder and writes what has been trained; `state` is all the rest.

    Raises:
        OSError: If it cannot be written; the message names it.
    """
    target = folder / f"checkpoint-{step}"
    with checkpoint.replacing(target) as staging:
        write_weights(staging)
        try:
            torch.save({"step": step, "random": _random_state(), **state}, staging / STATE)
        except RuntimeError as error:  # torch's zip writer hides the operating system's error
            raise OSError(str(error).splitlines()[0]) from error
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return target


def complete(folder: Path) -> list[Path]:
    """Return the folder's checkpoints, oldest first. A checkpoint appears under its name only when it is whole."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and (path / STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def find(resume: str, folder: Path) -> Path | None:
    """Return the checkpoint that `--resume` means; None if it is "auto" and there is none yet.

    Raises:
        ValueError: If a path is not a checkpoint.
    """
    if resume == "auto":
        found = complete(folder)
        return found[-1] if found else None
    path = Path(resume).expanduser()
    if not (path / STATE).is_file():
        raise ValueError(
            f"--resume {resume} is not a checkpoint (it has no {STATE}); give a folder such as OUTPUT/checkpoint-50, "
            "or auto for the newest in the output folder"
        )
    return path


def read(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, on the CPU.

    Raises:
        ValueError: If the file is damaged.
    """
    try:
        return torch.load(path / STATE, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (RuntimeError, EOFError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"--resume {path}: {STATE} is damaged ({reason}); resume from another checkpoint") from error


def check_same(stored: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    """Refuse to go on with other options than the checkpoint's.

    Raises:
        ValueError: Naming every option that differs, with both values.
    """
    differences = [
        f"--{name.replace('_', '-')} was {stored.get(name)!r} and is now {current.get(name)!r}"
        for name in sorted({*stored, *current})
        if stored.get(name) != current.get(name)
    ]
    if differences:
        raise ValueError(
            f"--resume {path}: {'; '.join(differences)}; use the options of that run, or start a new one "
            "(--init-from takes the heads alone)"
        )


def _random_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set the random generators back to a checkpoint's."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
