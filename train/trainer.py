"""The training loop: one-pass steps, the optimizer, checkpoints, logs and a clean stop on a signal.

accelerate gives the device, autocast, loss scaling, gradient accumulation and the processes. The heads are not wrapped
for distribution: their backward passes run inside the backbone's forward, where a wrapper's hooks would exchange
gradients layer by layer and row by row. They are averaged over the processes once per optimizer step instead, so k
processes with one row each do what one process does with k accumulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import get_linear_schedule_with_warmup

from locret.backbone.passes import in_step
from locret.base import interrupts
from locret.environment import peak_resident_bytes
from locret.heads.heads import RetainingHeads
from locret.train import checkpointing
from locret.train.loss import chance_overlap
from locret.train.run_log import RunLog, Window
from locret.train.step import StepResult, train_step
from locret.train.validation import eval_record

if TYPE_CHECKING:
    from accelerate import Accelerator

    from locret.data.training.stream import TrainingExample
    from locret.train.training_run import TrainingRun


@dataclass(eq=False)
class Trainer:
    """Trains heads on a frozen backbone."""

    training: TrainingRun
    """The run, with its rows open and its output folder there."""
    model: nn.Module
    """The backbone, frozen, in evaluation mode, on the accelerator's device."""
    heads: RetainingHeads
    """On the same device."""
    accelerator: Accelerator
    """Made with the mixed precision and gradient accumulation that the options say."""
    config: Mapping[str, Any]
    """The options that must not change when the run is resumed; stored with every checkpoint."""

    def __post_init__(self) -> None:
        self._ranks = self.training.ranks
        self.stream, self.held_out, self.folder = self.training.stream, self.training.held_out, self.training.folder
        self.step = self.rows = self.tokens = 0
        self.learning_rate = 0.0
        self.last_record: dict[str, Any] = {}
        self.before: list[float] = []
        """Overlap of each held-out row before the first step; without such rows, that of the first step."""
        o, parameters = self.training.optimizer, list(self.heads.parameters())
        how: dict[str, Any] = {"lr": o.lr, "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay}
        how["fused"] = parameters[0].device.type in ("cuda", "cpu") or None  # one kernel, where PyTorch has one
        adamw = torch.optim.AdamW(parameters, **how)
        self.scheduler = get_linear_schedule_with_warmup(adamw, o.warmup, o.steps)
        self.optimizer = self.accelerator.prepare(adamw)
        self.window = Window(self.accelerator.device)

    def resume(self, path: Path, state: Mapping[str, Any]) -> None:
        self.stream.restore(state["stream"])
        saved = RetainingHeads.from_pretrained(path)
        with checkpointing.intact(path, "model.safetensors"):
            self.heads.load_state_dict(saved.state_dict())
        with checkpointing.intact(path):
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            if self.accelerator.scaler is not None and state["scaler"] is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            self.step, self.rows, self.tokens = (int(state[name]) for name in ("step", "rows", "tokens"))
            self.last_record, self.before = dict(state["record"]), [float(value) for value in state["before"]]
        # The learning rate of the step to come: with more steps than before, the schedule is another one.
        (base,), (at,) = self.scheduler.base_lrs, self.scheduler.lr_lambdas
        self.optimizer.param_groups[0]["lr"] = rate = base * at(self.step)
        self.scheduler.last_epoch, self.scheduler._last_lr = self.step, [rate]

    def train(self) -> tuple[int, dict[str, Any]]:
        """Train to the last step, or until SIGINT or SIGTERM.

        Returns:
            The signal that ended the run (0: it is finished), and the last log record.
        """
        steps = self.training.optimizer.steps
        with (
            interrupts.noted(*interrupts.SIGNALS) as received,
            closing(RunLog(self)) as log,
        ):
            if not self.step and self.held_out:
                before = self._evaluate()
                self.before = before["eval_overlap_per_row"]
                log.write({"step": 0, **before})
            self.window = Window(self.accelerator.device)
            while self.step < steps:
                self._optimizer_step()
                stopped = max(self._ranks.gather(received[0] if received else 0))  # all stop after the same step
                ends = bool(stopped) or self.step == steps
                evaluates = bool(self.held_out) and (self.step % self.training.eval_every == 0 or self.step == steps)
                saves = ends or self.step % self.training.run.save_every == 0
                if saves or evaluates or self.step % self.training.run.log_every == 0:
                    self.last_record = {"step": self.step, **self._record()}
                    if evaluates:
                        self.last_record |= self._evaluate()
                        self.window = Window(self.accelerator.device)
                    log.write(self.last_record)
                if saves:
                    self._save()
                if stopped:
                    return stopped, self.last_record
            return 0, self.last_record

    def _optimizer_step(self) -> None:
        # A step that the loss scaler skips (float16) counts as a step all the same, so that a run ends.
        for _ in range(self.training.optimizer.gradient_accumulation):
            with self.accelerator.accumulate(self.heads):
                self._row()
                if self.accelerator.sync_gradients:
                    self._average_and_clip()
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.learning_rate = float(self.scheduler.get_last_lr()[0])
        self.scheduler.step()
        self.step += 1
        if self.step == 1 and not self.held_out:
            assert self.window.sums is not None
            first = self.accelerator.reduce(self.window.sums[3:] / self.window.rows, reduction="mean")
            self.before = [float(first.mean())]  # type: ignore[union-attr]

    def _row(self) -> None:
        example = next(self.stream)
        result = self._read(example, self.accelerator.backward)
        losses = torch.stack([result.total, result.fit, result.smoothness])
        self.window.add(torch.cat([losses, result.overlap]), result.tokens, self._chance(example))

    def _read(self, example: TrainingExample, backward: Callable[[Tensor], None]) -> StepResult:
        with self.accelerator.autocast():
            return train_step(
                self.model,
                self.heads,
                example.prompt_ids,
                example.answer_ids,
                self.training.loss,
                max_prompt_tokens=self.training.data.max_prompt_tokens,
                asked=example.asked,
                backward=backward,
            )

    def _evaluate(self) -> dict[str, Any]:
        """Return the losses and overlaps on the held-out rows; the heads stay as they are."""
        values = torch.zeros(len(self.held_out), 4, device=self.accelerator.device)
        with in_step(self.model):  # some processes may have a row more than others
            for row in range(self.accelerator.process_index, len(self.held_out), self.accelerator.num_processes):
                result = self._read(self.held_out[row], lambda _: None)
                values[row] = torch.stack([result.total, result.fit, result.smoothness, result.overlap.mean()])
        shared: Tensor = self.accelerator.reduce(values, reduction="sum")  # type: ignore[assignment]
        return eval_record(shared.tolist(), self.training.loss.objective)

    def _chance(self, example: TrainingExample) -> float:
        return chance_overlap(min(example.prompt_ids.shape[-1], self.training.data.max_prompt_tokens))

    def chance(self) -> float:
        """Return the overlap of scores at random, on the held-out rows or else on those of the last record."""
        if not self.held_out:
            return float(self.last_record["chance_overlap"])
        return sum(map(self._chance, self.held_out)) / len(self.held_out)

    def _average_and_clip(self) -> None:
        parameters = list(self.heads.parameters())
        if self.accelerator.num_processes > 1:
            for parameter in parameters:
                parameter.grad = self.accelerator.reduce(parameter.grad, reduction="mean")  # type: ignore[assignment]
        self.accelerator.unscale_gradients()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm, limit = nn.utils.get_total_norm(gradients), self.training.optimizer.clip_limit
        if self.training.optimizer.clip == "value":
            nn.utils.clip_grad_value_(parameters, limit)
        elif self.training.optimizer.clip == "norm":
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        self.window.add_step(norm)

    def _record(self) -> dict[str, Any]:
        """Return the window's means over all processes, and begin a new window."""
        window, device = self.window, self.accelerator.device
        assert window.sums is not None
        own = window.sums.new_tensor([window.chance / window.rows, float(window.tokens)])
        values = torch.cat([window.sums / window.rows, own])
        means = self.accelerator.reduce(values, reduction="mean").tolist()
        if not math.isfinite(means[0]):
            saved = [path.name for path in checkpointing.complete(self.folder)]
            with self._ranks.together():  # all have the same mean, and one says so
                raise ValueError(
                    f"the loss is {means[0]} at step {self.step}; lower --lr or use --mixed-precision no "
                    f"(last checkpoint: {saved[-1] if saved else 'none'})"
                )
        processes = self.accelerator.num_processes
        tokens = round(means[-1] * processes)
        self.rows, self.tokens = self.rows + window.rows * processes, self.tokens + tokens
        norms, steps = window.gradients.tolist()
        record = {
            "total": means[0],
            self.training.loss.objective: means[1],
            "smoothness": means[2],
            "overlap": sum(means[3:-2]) / len(self.heads),
            "chance_overlap": means[-2],
            "overlap_per_layer": means[3:-2],
            "learning_rate": self.learning_rate,
            "gradient_norm": norms / max(steps, 1.0),
            "epoch": self.stream.epochs,
            "tokens_per_second": tokens / window.seconds(),
            "memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes(),
            "rows": self.rows,
            "tokens": self.tokens,
        }
        self.window = Window(device)
        return record

    def _save(self) -> None:
        with self._ranks.together():
            if self._ranks.is_main:
                scaler = self.accelerator.scaler
                state = {
                    "config": dict(self.config),
                    "optimizer": self.optimizer.state_dict(),
                    "scheduler": self.scheduler.state_dict(),
                    "scaler": None if scaler is None else scaler.state_dict(),
                    "stream": self.stream.state(),
                    "rows": self.rows,
                    "tokens": self.tokens,
                    "record": self.last_record,
                    "before": self.before,
                }
                checkpointing.save(self.folder, self.step, self.heads, state, self.training.run.keep_checkpoints)
