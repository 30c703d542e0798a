"""Checkpoints of a training run: weights that `from_pretrained` reads, and the state to go on bit by bit.

checkpoint-<step>/  config.json and model.safetensors (heads), state.pt (optimizer, schedule, position in the data,
                    resolved options; plain types and tensors, read with weights_only)

A step draws no random numbers: the order of the rows follows from the seed and their number, fresh heads from the seed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from locret.heads import checkpoint
from locret.heads.heads import RetainingHeads
from locret.train.resumed import AUTO, STATE

_NAME = re.compile(r"checkpoint-\d+")


def save(folder: Path, step: int, heads: RetainingHeads, state: Mapping[str, Any], keep: int) -> None:
    """Write `checkpoint-<step>`, whole or not at all, then delete all but the newest `keep`."""
    with checkpoint.replacing(folder / f"checkpoint-{step}") as staging:
        checkpoint.write(staging, heads.config, heads.state_dict())
        try:
            torch.save({"step": step, **state}, staging / STATE)
        except RuntimeError as error:  # torch's zip writer hides the operating system's error
            raise OSError(str(error).splitlines()[0]) from error
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)


def complete(folder: Path) -> list[Path]:
    """Return the folder's checkpoints, oldest first. A checkpoint appears under its name only when it is whole."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and (path / STATE).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def find(resume: str, folder: Path) -> Path | None:
    """Return the newest checkpoint of a run; None if `--resume` is "auto" and there is none yet."""
    found = complete(folder)
    if not found and resume != AUTO:
        raise ValueError(f"--resume {resume} holds no checkpoint such as checkpoint-50; start anew with --overwrite")
    return found[-1] if found else None


def read(path: Path) -> dict[str, Any]:
    with intact(path):
        return dict(torch.load(path / STATE, map_location="cpu", weights_only=True))


@contextmanager
def intact(path: Path, file: str = STATE) -> Iterator[None]:
    """Say that a file of a checkpoint is damaged, whatever reading it raises inside the block."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # what a damaged pickle, and values from it, can raise has no end
        reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
        raise ValueError(
            f"--resume {path}: {file} is damaged ({reason[:200].rstrip('.')}); resume from another checkpoint"
        ) from error


def check_same(stored: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    """Refuse to go on with other options than the checkpoint's; there may be more steps."""
    # Not an option of its own: fewer processes do the same with more accumulation.
    called = {"rows_per_step": "rows per step (processes times --gradient-accumulation)"}
    differences = []
    for name in sorted({*stored, *current}):
        before, now = stored.get(name), current.get(name)
        longer = name == "steps" and isinstance(before, int) and now > before  # type: ignore[operator]
        if before != now and not longer:
            differences.append(f"{called.get(name) or '--' + name.replace('_', '-')} was {before!r} and is now {now!r}")
    if differences:
        raise ValueError(
            f"--resume {path}: {'; '.join(differences)}; use the options of that run, or start a new one "
            "(--init-from takes the heads alone)"
        )
