"""One training run: its options, and what they resolve to, from the cheapest check to the trained heads.

Everything that can be wrong is checked before the weights are loaded, and the output folder is touched only when
training can begin.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import torch
from accelerate import Accelerator, PartialState

from locret.backbone.adapters import describe, unwrap
from locret.backbone.passes import in_step
from locret.conversation.head_shares import head_shares, measurable
from locret.data.training.stream import TrainingStream, load_rows
from locret.distributed.ranks import Ranks
from locret.heads.config import HeadsConfig, usual_width
from locret.heads.fingerprint import norm_fingerprint, weight_fingerprint
from locret.heads.heads import RetainingHeads
from locret.loading import device_of_source, load_config, load_model, load_tokenizer, resolve_dtype
from locret.loading.options import WeightOptions
from locret.loading.weights import label_of, plan_weights, sketch_of
from locret.train import checkpointing, resumed, run_folder
from locret.train.run_folder import label_notes, training_notes
from locret.train.run_log import records_until
from locret.train.trainer import Trainer
from locret.train.training_options import Options, RunOptions, plain
from locret.train.validation import comparison, hold_out, probe, steps_between, verdict

logger = logging.getLogger(__name__)

# What a resumed run may choose anew: none of it changes a step.
_PLACES = ("device_map", "max_memory", "shard", "shard_offload", "shard_offload_dir")
_FREE = (*_PLACES, "eval_every", *RunOptions.__dataclass_fields__)
_AUTOCAST = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "no"}


class TrainingRun:
    """One run of the command: its options, and what it resolves them to, step by step.

    Args:
        options: What `parse` returns.
        chosen: Names of the options that the user set.
        process: This one, of all that train together.
    """

    def __init__(self, options: Options, chosen: Iterable[str], process: PartialState) -> None:
        self.chosen = set(chosen)
        self.backbone, self.data, self.loss, self.optimizer, self.validation, self.run = options
        own = Ranks(process.process_index, process.num_processes, process.local_process_index)
        self.ranks = own.under(self.backbone.shard)
        self.options = plain(options)
        self.folder = Path(os.path.expanduser(str(self.run.output))).absolute()

    def check(self, device: torch.device) -> None:
        """Check the backbone's architecture, the heads to begin with, and that all of it fits into memory.

        Of a backbone on the Hub, the config alone is fetched.
        """
        self.config = load_config(self.backbone)
        self.shape = describe(self.config)
        self.device = device_of_source(self.backbone, device)
        self.dtype = resolve_dtype(self.backbone.dtype, self.config, self.device)
        sketch = sketch_of(self.config, self.dtype)
        describe(sketch)  # whose modules must be where heads look for them
        self.weights = plan_weights(self.backbone, self.config, self.device, self.dtype, sketch)
        self.precision = self.backbone.mixed_precision
        if self.precision == "auto":
            self.precision = _AUTOCAST.get(self.dtype, "no")  # type: ignore[assignment]
        if self.backbone.init_from is None:
            self._take_width(self.backbone.hidden_dim or usual_width(self.config))
        else:
            self._take_initial_heads(self.backbone.init_from)
        check_fits(self.plan(), self.device)

    def _take_initial_heads(self, name: str) -> None:
        heads = RetainingHeads.from_pretrained(name)
        heads.check_matches(self.config)
        if heads.config.gate is not None:
            raise ValueError(
                f"--init-from {name} holds a gate ({heads.config.gate['name']}), and gates are read here, not trained; "
                "leave it out"
            )
        asked, found = self.backbone.hidden_dim, heads.config.hidden_dim
        if "hidden_dim" in self.chosen and asked != found:
            raise ValueError(
                f"--hidden-dim {asked} differs from {found} of the heads in --init-from {name}; leave it out"
            )
        self._take_width(found)

    def _take_width(self, hidden_dim: int) -> None:
        self.backbone = replace(self.backbone, hidden_dim=hidden_dim)
        self.options["hidden_dim"] = hidden_dim

    def open_rows(self) -> None:
        """Open this process's training rows, which checks schema, template and first row, and settle the precision."""
        data, ranks = self.data, self.ranks
        self.stream = TrainingStream(
            load_rows(data.dataset, split=data.split, revision=data.dataset_revision),
            load_tokenizer(self.backbone),
            seed=self.optimizer.seed,
            max_length=self.shape.max_positions,
            min_tokens=data.min_tokens,
            max_tokens=data.max_tokens,
            template=data.template,
            answers=self.loss.answers,
            source=data.dataset,
            rank=ranks.data_rank,
            world=ranks.data_size,
        )
        self.stream.check_first()
        self._hold_out(self.optimizer.gradient_accumulation * ranks.data_size)

    def _hold_out(self, rows_per_step: int) -> None:
        asked, steps = self.validation.eval_rows, self.optimizer.steps
        self.held_out = hold_out(self.stream, asked, steps * rows_per_step)
        found = len(self.held_out)
        if asked:
            try:
                self.stream.check_first()
            except ValueError as error:
                raise ValueError(
                    f"--eval-rows {asked} leaves nothing to train on ({error}); lower it, or use --eval-rows 0"
                ) from None
        if not found and self.validation.eval_every is not None:
            raise ValueError(
                f"--eval-every {self.validation.eval_every} evaluates on held-out rows, and there are none; give "
                "--eval-rows 8, or drop it"
            )
        if not found and asked is None:
            logger.warning("no rows are left to hold out; --eval-rows N keeps N from being trained on, to evaluate on")
        self.options["eval_rows"] = found
        self.eval_every = steps_between(self.validation.eval_every, steps, rows_per_step, found)

    def plan(self) -> dict[str, int]:
        """Return bytes by purpose, of one process, and their total.

        A row takes besides what the backbone takes to read it, and the tensors of one layer's head.
        """
        weights = HeadsConfig.for_model(self.config, self.backbone.hidden_dim).num_weights
        plan = {"backbone": self.weights.on(self.device), "heads": weights * 4, "gradients": weights * 4}
        plan["optimizer"] = weights * 8
        return {**plan, "total": sum(plan.values())}

    def resolved_options(self) -> dict[str, Any]:
        """Return all options, with what "auto" came to."""
        dtype = str(self.dtype).removeprefix("torch.")
        warmup = self.optimizer.warmup
        return {**self.options, "dtype": dtype, "mixed_precision": self.precision, "warmup_steps": warmup}

    def fixed_options(self) -> dict[str, Any]:
        """Return the options that a resumed run must share."""
        fixed = {name: value for name, value in self.resolved_options().items() if name not in _FREE}
        rows_per_step = fixed.pop("gradient_accumulation") * self.ranks.data_size
        # Those that were not given are left out: earlier runs did not have them.
        weights = {field.name for field in fields(WeightOptions)}
        given = {name: value for name, value in self.backbone.given().items() if name not in _FREE}
        fixed = {name: value for name, value in fixed.items() if name not in weights}
        return {**fixed, **given, "rows_per_step": rows_per_step}

    def train(self, accelerator: Accelerator) -> dict[str, Any]:
        """Load the weights, train, save; return the final record."""
        own, fixed = self.ranks, self.fixed_options()
        with own.together():
            begun = None if self.run.resume is None else self._checkpoint(self.run.resume, fixed)
        model = load_model(self.backbone, self.config, self.device, self.dtype)
        self._check_head_shares(model)
        if self.backbone.init_from is None:
            heads = RetainingHeads.for_model(model, self.backbone.hidden_dim, seed=self.optimizer.seed)
        else:
            heads = RetainingHeads.from_pretrained(self.backbone.init_from)
            heads.check_matches(model)
        heads.requires_grad_(True)
        with own.together():
            own.agree({"the weights of --init-from": weight_fingerprint(heads)}, "give all processes the same heads")
        heads = heads.follow(model) if self.backbone.shard is None else heads.to(self.device)
        with own.together():
            if own.is_main:
                options, processes = self.resolved_options(), accelerator.num_processes
                record = run_folder.run_record(options, self.chosen, processes, str(accelerator.device))
                run_folder.prepare(self.folder, record, overwrite=self.run.overwrite)
        trainer = Trainer(self, model, heads, accelerator, fixed)
        with own.together():
            if begun is not None:
                trainer.resume(*begun)
        started, main = time.perf_counter(), accelerator.is_main_process
        try:
            stopped, record = trainer.train()
        finally:
            if main:
                self._report_dropped()
        summary = {**record, "dropped_rows": self.stream.report.counts, "stopped": stopped or None}
        summary["seconds"] = time.perf_counter() - started
        if not stopped:
            if main:
                summary |= self._outcome(trainer, record)
            with in_step(model):  # the first process alone measures the shares of the layers
                if main:
                    self._annotate(heads, model, summary).save_pretrained(self.folder)
        accelerator.wait_for_everyone()
        return summary

    def _checkpoint(self, resume: str, fixed: dict[str, Any]) -> tuple[Path, dict[str, Any]] | None:
        """Return the folder and the state of the checkpoint to go on from; None if there is none yet."""
        if (checkpoint := checkpointing.find(resume, self.folder)) is None:
            return None
        state = checkpointing.read(checkpoint)
        with checkpointing.intact(checkpoint):
            stored = {"eval_rows": 0, **resumed.without_retired(state["config"])}
        checkpointing.check_same(stored, fixed, checkpoint)
        records_until(self.folder / run_folder.LOG, state["step"])
        return checkpoint, state

    def _outcome(self, trainer: Trainer, record: dict[str, Any]) -> dict[str, Any]:
        """Return what the run came to, and warn where nothing was learned."""
        start = "untrained heads" if self.backbone.init_from is None else "the heads of --init-from"
        chance = trainer.chance()
        words, warning = comparison(record, trainer.before, chance, start)
        found: dict[str, Any] = {"overlap_before": mean(trainer.before), "chance_overlap": chance, "outcome": words}
        warnings = [warning]
        if self.backbone.shard is None and (probed := probe(trainer.model, self.stream.tokenizer, trainer.heads)):
            found |= probed
            words, warning = verdict(probed)
            found["outcome"] += f"; {words}"
            warnings.append(warning)
        for warning in filter(None, warnings):
            logger.warning(warning)
        return found

    def _report_dropped(self) -> None:
        report, held_out = self.stream.report, len(self.held_out)
        values = {"dataset": self.data.dataset, "rows": self.stream.size, "held_out": held_out, **report.to_dict()}
        run_folder.write_json(self.folder / run_folder.DROPPED, values)
        if report.counts:
            logger.warning("rows left out of %d read: %s (see %s)", report.read, report, run_folder.DROPPED)

    def _measures_shares(self, model: torch.nn.Module) -> bool:
        return self.backbone.shard is None and measurable(model, self.stream.tokenizer)

    def _check_head_shares(self, model: torch.nn.Module) -> None:
        policy = self.run.policy
        if policy.head_budgets == "shares" and policy.head_shares is None and not self._measures_shares(model):
            raise ValueError(
                "--policy.head-budgets shares needs a share of each KV head, which cannot be measured here (the "
                "backbone is in parts, holds too few tokens, or its tokenizer cannot write English text); give "
                "--policy.head-shares, or leave it out"
            )

    def _annotate(self, heads: RetainingHeads, model: torch.nn.Module, summary: dict[str, Any]) -> RetainingHeads:
        numbers = [str(self.dtype).removeprefix("torch."), label_of(unwrap(model))]
        final = ("total", self.loss.objective, "smoothness", "overlap")
        facts = {
            "dataset_rows": self.stream.size,
            **{name: summary[name] for name in ("rows", "tokens", "overlap_before", "chance_overlap")},
            **{f"final_{name}": summary[name] for name in final},
            "precision": f"backbone {', '.join(filter(None, numbers))}, autocast {self.precision}",
            "earlier": heads.config.training,  # the heads still carry what they came with
        }
        if self.held_out:
            facts |= {"held_out_rows": len(self.held_out), "held_out_overlap": summary["eval_overlap"]}
        if summary["dropped_rows"]:
            facts["dropped_rows"] = summary["dropped_rows"]
        notes = training_notes(self, **facts)
        policy = self.run.policy.to_dict() if "policy" in self.chosen else None
        if policy is not None and policy["head_shares"] is None and self._measures_shares(model):
            policy["head_shares"] = list(head_shares(model, self.stream.tokenizer, self.data.template))
        if self.backbone.base_model is not None:
            heads.annotate(base_model=self.backbone.base_model, base_model_revision=self.backbone.revision)
        heads.annotate(base_weights=(norm_fingerprint if heads.config.base_model else weight_fingerprint)(model))
        licence = {} if self.run.license is None else {"license": self.run.license}
        return heads.annotate(label=label_notes(self.loss), policy=policy, training=notes, **licence)


def check_fits(plan: dict[str, int], device: torch.device) -> None:
    """Refuse a run whose weights alone are more than the device has; what rows take is only an estimate.

    Raises:
        ValueError: Naming what is too large.
    """
    swapped = psutil.virtual_memory().total + psutil.swap_memory().total
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else swapped
    training = plan["heads"] + plan["gradients"] + plan["optimizer"]
    if plan["backbone"] + training > memory:
        raise ValueError(
            f"--model takes {gibibytes(plan['backbone'])} of weights and --hidden-dim makes heads of "
            f"{gibibytes(training)} with gradients and optimizer, but {device} has {gibibytes(int(memory))}; choose a "
            "smaller backbone or --dtype, --load-in-4bit, --device-map auto, or lower --hidden-dim"
        )


def gibibytes(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.2f} MiB"
