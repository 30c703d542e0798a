"""Every option of `locret-train` and its default, by concern. "Original" is the authors' training code."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from locret.base.fields import OptionClass, Range, Refusal, check_ranges, checked
from locret.base.nearest import check_retired
from locret.cli.command import parse_options
from locret.labels import kinds
from locret.loading.options import ShardedSource
from locret.policy.policy import RetentionPolicy
from locret.policy.resolve import PolicyFlags, resolve
from locret.train import resumed

PAPER_STEPS, PAPER_WARMUP = 3000, 2000


@dataclass(frozen=True, kw_only=True)
class BackboneOptions(ShardedSource, usual=("model", "init_from")):
    """The frozen backbone, and the shape of the heads."""

    model: str = "microsoft/Phi-3-mini-128k-instruct"
    """Folder of the backbone, or its Hub id; the paper's by default (Locret, section 4.1)."""
    base_model: str | None = None
    """Hub id to record with the heads where --model is a local copy, so that they are loaded with no other backbone."""
    mixed_precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """Autocast of backbone and heads; auto: bf16 for a bfloat16 backbone (original), fp16 for float16, else no. The
    heads' weights, gradients and optimizer are float32 always."""
    hidden_dim: int | None = None
    """Width between a head's two layers, d_R. If none is given, half the backbone's width, down to a power of two, and
    at most the paper's 1,024 (Locret, section 4.1)."""
    init_from: str | None = None
    """Heads to go on from, a folder or a Hub id; fresh ones (normal, the backbone's initializer_range) if none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, {"hidden_dim": Range(1)})
        if self.shard == "tp":
            check_retired("locret-train", "--shard tp")


@dataclass(frozen=True, kw_only=True)
class DataOptions(OptionClass, usual=("dataset", "max_tokens")):
    """The training rows."""

    dataset: str = ""
    """LongAlpaca, LongAlpaca-16k, LongAlign or Anti-Haystack (Locret, section 4.1 and its ablation); a Hub id; or a
    JSON, JSONL or Parquet file in the LongAlpaca, ShareGPT, messages, Anti-Haystack or prompt/answer schema."""
    dataset_revision: str | None = None
    """Commit, branch or tag of the data set on the Hub; the named sets are pinned."""
    split: str = "train"
    """Split to read, such as train[:3000]."""
    template: Literal["chat", "original", "none"] = "chat"
    """How a row becomes text: the tokenizer's own chat template; the Human/Assistant form that the published heads were
    trained with, whatever the backbone (original); or none."""
    min_tokens: int | None = None
    """Leave out shorter rows, in tokens of prompt and answer."""
    max_tokens: int | None = None
    """Leave out longer rows, in tokens of prompt and answer."""
    max_prompt_tokens: int = 10240
    """First prompt tokens to train on; labels come from the whole row (original)."""

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(("min_tokens", "max_tokens", "max_prompt_tokens"), Range(1)))
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"--min-tokens {self.min_tokens} is above --max-tokens {self.max_tokens}; no row fits")


@dataclass(frozen=True, kw_only=True)
class Loss(OptionClass, usual=("label_kind",)):
    """What heads learn from one row: its labels, and the loss of the scores. To add an option: a field, and its use.

    The defaults held on texts of a real model that heads had not seen, where the paper's lost to random scores.
    """

    label_kind: str = "log_attention"
    """Label of a token: the largest attention logit of the answer's tokens (logit; Locret, Eq. 2), or the largest log
    of the attention (log_attention)."""
    include_last_prompt_token: bool = False
    """Count the last prompt token, which produces the answer's first token, among the answer's (Locret's index range
    does, the original code does not)."""
    objective: Literal["regression", "ranking"] = "ranking"
    """Predict the labels (smooth L1; Locret, Eq. 3), or only their order (ListNet: the KL divergence of the scores'
    softmax over the prompt from the labels')."""
    alpha: float = 0.0
    """Weight of the smoothness term, which is summed over layers (2.5e-3: Locret, section 4.1)."""

    def __post_init__(self) -> None:
        for name in ("include_last_prompt_token", "alpha"):
            checked(Loss, name, getattr(self, name))
        check_ranges(self, {"alpha": Range(0), "objective": OBJECTIVES})


OBJECTIVES = get_args(get_type_hints(Loss)["objective"])
PAPER = Loss(label_kind="logit", objective="regression", alpha=2.5e-3)
"""Locret's, Eq. 2 and 3 and section 4.1."""


@dataclass(frozen=True, kw_only=True)
class LossOptions(Loss, usual=("answers",)):
    """What the heads learn."""

    answers: Literal["last", "each"] = "last"
    """Which answers label a row's text: the last one; or, of rows with a document and its questions, the largest label
    of all answers, each question asked by itself of the document, which is read once (each)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds.get(self.label_kind)


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(OptionClass, usual=("steps", "lr", "gradient_accumulation", "seed")):
    """AdamW and its schedule: a linear warm-up from 0, then a linear decay to 0 at the last step."""

    steps: int = PAPER_STEPS
    """Optimizer steps (Locret, section 4.1)."""
    lr: float = 5.0e-4
    """Learning rate at the end of the warm-up (Locret, section 4.1)."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; if none, 2,000 (Locret, section 4.1), and for fewer than the paper's 3,000 steps the
    same share of them, two thirds."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments (original)."""
    eps: float = 1.0e-8
    """Term in AdamW's denominator (original)."""
    weight_decay: float = 0.01
    """Decoupled weight decay (original)."""
    clip: Literal["value", "norm", "none"] = "value"
    """Clip every gradient by value (original), all of them by their norm, or not at all."""
    clip_limit: float = 0.5
    """Largest absolute value, or norm, of a gradient (original: 0.5, by value)."""
    gradient_accumulation: int = 1
    """Rows per process and optimizer step (original: batch 1 on one process)."""
    seed: int = 0
    """Seed of fresh heads and of the order of the rows (original)."""

    def __post_init__(self) -> None:
        ranges = {"steps": Range(1), "gradient_accumulation": Range(1), "warmup_steps": Range(0)}
        check_ranges(self, {**ranges, "weight_decay": Range(0)})
        for name in ("lr", "clip_limit", "eps"):
            if getattr(self, name) <= 0:
                raise Refusal(name, getattr(self, name), "is too small; it must be more than 0")
        if self.warmup_steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(
                f"--warmup-steps {self.warmup_steps} is not below --steps {self.steps}, so the learning rate would "
                "never reach --lr; lower it, or leave it out"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"--betas {self.betas[0]:g},{self.betas[1]:g}: a decay rate is outside 0 to 1; use such as 0.9,0.95"
            )

    @property
    def warmup(self) -> int:
        """Steps of warm-up: those given, or the paper's share of the steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(PAPER_WARMUP, self.steps * PAPER_WARMUP // PAPER_STEPS)


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """Rows that are never trained on, to see whether the heads learn anything."""

    eval_rows: int | None = None
    """Rows to hold out: the last ones of the seeded order; 0 for none. If none is given, 8 where the steps do not reach
    them, so that nothing is lost for training."""
    eval_every: int | None = None
    """Steps between two evaluations; there is one before the first step and one after the last in any case. If none is
    given, as many as cost about a tenth of the training."""

    def __post_init__(self) -> None:
        check_ranges(self, {"eval_rows": Range(0), "eval_every": Range(1)})
        if self.eval_rows == 0 and self.eval_every is not None:
            raise ValueError(f"--eval-every {self.eval_every} changes nothing with --eval-rows 0; drop one of them")


@dataclass(frozen=True, kw_only=True)
class RunOptions(OptionClass, usual=("output", "resume", "overwrite", "dry_run")):
    """Where results go, and how the run is watched, interrupted and resumed."""

    output: str | None = None
    """Folder for the heads, logs and checkpoints; new or empty unless --resume or --overwrite is given. If none,
    checkpoints/BACKBONE-DATASET-heads."""
    resume: str | None = None
    """Go on: from the newest checkpoint of a run's folder, whose options are taken over; auto goes on in --output, or
    starts a new run where there is none to go on with."""
    overwrite: bool = False
    """Delete an earlier run in the output folder first."""
    save_every: int = 50
    """Steps between checkpoints (original)."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep."""
    log_every: int = 10
    """Steps between two lines of the log."""
    report_to: Literal["tensorboard", "wandb", "tensorboard,wandb", "none"] = "tensorboard"
    """Where curves go in addition to log.jsonl."""
    policy: RetentionPolicy = field(default_factory=PolicyFlags)
    """Retention policy to recommend with the heads, as --policy.budget 1024; none is recorded if left out. What it
    leaves out follows from its budget."""
    license: str | None = None
    """Licence of the heads as the Hub spells it, such as mit; apache-2.0, or that of the heads it begins with."""
    dry_run: bool = False
    """Print the resolved options and a memory plan; load no weights and write nothing."""
    json: bool = False
    """Print one JSON object at the end."""

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(("save_every", "keep_checkpoints", "log_every"), Range(1)))
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,60}", self.license):
            raise ValueError(
                f"--license {self.license} is not how the Hub spells a licence; use one such as apache-2.0 or other"
            )
        if self.output is not None and not self.output.strip():
            raise ValueError("--output is empty; give a folder")
        # A folder of that name, such as wandb makes, is a package without a file.
        if "wandb" in self.report_to and getattr(find_spec("wandb"), "origin", None) is None:
            raise ValueError("--report-to wandb needs a package that is not installed; pip install wandb, or drop it")
        if self.resume is not None and self.overwrite:
            raise ValueError("--resume and --overwrite contradict each other; drop one of them")
        if type(self.policy) is not RetentionPolicy:
            # Flags, which the policy's own checks are for.
            object.__setattr__(self, "policy", resolve(vars(self.policy), {}))


