"""What a training run reports: log.jsonl, curves of accelerate's trackers, and lines on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from locret.train.run_folder import LOG

if TYPE_CHECKING:
    from locret.train.trainer import Trainer


class RunLog:
    """Writes one record per logged step. On other processes than the main one it does nothing.

    Args:
        trainer: What is trained, after the steps done before; later records of an interrupted run are dropped.

    Raises:
        ValueError: If the log of an earlier run is damaged.
        OSError: If the folder cannot be written.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.first_step, self.steps, self.layers = trainer.step, trainer.training.optimizer.steps, trainer.heads.layers
        accelerator = self._accelerator = trainer.accelerator
        self.started, self.enabled, folder = time.perf_counter(), accelerator.is_main_process, trainer.folder
        if not self.enabled:
            return
        file, first_step = folder / LOG, self.first_step
        file.write_text("".join(records_until(file, first_step)), encoding="utf-8")
        self._file = file.open("a", encoding="utf-8")
        wandb = {"dir": str(folder), "group": folder.name, "name": f"{folder.name}@{first_step}"}
        # What was interrupted and resumed is one curve, and two runs of one group.
        accelerator.init_trackers("locret", init_kwargs={"tensorboard": {"purge_step": first_step + 1}, "wandb": wandb})

    def close(self) -> None:
        """Close the file."""
        if self.enabled:
            self._file.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the mean losses, overlaps, learning rate and speed since the last record."""
        if not self.enabled:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        values = {name: one for name, one in record.items() if isinstance(one, float | int) and name != "step"}
        layers = zip(self.layers, record.get("overlap_per_layer", ()), strict=False)
        values |= {f"overlap/layer_{layer:02d}": overlap for layer, overlap in layers}
        self._accelerator.log(values, step=record["step"])
        self._show(record)
        if record["step"] == self.first_step:
            self.started = time.perf_counter()  # what was measured before the first step says nothing of later ones

    def _show(self, record: Mapping[str, Any]) -> None:
        parts = []
        if "total" in record:
            parts.append(f"loss {record['total']:.4f}, overlap {record['overlap']:.3f}")
            parts.append(f"chance {record['chance_overlap']:.3f}, lr {record['learning_rate']:.2e}")
            parts.append(f"{record['tokens_per_second']:.0f} tokens/s, {self._left(record['step'])} left")
        if "eval_overlap" in record:
            parts.append(f"held-out overlap {record['eval_overlap']:.3f}")
        sys.stderr.write(f"step {record['step']}/{self.steps}: {', '.join(parts)}\n")

    def _left(self, step: int) -> str:
        done = step - self.first_step
        rate = (time.perf_counter() - self.started) / done if done else 0.0
        return str(tqdm.format_interval(rate * (self.steps - step))) if done else "?"


class Window:
    """Sums what happened since the last record, on the device, so that steps need not wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self.sums: torch.Tensor | None = None
        self.gradients = torch.zeros(2, device=device)
        self.rows = self.tokens = 0
        self.chance = 0.0
        self.started = time.perf_counter()

    def add(self, values: torch.Tensor, tokens: int, chance: float) -> None:
        """Add one row's values, its tokens, and the overlap that chance would have on it."""
        self.sums = values if self.sums is None else self.sums + values
        self.rows, self.tokens, self.chance = self.rows + 1, self.tokens + tokens, self.chance + chance

    def add_step(self, norm: torch.Tensor) -> None:
        """Add a step's gradient norm, unless float16 overflowed and the step is none."""
        finite = norm.isfinite()
        self.gradients += torch.stack([norm.where(finite, torch.zeros_like(norm)), finite.float()])

    def seconds(self) -> float:
        return time.perf_counter() - self.started


def records_until(file: Path, step: int) -> list[str]:
    """Return the lines of a log up to a step; none if it is not there. A line that was cut off is left out."""
    try:
        text = file.read_bytes().decode("utf-8") if step and file.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [line for line in lines if int(json.loads(line)["step"]) <= step]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--resume: {file} is not a training log ({reason}); mend or delete the file") from None
