"""One training run: its options, and what they resolve to, from the cheapest check to the trained heads.

Everything that can be wrong is checked before the weights are loaded, and the output folder is touched only when
training can begin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from locret.backbone.adapters import describe
from locret.heads.fingerprint import weight_fingerprint
from locret.heads.heads import RetainingHeads
from locret.heads.hub import no_token
from locret.loading import load_config, load_model, load_tokenizer, resolve_dtype
from locret.policy.policy import RetentionPolicy
from locret.train import checkpointing, run_folder
from locret.train.memory_plan import backbone_parameters, checkpoint_bytes, memory_plan
from locret.train.provenance import label_notes, training_notes
from locret.train.training_options import (
    BackboneOptions,
    DataOptions,
    LossOptions,
    OptimizerOptions,
    RunOptions,
)

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

logger = logging.getLogger(__name__)

# What a resumed run may choose anew: none of it changes a step.
_FREE = ("data_dir", "skip_bad_rows", "max_row_bytes", *RunOptions.__dataclass_fields__)
_AUTOCAST = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "no"}


class TrainingRun:
    """One run of the command: its options, and what it resolves them to, step by step.

    Args:
        options: An instance of each of `OPTION_CLASSES`, in their order.
        chosen: Names of the options that the user set.
    """

    def __init__(self, options: Sequence[Any], chosen: Iterable[str]) -> None:
        self.chosen = set(chosen)
        self.backbone: BackboneOptions = options[0]
        self.data: DataOptions = options[1]
        self.loss: LossOptions = options[2]
        self.optimizer: OptimizerOptions = options[3]
        self.run: RunOptions = options[4]
        self.options = {name: value for part in options for name, value in asdict(part).items()}
        self.options["betas"] = list(self.optimizer.betas)

    def check(self) -> None:
        """Check all that needs no weights: options, output folder, backbone's architecture, data, checkpoint.

        Raises:
            ValueError: For what the user must change.
            OSError: If the output folder cannot be written.
        """
        if self.optimizer.warmup_steps >= self.optimizer.steps:
            logger.warning(
                "--warmup-steps %d is not below --steps %d, so the learning rate never reaches --lr; lower it",
                self.optimizer.warmup_steps,
                self.optimizer.steps,
            )
        if self.run.push_to_hub is not None:
            self._check_push(self.run.push_to_hub)
        run = self.run
        self.folder = run_folder.check(run.output, resume=run.resume is not None, overwrite=run.overwrite)
        self.config = load_config(self.backbone)
        self.parameters = backbone_parameters(self.config)
        self._check_initial_heads()
        if self.loss.evict_while_training and "policy" not in self.chosen:
            raise ValueError("--evict-while-training needs to know how to evict; add --policy.budget 256 and so on")

    def _check_push(self, repo: str) -> None:
        from huggingface_hub import get_token

        from locret.heads.push import PushOptions

        PushOptions(heads=self.run.output, repo=repo, private=self.run.private)
        if get_token() is None:
            raise no_token("push to", repo)

    def _check_initial_heads(self) -> None:
        if self.backbone.init_from is None:
            if self.loss.evict_while_training:
                logger.warning("--evict-while-training without --init-from: untrained heads evict by chance at first")
            return
        heads = RetainingHeads.from_pretrained(self.backbone.init_from)
        heads.check_matches(self.config)
        hidden_dim = heads.config.hidden_dim
        if "hidden_dim" in self.chosen and self.backbone.hidden_dim != hidden_dim:
            raise ValueError(
                f"--hidden-dim {self.backbone.hidden_dim} differs from {hidden_dim} of the heads in --init-from "
                f"{self.backbone.init_from}; leave it out"
            )
        self.backbone = replace(self.backbone, hidden_dim=hidden_dim)
        self.options["hidden_dim"] = hidden_dim
        if self.loss.evict_while_training and "policy" not in self.chosen and heads.config.policy:
            policy = RetentionPolicy.from_dict(heads.config.policy, "the policy of --init-from")
            self.run = replace(self.run, policy=policy)
            self.options["policy"] = heads.config.policy
            self.chosen.add("policy")

    def open_rows(self, process: PartialState) -> None:
        """Open this process's training rows, which checks schema, template and first row, and settle the precision."""
        from locret.data.training.stream import TrainingStream, load_rows

        data = self.data
        rows = load_rows(
            data.dataset,
            data_dir=data.data_dir,
            split=data.split,
            revision=data.dataset_revision,
            streaming=data.streaming,
            max_row_bytes=data.max_row_bytes,
        )
        self.stream = TrainingStream(
            rows,
            load_tokenizer(self.backbone),
            seed=self.optimizer.seed,
            max_length=describe(self.config).max_positions,
            min_tokens=data.min_tokens,
            max_tokens=data.max_tokens,
            skip_bad_rows=data.skip_bad_rows,
            template=data.template,
            answers=self.loss.answers,
            source=data.dataset,
            reconstruct=self.loss.label_source == "reconstruction",
            shuffle_buffer=data.shuffle_buffer,
            rank=process.process_index,
            world=process.num_processes,
        )
        beginning = self.stream.state()
        next(self.stream)
        self.stream.restore(beginning)
        if not data.skip_bad_rows and not data.streaming:
            self.stream.check_rows()
        self.dtype = resolve_dtype(self.backbone.dtype, self.config, process.device)
        self.precision = self.backbone.mixed_precision
        if self.precision == "auto":
            self.precision = _AUTOCAST.get(self.dtype, "no")  # type: ignore[assignment]

    def plan(self) -> dict[str, int]:
        """Return the memory plan, in bytes."""
        context = describe(self.config).max_positions
        trained = min(self.data.max_prompt_tokens, context)
        read = 2 * trained if self.loss.label_source == "reconstruction" else trained
        return memory_plan(
            self.config,
            self.parameters,
            hidden_dim=self.backbone.hidden_dim,
            dtype=self.dtype,
            autocast=self.precision != "no",
            tokens=min(self.data.max_tokens or read, context),
            trained_tokens=trained,
            kept_features=self.loss.evict_while_training,
        )

    def resolved_options(self) -> dict[str, Any]:
        """Return all options, with what "auto" came to."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {**self.options, "dtype": dtype, "mixed_precision": self.precision}

    def check_space(self) -> None:
        """Make sure that checkpoints fit on the disk.

        Raises:
            OSError: If they do not.
        """
        run, needed = self.run, checkpoint_bytes(self.plan(), self.run.keep_checkpoints)
        run_folder.check(run.output, resume=run.resume is not None, overwrite=run.overwrite, needed_bytes=needed)

    def fixed_options(self, processes: int) -> dict[str, Any]:
        """Return the options that a resumed run must share."""
        free = set(_FREE) - ({"policy"} if self.loss.evict_while_training else set())
        fixed = {name: value for name, value in self.resolved_options().items() if name not in free}
        rows_per_step = fixed.pop("gradient_accumulation") * processes
        return {**fixed, "rows_per_step": rows_per_step}

    def train(self, accelerator: Accelerator) -> dict[str, Any]:
        """Load the weights, train, save; return the final record."""
        from locret.train.trainer import Trainer

        checkpoint = None if self.run.resume is None else checkpointing.find(self.run.resume, self.folder)
        state = None if checkpoint is None else checkpointing.read(checkpoint)
        fixed = self.fixed_options(accelerator.num_processes)
        if state is not None and checkpoint is not None:
            checkpointing.check_same(state["config"], fixed, checkpoint)
        model = load_model(self.backbone, self.config, accelerator.device, self.dtype)
        heads = self._new_heads(model).to(accelerator.device)
        if accelerator.is_main_process:
            record = run_folder.run_record(self.resolved_options(), accelerator.num_processes, str(accelerator.device))
            run_folder.prepare(self.folder, record, overwrite=self.run.overwrite)
        accelerator.wait_for_everyone()
        trainer = Trainer(
            model,
            heads,
            self.stream,
            accelerator,
            loss=self.loss,
            optimizer=self.optimizer,
            run=self.run,
            max_prompt_tokens=self.data.max_prompt_tokens,
            folder=self.folder,
            config=fixed,
        )
        if state is not None and checkpoint is not None:
            trainer.resume(checkpoint, state)
        started = time.perf_counter()
        try:
            stopped, record = trainer.train()
        finally:
            if accelerator.is_main_process:
                self._report_dropped()
        seconds = time.perf_counter() - started
        summary = {**record, "dropped_rows": self.stream.dropped, "seconds": seconds, "stopped": stopped or None}
        if not stopped and accelerator.is_main_process:
            self._annotate(heads, model, summary).save_pretrained(self.folder)
        accelerator.wait_for_everyone()
        return summary

    def _report_dropped(self) -> None:
        report = self.stream.report
        values = {"dataset": self.data.dataset, "rows": self.stream.size, **report.to_dict()}
        run_folder.write_json(self.folder / run_folder.DROPPED, values)
        if report.counts:
            logger.warning("rows left out of %d read: %s (see %s)", report.read, report, run_folder.DROPPED)

    def _new_heads(self, model: torch.nn.Module) -> RetainingHeads:
        if self.backbone.init_from is None:
            heads = RetainingHeads.for_model(model, self.backbone.hidden_dim, seed=self.optimizer.seed)
        else:
            heads = RetainingHeads.from_pretrained(self.backbone.init_from)
            heads.check_matches(model)
        return heads.requires_grad_(True)

    def _annotate(self, heads: RetainingHeads, model: torch.nn.Module, summary: dict[str, Any]) -> RetainingHeads:
        final = {f"final_{name}": summary[name] for name in ("total", self.loss.objective, "smoothness", "overlap")}
        precision = f"backbone {str(self.dtype).removeprefix('torch.')}, autocast {self.precision}"
        facts = {"dataset_rows": self.stream.size, "rows": summary["rows"], "tokens": summary["tokens"], **final}
        if summary["dropped_rows"]:
            facts["dropped_rows"] = summary["dropped_rows"]
        # The heads still carry what they came with.
        facts |= {"precision": precision, "earlier": heads.config.training}
        notes = training_notes(self.backbone, self.data, self.loss, self.optimizer, **facts)
        policy = self.run.policy.to_dict() if "policy" in self.chosen else None
        if self.backbone.base_model is not None:
            heads.annotate(base_model=self.backbone.base_model, base_model_revision=self.backbone.revision)
        heads.annotate(base_weights=None if heads.config.base_model else weight_fingerprint(model))
        return heads.annotate(label=label_notes(self.loss), policy=policy, training=notes)