OPTION_CLASSES = (BackboneOptions, DataOptions, LossOptions, OptimizerOptions, ValidationOptions, RunOptions)
Options = tuple[BackboneOptions, DataOptions, LossOptions, OptimizerOptions, ValidationOptions, RunOptions]


def parse(argv: Sequence[str] | None = None) -> tuple[Options, set[str]]:
    """Read the command line, its recipe, and the options of the run that `--resume` names.

    Args:
        argv: Arguments; those of the process if None.

    Returns:
        An instance of each of `OPTION_CLASSES`, and the names of the options that the user set, now or in that run.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    title = "Fit retaining heads on a frozen backbone."
    with resumed.recorded(arguments, OPTION_CLASSES) as (recipe, record):
        given, chosen = parse_options("locret-train", title, OPTION_CLASSES, [*recipe, *arguments])
    backbone, data, loss, optimizer, validation, run = given
    if not data.dataset.strip():
        raise ValueError("--dataset is missing; give LongAlpaca or another set (docs/training.md)")
    if run.output is None:
        earlier = resumed.run_of(run.resume)
        run = replace(run, output=str(earlier or default_output(backbone.model, data.dataset)))
    options = (backbone, data, loss, optimizer, validation, run)
    if record:
        values = plain(options)
        changed = {name for name in chosen if values[name] != record["config"].get(name)}
        chosen = (changed - set(resumed.ONCE)) | set(record["chosen"])
    return options, chosen


def plain(options: Sequence[Any]) -> dict[str, Any]:
    """Return all options by name, as plain types."""
    values = {name: value for part in options for name, value in asdict(part).items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def default_output(model: str, dataset: str) -> str:
    """Return the folder of a run that was given none: checkpoints/BACKBONE-DATASET-heads."""
    named = Path(dataset).stem if Path(dataset).suffix in (".json", ".jsonl", ".parquet") else Path(dataset).name
    return str(Path("checkpoints") / f"{Path(model).absolute().name}-{named or 'data'}-heads")
