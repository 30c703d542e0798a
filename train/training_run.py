"""One training run: its options, and what they resolve to, from the cheapest check to the trained heads.

Everything that can be wrong is checked before the weights are loaded, and the output folder is touched only when
training can begin.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from locret.backbone.adapters import describe, unwrap
from locret.backbone.passes import in_step
from locret.distributed.ranks import Ranks
from locret.heads.config import HeadsConfig, usual_width
from locret.heads.fingerprint import weight_fingerprint
from locret.heads.heads import RetainingHeads
from locret.hub import no_token
from locret.labels import kinds
from locret.loading import load_config, load_model, load_tokenizer, quantisation, resolve_dtype
from locret.loading.options import WeightOptions
from locret.loading.placement import device_map_of, main_device
from locret.loading.plan import plan_weights
from locret.policy.growth import check_share_count
from locret.scorers.retaining_heads import recommended_shares
from locret.train import checkpointing, launch, resumed, run_folder
from locret.train.memory_plan import (
    backbone_parameters,
    check_fits,
    checkpoint_bytes,
    known_config,
    memory_plan,
    step_flops,
)
from locret.train.provenance import label_notes, training_notes
from locret.train.run_log import records_until
from locret.train.training_options import (
    BackboneOptions,
    DataOptions,
    LossOptions,
    OptimizerOptions,
    RunOptions,
    ValidationOptions,
    plain,
)
from locret.train.validation import comparison, hold_out, steps_between

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

logger = logging.getLogger(__name__)

# What a resumed run may choose anew: none of it changes a step.
_PLACES = ("device_map", "max_memory", "offload_folder", "shard", "shard_offload", "shard_offload_dir")
_FREE = (*_PLACES, "data_dir", "skip_bad_rows", "eval_every", *RunOptions.__dataclass_fields__)
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
        self.validation: ValidationOptions = options[4]
        self.run: RunOptions = options[5]
        self.options = plain(options)
        self.folder = Path(os.path.expanduser(str(self.run.output))).absolute()

    def check(self, device: torch.device) -> None:
        """Check the backbone's architecture, the heads to begin with, and that all of it fits into memory.

        For the default backbone nothing is fetched; of another one on the Hub, the config alone.

        Args:
            device: Where it is to be trained.

        Raises:
            ValueError: For what the user must change.
            OSError: If the Hub refuses or cannot be reached.
        """
        self.resolve(device)
        check_fits(self.plan(), self.device, self.backbone.hidden_dim or 0)

    def resolve(self, device: torch.device) -> None:
        """Settle what the options come to for a device that need not be there; see `check`.

        Raises:
            ValueError: For what the user must change.
            OSError: If the Hub refuses or cannot be reached.
        """
        if self.run.push_to_hub is not None:
            self._check_push(self.run.push_to_hub)
        self.config = known_config(self.backbone) or load_config(self.backbone)
        self.parameters = backbone_parameters(self.config)
        asked = device_map_of(self.backbone)
        self.device = (None if asked is None else main_device(asked)) or device
        self.dtype = resolve_dtype(self.backbone.dtype, self.config, self.device)
        self.weights = plan_weights(self.backbone, self.config, self.device, self.dtype)
        self.precision = self.backbone.mixed_precision
        if self.precision == "auto":
            self.precision = _AUTOCAST.get(self.dtype, "no")  # type: ignore[assignment]
        launch.check_precision(self.precision)
        self._take_shape(self.backbone.hidden_dim or usual_width(self.config), self.backbone.neighbours)
        self._check_label_kind()
        if self.backbone.init_from is not None and os.path.isdir(self.backbone.init_from):
            self._take_initial_heads(self.backbone.init_from)
        if self.backbone.init_from is None:
            self._check_heads()

    def _check_label_kind(self) -> None:
        kind = self.loss.label_kind
        if kinds.get(kind).terms is None:
            return
        if any(shape.latent for shape in describe(self.config).full_shapes):
            raise ValueError(
                f"--label-kind {kind} weighs values by the output projection, but this backbone holds latents; use "
                "log_attention"
            )

    def _check_heads(self, shares: tuple[float, ...] | None = None) -> None:
        """Refuse a policy whose layers have no shares.

        Args:
            shares: Those that the heads of `--init-from` recommend.

        Raises:
            ValueError: Naming the option.
        """
        policy = self.run.policy
        if "policy" not in self.chosen or policy.layer_budgets != "shares":
            return
        shares = policy.layer_shares or shares
        if shares is not None:
            check_share_count(shares, len(describe(self.config).layers))
        else:
            raise ValueError(
                "--policy.layer-budgets shares needs a share of each layer; give --policy.layer-shares, or use "
                "--policy.head-budgets shares, whose shares are measured"
            )
        if policy.layer_shares is None:
            self.run = replace(self.run, policy=policy.changed(layer_shares=shares))
            self.options["policy"] = self.run.policy.to_dict()

    def fetch(self) -> None:
        """Read what may have to be fetched and is small: the config of the backbone itself, and the initial heads.

        Raises:
            ValueError: For what the user must change.
            OSError: If the Hub refuses or cannot be reached.
        """
        self.config = load_config(self.backbone)
        if self.backbone.init_from is not None and not os.path.isdir(self.backbone.init_from):
            self._take_initial_heads(self.backbone.init_from)

    def _check_push(self, repo: str) -> None:
        from huggingface_hub import get_token

        from locret.heads.push import PushOptions

        PushOptions(heads=str(self.folder), repo=repo, private=self.run.private)
        if get_token() is None:
            raise no_token("push to", repo)

    def _take_initial_heads(self, name: str) -> None:
        heads = RetainingHeads.from_pretrained(name)
        heads.check_matches(self.config)
        if heads.config.gate is not None:
            raise ValueError(
                f"--init-from {name} holds a gate ({heads.config.gate['name']}), and gates are read here, not trained; "
                "leave it out"
            )
        hidden_dim = heads.config.hidden_dim
        if "hidden_dim" in self.chosen and self.backbone.hidden_dim != hidden_dim:
            raise ValueError(
                f"--hidden-dim {self.backbone.hidden_dim} differs from {hidden_dim} of the heads in --init-from "
                f"{self.backbone.init_from}; leave it out"
            )
        if "neighbours" in self.chosen and self.backbone.neighbours != heads.config.neighbours:
            raise ValueError(
                f"--neighbours {self.backbone.neighbours} differs from {heads.config.neighbours} of the heads in "
                f"--init-from {self.backbone.init_from}; leave it out"
            )
        self._take_shape(hidden_dim, heads.config.neighbours)
        self._check_heads(recommended_shares(heads.config))

    def _take_shape(self, hidden_dim: int, neighbours: int) -> None:
        self.backbone = replace(self.backbone, hidden_dim=hidden_dim, neighbours=neighbours)
        self.options |= {"hidden_dim": hidden_dim, "neighbours": neighbours}

    def ranks(self, process: PartialState) -> Ranks:
        """Return this process among those of the run, with the rows that it reads."""
        own = Ranks(process.process_index, process.num_processes, process.local_process_index)
        return own.under(self.backbone.shard)

    def open_rows(self, process: PartialState) -> None:
        """Open this process's training rows, which checks schema, template and first row, and settle the precision."""
        from locret.data.training.stream import TrainingStream, load_rows

        data, ranks = self.data, self.ranks(process)
        rows = load_rows(
            data.dataset,
            data_dir=data.data_dir,
            split=data.split,
            revision=data.dataset_revision,
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
            rank=ranks.data_rank,
            world=ranks.data_size,
        )
        self.stream.check_first()
        if not data.skip_bad_rows:
            self.stream.check_rows()
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

    def planned_tokens(self) -> int:
        """Return the tokens of the row that is planned for: --max-tokens, or as many as are trained on."""
        context = describe(self.config).max_positions
        trained = min(self.data.max_prompt_tokens, context)
        read = 2 * trained if self.loss.label_source == "reconstruction" else trained
        return min(self.data.max_tokens or read, context)

    def longest_row(self) -> int:
        """Return the most tokens that a row may have, answer included."""
        context = describe(self.config).max_positions
        return min(self.data.max_tokens or context, context)

    def plan(self) -> dict[str, int]:
        """Return the memory plan, in bytes."""
        return memory_plan(
            self.config,
            self.parameters,
            hidden_dim=self.backbone.hidden_dim or 0,
            neighbours=self.backbone.neighbours,
            dtype=self.dtype,
            autocast=self.precision != "no",
            tokens=self.planned_tokens(),
            trained_tokens=min(self.data.max_prompt_tokens, describe(self.config).max_positions),
            asked_apart=self.loss.answers == "each",
            weighed_labels=kinds.get(self.loss.label_kind).terms is not None,
            backbone_bytes=self.weights.on(self.device),
        )

    def resolved_options(self) -> dict[str, Any]:
        """Return all options, with what "auto" came to."""
        dtype = str(self.dtype).removeprefix("torch.")
        warmup = self.optimizer.warmup
        return {**self.options, "dtype": dtype, "mixed_precision": self.precision, "warmup_steps": warmup}

    def step_flops(self, process: PartialState) -> int | None:
        """Return the operations of one optimizer step on rows of the length in the plan; None where they vary."""
        width, near = self.backbone.hidden_dim, self.backbone.neighbours
        heads = HeadsConfig.for_model(self.config, width, neighbours=near).num_weights
        row = step_flops(self.config, self.parameters, heads, self.planned_tokens())
        return row and row * self.optimizer.gradient_accumulation * self.ranks(process).data_size

    def check_space(self) -> None:
        """Make sure that checkpoints fit on the disk.

        Raises:
            OSError: If they do not.
        """
        run = self.run
        kept = min(run.keep_checkpoints, -(-self.optimizer.steps // run.save_every))
        needed = checkpoint_bytes(self.plan(), kept)
        run_folder.check(str(run.output), resume=run.resume, overwrite=run.overwrite, needed_bytes=needed)

    def fixed_options(self, ranks: Ranks) -> dict[str, Any]:
        """Return the options that a resumed run must share."""
        fixed = {name: value for name, value in self.resolved_options().items() if name not in _FREE}
        rows_per_step = fixed.pop("gradient_accumulation") * ranks.data_size
        # Those that were not given are left out: earlier runs did not have them.
        weights = {field.name for field in fields(WeightOptions)}
        given = {name: value for name, value in self.backbone.given().items() if name not in _FREE}
        fixed = {name: value for name, value in fixed.items() if name not in weights}
        return {**fixed, **given, "rows_per_step": rows_per_step}

    def train(self, accelerator: Accelerator) -> dict[str, Any]:
        """Load the weights, train, save; return the final record.

        Args:
            accelerator: Made with the mixed precision and gradient accumulation that the options say.
        """
        from locret.train.probe import Probe, verdict
        from locret.train.trainer import Trainer

        own = self.ranks(accelerator.state)
        fixed = self.fixed_options(own)
        with own.together():
            checkpoint = None if self.run.resume is None else checkpointing.find(self.run.resume, self.folder)
            state = None if checkpoint is None else checkpointing.read(checkpoint)
            if state is not None and checkpoint is not None:
                with checkpointing.intact(checkpoint):
                    stored = {
                        "eval_rows": 0,
                        "neighbours": 0,
                        **resumed.without_retired(state["config"]),
                    }
                checkpointing.check_same(stored, fixed, checkpoint, growing=("steps",))
                records_until(self.folder / run_folder.LOG, state["step"])
        model = load_model(self.backbone, self.config, self.device, self.dtype)
        self._check_head_shares(model)
        heads = self._new_heads(model)
        with own.together():
            begun = {"the weights of --init-from": weight_fingerprint(heads)}
            own.agree(begun, "give all processes the same heads")
        heads = heads.follow(model) if self.backbone.shard is None else heads.to(self.device)
        with own.together():
            if own.is_main:
                options, processes = self.resolved_options(), accelerator.num_processes
                record = run_folder.run_record(options, self.chosen, processes, str(accelerator.device))
                run_folder.prepare(self.folder, record, overwrite=self.run.overwrite)
        probe = None if self.backbone.shard is not None else Probe.of(model, self.stream.tokenizer)
        trainer = Trainer(
            model,
            heads,
            self.stream,
            accelerator,
            held_out=self.held_out,
            loss=self.loss,
            optimizer=self.optimizer,
            run=self.run,
            max_prompt_tokens=self.data.max_prompt_tokens,
            eval_every=self.eval_every,
            folder=self.folder,
            config=fixed,
            probe=probe,
        )
        with own.together():
            if state is not None and checkpoint is not None:
                trainer.resume(checkpoint, state)
        started = time.perf_counter()
        try:
            stopped, record = trainer.train()
        finally:
            if accelerator.is_main_process:
                self._report_dropped()
        seconds = time.perf_counter() - started
        summary = {**record, "dropped_rows": self.stream.report.counts, "seconds": seconds, "stopped": stopped or None}
        if not stopped:
            start = "untrained heads" if self.backbone.init_from is None else "the heads of --init-from"
            words, warning = comparison(record, trainer.before, trainer.chance(), start)
            summary |= {"overlap_before": mean(trainer.before), "chance_overlap": trainer.chance(), "outcome": words}
            if warning and accelerator.is_main_process:
                logger.warning(warning)
            if probe is not None and accelerator.is_main_process:
                if trainer.probe is None or not self.held_out:
                    summary |= probe.measure(model, heads)
                words, warning = verdict(summary)
                summary["outcome"] += f"; {words}"
                if warning:
                    logger.warning(warning)
        if not stopped:
            with in_step(model):  # the first process alone measures the shares of the layers
                if accelerator.is_main_process:
                    self._annotate(heads, model, summary).save_pretrained(self.folder)
        accelerator.wait_for_everyone()
        return summary

    def _report_dropped(self) -> None:
        report = self.stream.report
        held_out = len(self.held_out)
        values = {"dataset": self.data.dataset, "rows": self.stream.size, "held_out": held_out, **report.to_dict()}
        run_folder.write_json(self.folder / run_folder.DROPPED, values)
        if report.counts:
            logger.warning("rows left out of %d read: %s (see %s)", report.read, report, run_folder.DROPPED)

    def _new_heads(self, model: torch.nn.Module) -> RetainingHeads:
        if self.backbone.init_from is None:
            width, near = self.backbone.hidden_dim, self.backbone.neighbours
            heads = RetainingHeads.for_model(model, width, seed=self.optimizer.seed, neighbours=near)
        else:
            heads = RetainingHeads.from_pretrained(self.backbone.init_from)
            heads.check_matches(model)
        return heads.requires_grad_(True)

    def _measures_shares(self, model: torch.nn.Module) -> bool:
        from locret.train.head_shares import measurable

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
        from locret.train.head_shares import head_shares

        final = {f"final_{name}": summary[name] for name in ("total", self.loss.objective, "smoothness", "overlap")}
        numbers = ", ".join(
            filter(None, [str(self.dtype).removeprefix("torch."), quantisation.label_of(unwrap(model))])
        )
        precision = f"backbone {numbers}, autocast {self.precision}"
        facts = {"dataset_rows": self.stream.size, "rows": summary["rows"], "tokens": summary["tokens"], **final}
        if self.held_out:
            facts |= {"held_out_rows": len(self.held_out), "held_out_overlap": summary["eval_overlap"]}
        facts |= {"overlap_before": summary["overlap_before"], "chance_overlap": summary["chance_overlap"]}
        if summary["dropped_rows"]:
            facts["dropped_rows"] = summary["dropped_rows"]
        # The heads still carry what they came with.
        facts |= {"precision": precision, "earlier": heads.config.training}
        notes = training_notes(self.backbone, self.data, self.loss, self.optimizer, **facts)
        policy = self.run.policy.to_dict() if "policy" in self.chosen else None
        if policy is not None and policy["head_shares"] is None and self._measures_shares(model):
            policy["head_shares"] = list(head_shares(model, self.stream.tokenizer, self.data.template))
        if self.backbone.base_model is not None:
            heads.annotate(base_model=self.backbone.base_model, base_model_revision=self.backbone.revision)
        heads.annotate(base_weights=None if heads.config.base_model else weight_fingerprint(model))
        licence = {} if self.run.license is None else {"license": self.run.license}
        return heads.annotate(label=label_notes(self.loss), policy=policy, training=notes, **licence)
