"""What a training run reports: log.jsonl, TensorBoard, and a progress bar or lines on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from locret.environment import peak_resident_bytes
from locret.train.run_folder import LOG, TENSORBOARD
from locret.train.training_options import OBJECTIVES


class RunLog:
    """Writes one record per logged step. On other processes than the main one it does nothing.

    Args:
        folder: The run's output folder.
        first_step: Steps done before; later records of an interrupted run are dropped from its log.
        steps: Steps in all.
        layers: Backbone layers that have a head, to name their curves.
        enabled: Whether this is the main process.

    Raises:
        OSError: If the folder cannot be written.
    """

    def __init__(self, folder: Path, first_step: int, steps: int, layers: tuple[int, ...], enabled: bool) -> None:
        self.steps, self.layers, self.enabled = steps, layers, enabled
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        file = folder / LOG
        kept = _records_until(file, first_step) if first_step and file.exists() else []
        file.write_text("".join(kept), encoding="utf-8")
        self._file = file.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder / TENSORBOARD), purge_step=first_step + 1)
        self._bar = tqdm(total=steps, initial=first_step, desc="training", unit="step", disable=None)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._file.close()
            self._board.close()
            self._bar.close()

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        if self.enabled:
            self._bar.update(step - self._bar.n)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the mean losses, overlaps, learning rate and speed since the last record."""
        if not self.enabled:
            return
        step = record["step"]
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name in ("total", *OBJECTIVES, "smoothness"):
            if name not in record:
                continue
            self._board.add_scalar(f"loss/{name}", record[name], step)
        self._board.add_scalar("overlap/mean", record["overlap"], step)
        for layer, overlap in zip(self.layers, record["overlap_per_layer"], strict=True):
            self._board.add_scalar(f"overlap/layer_{layer:02d}", overlap, step)
        for name in ("learning_rate", "tokens_per_second", "memory_bytes"):
            self._board.add_scalar(f"run/{name}", record[name], step)
        shown = f"loss {record['total']:.4f}, overlap {record['overlap']:.3f}"
        if self._bar.disable:
            rate = f"lr {record['learning_rate']:.2e}, {record['tokens_per_second']:.0f} tokens/s"
            sys.stderr.write(f"step {step}/{self.steps}: {shown}, {rate}\n")
        else:
            self._bar.set_postfix_str(shown)


class Window:
    """Sums what happened since the last record, on the device, so that steps need not wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.sums: torch.Tensor | None = None
        self.rows = self.tokens = 0
        self.started = time.perf_counter()

    def add(self, values: torch.Tensor, tokens: int) -> None:
        """Add one row's values and tokens."""
        self.sums = values if self.sums is None else self.sums + values
        self.rows, self.tokens = self.rows + 1, self.tokens + tokens

    def seconds(self) -> float:
        """Return the time since the last record."""
        return time.perf_counter() - self.started


def peak_memory(device: torch.device) -> int:
    """Return the most bytes used so far: allocated on a CUDA device, resident in the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def _records_until(file: Path, step: int) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
