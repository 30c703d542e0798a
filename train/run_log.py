"""What a training run reports: log.jsonl, curves, and a progress bar or lines on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

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
        report_to: Names of what draws curves, see `RunOptions.trackers`.

    Raises:
        ValueError: If the log of an earlier run is damaged.
        OSError: If the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        steps: int,
        layers: tuple[int, ...],
        enabled: bool,
        report_to: Sequence[str] = ("tensorboard",),
    ) -> None:
        self.first_step, self.steps, self.layers, self.enabled = first_step, steps, layers, enabled
        self.started = self._stepped = time.perf_counter()
        if not enabled:
            return
        from tqdm.auto import tqdm

        file = folder / LOG
        file.write_text("".join(records_until(file, first_step)), encoding="utf-8")
        self._file = file.open("a", encoding="utf-8")
        self._curves = [_CURVES[name](folder, first_step) for name in report_to]
        self._bar = tqdm(total=steps, initial=first_step, desc="training", unit="step", disable=None)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self._file.close()
            for curves in self._curves:
                curves.close()
            self._bar.close()

    def advance(self, step: int) -> None:
        """Move the progress bar; after the second step, which nothing delays, say how long all take."""
        if not self.enabled:
            return
        self._bar.update(step - self._bar.n)
        now = time.perf_counter()
        if step == self.first_step + 2 and step < self.steps:
            left = self._bar.format_interval((now - self._stepped) * (self.steps - step))
            self._bar.write(
                f"a step takes {now - self._stepped:.1f} s, all {self.steps:,} about {left} more", sys.stderr
            )
        self._stepped = now

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the mean losses, overlaps, learning rate and speed since the last record."""
        if not self.enabled:
            return
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        values = self._named(record)
        for curves in self._curves:
            curves.write(values, record["step"])
        self._show(record)

    def _named(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Return a record's numbers under the names of their curves."""
        values = {f"loss/{name}": record[name] for name in ("total", *OBJECTIVES, "smoothness") if name in record}
        values |= {f"overlap/{new}": record[name] for name, new in _OVERLAPS.items() if name in record}
        for layer, overlap in zip(self.layers, record.get("overlap_per_layer", ()), strict=False):
            values[f"overlap/layer_{layer:02d}"] = overlap
        evaluated = [f"eval_{name}" for name in ("total", *OBJECTIVES, "smoothness", "overlap")]
        values |= {name.replace("_", "/", 1): record[name] for name in evaluated if name in record}
        values |= {name.replace("_", "/", 1): record[name] for name in record if name.startswith("probe_")}
        return values | {f"run/{name}": record[name] for name in _RUN if name in record}

    def _show(self, record: Mapping[str, Any]) -> None:
        parts = [f"loss {record['total']:.4f}, overlap {record['overlap']:.3f}"] if "total" in record else []
        if "eval_overlap" in record:
            parts.append(f"held-out overlap {record['eval_overlap']:.3f}")
        parts += [f"probe {record[name]:.2f} nats" for name in sorted(record) if name.startswith("probe_nats")][:1]
        if not self._bar.disable:
            return self._bar.set_postfix_str(", ".join(parts))
        if "total" in record:
            parts.append(f"chance {record['chance_overlap']:.3f}, lr {record['learning_rate']:.2e}")
            parts.append(f"{record['tokens_per_second']:.0f} tokens/s, {self._left(record['step'])} left")
        sys.stderr.write(f"step {record['step']}/{self.steps}: {', '.join(parts)}\n")

    def _left(self, step: int) -> str:
        from tqdm import tqdm

        done = step - self.first_step
        return tqdm.format_interval((time.perf_counter() - self.started) / done * (self.steps - step)) if done else "?"


_OVERLAPS = {"overlap": "mean", "chance_overlap": "chance"}
_RUN = ("learning_rate", "gradient_norm", "clipped_share", "epoch", "tokens_per_second", "memory_bytes")


class _Curves(Protocol):
    def __init__(self, folder: Path, first_step: int) -> None: ...

    def write(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=first_step + 1)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _WandB:
    """Weights & Biases; what was interrupted and resumed are two runs of one group."""

    def __init__(self, folder: Path, first_step: int) -> None:
        import wandb

        try:
            self.run = wandb.init(dir=str(folder), group=folder.name, name=f"{folder.name}@{first_step}")
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())
            raise OSError(f"--report-to wandb: {reason}; log in, set WANDB_MODE=offline, or drop it") from error

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


_CURVES: dict[str, type[_Curves]] = {"tensorboard": _TensorBoard, "wandb": _WandB}


class Window:
    """Sums what happened since the last record, on the device, so that steps need not wait for each other."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.sums: torch.Tensor | None = None
        self.gradients = torch.zeros(3, device=self.device)
        self.rows = self.tokens = 0
        self.chance = 0.0
        self.started = time.perf_counter()

    def add(self, values: torch.Tensor, tokens: int, chance: float) -> None:
        """Add one row's values, its tokens, and the overlap that chance would have on it."""
        self.sums = values if self.sums is None else self.sums + values
        self.rows, self.tokens, self.chance = self.rows + 1, self.tokens + tokens, self.chance + chance

    def add_step(self, norm: torch.Tensor, clipped: torch.Tensor) -> None:
        """Add a step's gradient norm and the share that is clipped, unless float16 overflowed and the step is none."""
        finite = norm.isfinite()
        zero = torch.zeros_like(norm)
        self.gradients += torch.stack([norm.where(finite, zero), clipped.where(finite, zero), finite.float()])

    def seconds(self) -> float:
        """Return the time since the last record."""
        return time.perf_counter() - self.started


def peak_memory(device: torch.device) -> int:
    """Return the most bytes used so far: allocated on a CUDA device, resident in the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()


def records_until(file: Path, step: int) -> list[str]:
    """Return the lines of a log up to a step; none if it is not there. A line that was cut off is left out.

    Raises:
        ValueError: If a line is not a record.
        OSError: If it cannot be read.
    """
    if not step or not file.exists():
        return []
    kept = []
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            continue
        try:
            logged = json.loads(line)["step"]
            if isinstance(logged, bool) or not isinstance(logged, int):
                raise TypeError(f"its step is {logged!r}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise ValueError(
                f"--resume: {file} line {number} is not a record of a training log ({reason}); mend or delete the file"
            ) from None
        if logged <= step:
            kept.append(line.decode("utf-8"))
    return kept
