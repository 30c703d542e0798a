"""The options of training the embedded backbone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from checkpoints.build.batches import Stage
from checkpoints.build.measure import learnt
from checkpoints.build.packed import BLOCK


@dataclass(frozen=True, kw_only=True)
class BackboneTraining:
    """Shape, curriculum and optimizer of the embedded backbone."""

    stages: list[Stage] = field(default_factory=list)
    """The curriculum, in order."""
    hidden_size: int = 128
    """Width of the model."""
    intermediate_size: int = 256
    """Width of the gated MLP."""
    num_layers: int = 2
    """Decoder layers."""
    num_heads: int = 4
    """Query heads per layer."""
    num_kv_heads: int = 2
    """Key/value heads per layer."""
    head_dim: int = 32
    """Width of a head."""
    start: Literal["random", "distances"] = "random"
    """Initial weights; "distances" makes the first layer look at the tokens just before each token."""
    init: str = ""
    """Folder of a smaller backbone to begin with in place of random weights. Its words must be the first of today's,
    and its layers go, in their order, to those that are not in `silent_layers`."""
    copying_layer: int | None = None
    """Layer that starts out copying what followed the same words before, after `start: distances`; none if left out."""
    ordered_numbers: bool = False
    """Whether the pieces of numbers start out in their order, after `start: distances`."""
    silent_layers: list[int] = field(default_factory=list)
    """Layers that start by adding nothing to their input, so that the others find each other sooner."""
    local_layers: int = 2
    """First layers that see a short window only, in the batches a stage says."""
    window: int = 32
    """That window, in tokens."""
    skim_window: int = 256
    """Window in which a text is read where a stage says so (`skim_share`), in tokens."""
    autocast: bool = True
    """Multiply matrices in bfloat16; the weights stay float32. On a CPU without such instructions a step then takes
    twenty times as long: give false there."""
    rope_theta: float = 1.0e6
    """Base of the rotary embedding; large, so that half of the dimensions compare content at any distance."""
    max_positions: int = 65536
    """Longest context to record in the config, in tokens."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """What updates the weights; "muon" orthogonalises the updates of the layers' matrices, and leaves the embeddings
    and the norms to AdamW."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    seed: int = 0
    """Seed of weights and data."""
    device: str = "cpu"
    """Where to train, such as "cpu" or "cuda"."""
    row_tokens: int = 0
    """Tokens of the one row that a step reads on a GPU, filled with texts that do not see each other, in place of
    batches of `batch_tokens`; a multiple of 128. 0 reads batches, as is best on a CPU."""
    workers: int = 0
    """Processes that make the rows; 0 makes them between the steps."""
    threads: int = 1
    """CPU threads. The same number gives the same weights on the same machine."""
    checkpoints: str = ""
    """Folder for checkpoints, each a backbone that can be loaded; none are written if empty."""
    save_every: int = 200
    """Steps between two checkpoints; the newest two are kept."""
    resume: str = ""
    """Checkpoint to go on from, or "auto" for the newest in `checkpoints`, if there is one."""
    eval_tasks: list[str] = field(default_factory=learnt)
    """Tasks measured after training."""
    eval_samples: int = 20
    """Fresh samples per task and length measured after training; 0 measures nothing."""
    eval_tokens: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    """Lengths measured after training, in tokens of the chat prompt."""
    output: str = "checkpoints/tiny"
    """Folder to write."""
    overwrite: bool = False
    """Replace the output folder if it is not empty."""
    dry_run: bool = False
    """Print the resolved options and the model's size, and write nothing."""
    tensorboard: str = ""
    """Folder for TensorBoard logs; none are written if empty."""

    def __post_init__(self) -> None:
        # The parser hands over the items of a list as namespaces.
        stages = [s if isinstance(s, Stage) else Stage(**vars(s)) for s in self.stages]
        object.__setattr__(self, "stages", stages)
        if not stages:
            raise ValueError("stages is empty, so there is nothing to train; use --config recipes/backbone/tiny.yaml")
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "threads",
            "save_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is too small; give 1 or more")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; change one of the two"
            )
        self._check_start()
        self._check_rows()
        try:
            torch.device(self.device)
        except RuntimeError:
            raise ValueError(f"device={self.device} is none that torch knows; give cpu or cuda") from None
        if self.resume and not self.checkpoints:
            raise ValueError(f"resume={self.resume} needs checkpoints, the folder where they are; add --checkpoints")

    def _check_rows(self) -> None:
        if self.row_tokens < 0 or self.row_tokens % BLOCK:
            raise ValueError(f"row_tokens={self.row_tokens} is no multiple of {BLOCK}; give one, or 0 for batches")
        if self.workers < 0:
            raise ValueError(f"workers={self.workers} is no number of processes; give 0 or more")
        if self.workers and not self.row_tokens:
            raise ValueError(f"workers={self.workers} changes nothing without row_tokens; give it, or drop workers")
        for index, stage in enumerate(self.stages if self.row_tokens else []):
            if 2 * stage.tokens > self.row_tokens:
                raise ValueError(
                    f"row_tokens={self.row_tokens} is less than two texts of tokens={stage.tokens} of stage {index}, "
                    f"the longest of which would seldom find room; give {2 * stage.tokens} or more"
                )
            if stage.batch_tokens != Stage.batch_tokens:
                raise ValueError(
                    f"stages: batch_tokens={stage.batch_tokens} of stage {index} changes nothing with row_tokens="
                    f"{self.row_tokens}; drop one of the two"
                )
        if self.row_tokens and self.autocast:
            raise ValueError(f"autocast changes nothing with row_tokens={self.row_tokens}; give autocast: false")

    def _check_start(self) -> None:
        wrong = [layer for layer in self.silent_layers if not 0 <= layer < self.num_layers]
        if wrong:
            raise ValueError(f"silent_layers={wrong} are not among num_layers={self.num_layers}; count from 0")
        if self.ordered_numbers and (self.start != "distances" or self.hidden_size < 32):
            raise ValueError(
                f"ordered_numbers needs start=distances and a hidden_size of 32 or more, but start={self.start} and "
                f"hidden_size={self.hidden_size}; change one of them"
            )
        if self.init and self.start != "random":
            raise ValueError(f"init={self.init} brings its own weights, but start={self.start}; drop one of the two")
        if self.copying_layer is None:
            return
        if self.start != "distances" or not 1 <= self.copying_layer < self.num_layers:
            raise ValueError(
                f"copying_layer={self.copying_layer} needs start=distances, and a layer after the first of num_layers="
                f"{self.num_layers}; change one of them"
            )
        if self.num_heads * self.head_dim > self.hidden_size:
            raise ValueError(
                f"copying_layer={self.copying_layer} needs a direction for every number of the heads, but num_heads="
                f"{self.num_heads} of head_dim={self.head_dim} are more than hidden_size={self.hidden_size}; lower them"
            )
