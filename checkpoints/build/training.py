"""The training loop of the embedded backbone, with checkpoints to look at and to go on from."""
# B batch, T tokens of a sequence, E width, V vocabulary, M tokens that bear loss, R rows or branches

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from checkpoints.build import attention
from checkpoints.build.batches import Batch, Stage, joined, steps
from checkpoints.build.model import build_model
from checkpoints.build.muon import Muon
from checkpoints.build.options import BackboneTraining
from checkpoints.build.packed import Packed, Row, Rows, reader
from locret.data.text.embedded_tokenizer import build_tokenizer
from locret.train import checkpointing

LOG_EVERY = 50
_NOT_OF_THE_RUN = (
    "output", "overwrite", "dry_run", "checkpoints", "save_every", "resume", "tensorboard", "device", "threads",
    "workers", "eval_tasks", "eval_samples", "eval_tokens",
)  # fmt: skip
"""Options that may change when a run is resumed."""


def masked_loss(model: LlamaForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean cross-entropy of the marked tokens, and per row or branch (R,) how many are marked, and right."""
    # Gaps in the positions would be taken for boundaries of packed texts, but our attention takes no mask.
    with attention.forked(batch.forks):
        hidden_BTE = model.model(
            input_ids=batch.ids_BT, position_ids=batch.positions_1T, use_cache=False
        ).last_hidden_state
    mask_BT = batch.mask_BT[:, 1:]
    targets_M = batch.ids_BT[:, 1:][mask_BT]
    logits_MV = model.lm_head(hidden_BTE[:, :-1][mask_BT]).float()
    loss = torch.nn.functional.cross_entropy(logits_MV, targets_M)
    rows_M, right_M = batch.marked_rows(), (logits_MV.detach().argmax(-1) == targets_M).float()
    none_R = torch.zeros(len(batch.kinds), device=right_M.device)
    marked_R = none_R.index_add(0, rows_M, torch.ones_like(right_M))
    return loss, marked_R, none_R.index_add(0, rows_M, right_M)


def train(options: BackboneTraining) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast, list[dict[str, Any]]]:
    """Train a backbone through all stages, from fresh weights, from `init`, or from where a checkpoint was made.

    Returns:
        The model in float32, its tokenizer, and one record per 50 steps: step, stage, seconds, learning rate, mean loss
        (nats per token), and for each kind of row (`Batch.kinds`) the share of its tokens predicted exactly and of its
        rows predicted from the first token to the last.

    Raises:
        ValueError: If `resume` names no checkpoint, or one of a run with other options.
        OSError: If a checkpoint cannot be written.
    """
    torch.set_num_threads(options.threads)
    tokenizer = build_tokenizer(options.max_positions)
    model = build_model(options, tokenizer).to(options.device)
    optimizers = make_optimizers(options, model)
    total = sum(stage.steps for stage in options.stages)
    done, log = _resumed(options, model, optimizers)
    earlier = log[-1]["seconds"] if log else 0.0
    tally = Tally()
    started = time.monotonic()
    if options.row_tokens:
        torch.set_float32_matmul_precision("high")  # TF32: three times as fast on a GPU, and no less is learnt
        windows = {"window": options.window, "skim_window": options.skim_window}
        rows = Rows(tokenizer, options.stages, options.seed, options.row_tokens, **windows)
        packed = Packed(model, options.row_tokens, options.local_layers)
        source: Any = reader(rows, done, options.workers)
    else:
        packed, source = None, contextlib.nullcontext(steps(tokenizer, options.stages, options.seed, start=done))
    with source as stream, _tensorboard(options.tensorboard) as write_scalar:
        bar = tqdm(stream, total=total, initial=done, unit="step", file=sys.stderr)
        for step, parts in enumerate(bar, start=done + 1):
            rate = learning_rate(step, options.stages, options.warmup_steps)
            _begin(model, step, options.stages)
            with _updated(model, optimizers, rate):
                stage = _learn_row(packed, parts, tally) if packed else _learn(model, parts, options, tally)
            if step % LOG_EVERY == 0 or step == total:
                record = {"step": step, "stage": stage, "lr": rate} | tally.means()
                bar.set_postfix(record)
                for name, value in record.items():
                    write_scalar(name, value, step)
                log.append(record | {"seconds": round(earlier + time.monotonic() - started, 1)})
                tally = Tally()
            if options.checkpoints and (step % options.save_every == 0 or step == total):
                _save(options, step, model, tokenizer, optimizers, log)
    return model.cpu().eval(), tokenizer, log


@torch.no_grad()
def _begin(model: LlamaForCausalLM, step: int, stages: Sequence[Stage]) -> None:
    """Change the weights as the stage says that begins with this step (from 1), if one does."""
    starts = (1 + sum(earlier.steps for earlier in stages[:index]) for index in range(len(stages)))
    stage = next((stage for start, stage in zip(starts, stages, strict=True) if start == step), None)
    if stage is None:
        return
    if stage.sharpen != 1:
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= stage.sharpen
    if stage.louder != 1:
        model.get_input_embeddings().weight *= stage.louder
        model.model.norm.weight /= stage.louder


@contextlib.contextmanager
def _updated(model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer], rate: float) -> Iterator[None]:
    """Make one step at this rate with the gradients that are found meanwhile."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
    yield
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()


def _learn(model: LlamaForCausalLM, parts: list[Batch], options: BackboneTraining, tally: Tally) -> int:
    """Find the gradients of the mean loss of all marked tokens of a step, count what was right; return its stage."""
    total = sum(int(batch.mask_BT[:, 1:].sum()) for batch in parts)
    mean = 0.0
    for batch in joined(parts):
        with (
            attention.local_layers(options.local_layers if batch.local else 0, options.window),
            attention.skimmed(options.skim_window if batch.skim else 0),
            torch.autocast(model.device.type, torch.bfloat16, enabled=options.autocast),
        ):
            loss, tokens_R, right_R = masked_loss(model, batch.to(options.device))
        loss = loss * (tokens_R.sum().item() / total)
        loss.backward()
        mean += loss.item()
        tally.add(batch.kinds, tokens_R, right_R)
    tally.add_loss(mean)
    return parts[0].stage


def _learn_row(packed: Packed, row: Row, tally: Tally) -> int:
    """Do the same with the row of a step; nothing waits for the device."""
    loss, tokens_R, right_R = packed.loss(row)
    loss.backward()
    tally.add(row.kinds, tokens_R, right_R)
    tally.add_loss(loss.detach())
    return row.stage


def make_optimizers(options: BackboneTraining, model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return what updates the weights."""
    if options.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)]
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    taken = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    return [
        Muon(matrices, weight_decay=0.01),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
    ]


class Tally:
    """Means over the steps between two records."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._found: list[tuple[tuple[str, ...], Tensor, Tensor]] = []

    def add_loss(self, loss: Tensor | float) -> None:
        """Take in the loss of one step, ()."""
        self._losses.append(torch.as_tensor(loss))

    def add(self, kinds: tuple[str, ...], tokens_R: Tensor, right_R: Tensor) -> None:
        """Take in one batch: what each row or branch is, its marked tokens (R,) and those predicted (R,)."""
        self._found.append((kinds, tokens_R, right_R))

    def means(self) -> dict[str, float]:
        """Return `loss`, and per kind `<kind>_tokens` and `<kind>_rows`, the shares that are right."""
        means = {"loss": round(torch.stack(self._losses).mean().item(), 4)}
        counts: dict[str, list[float]] = {}
        for kinds, tokens_R, right_R in self._found:
            for kind, tokens, right in zip(kinds, tokens_R.tolist(), right_R.tolist(), strict=True):
                of_kind = counts.setdefault(kind, [0.0, 0.0, 0.0, 0.0])
                for index, value in enumerate((tokens, right, 1, right == tokens)):
                    of_kind[index] += value
        for kind, (tokens, right, rows, whole) in sorted(counts.items()):
            means |= {f"{kind}_tokens": round(right / tokens, 4), f"{kind}_rows": round(whole / rows, 4)}
        return means


def _save(
    options: BackboneTraining,
    step: int,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    optimizers: list[torch.optim.Optimizer],
    log: list[dict[str, Any]],
) -> None:
    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    states = [optimizer.state_dict() for optimizer in optimizers]
    state = {"optimizers": states, "log": log, "options": _of_the_run(options)}
    checkpointing.save(Path(options.checkpoints), step, write, state, keep=2)


def _resumed(
    options: BackboneTraining, model: LlamaForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, list[dict[str, Any]]]:
    """Load the checkpoint to go on from, if any; return the steps done and their log."""
    path = checkpointing.find(options.resume, Path(options.checkpoints)) if options.resume else None
    if path is None:
        return 0, []
    state = checkpointing.read(path)
    done = state["step"]
    checkpointing.check_same(_until(state["options"], done), _until(_of_the_run(options), done), path)
    model.load_state_dict(LlamaForCausalLM.from_pretrained(path).state_dict())
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return done, state["log"]


def _until(options: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the options that the first `step` steps depend on: later stages may be changed when a run goes on."""
    stages: list[dict[str, Any]] = []
    for stage in options["stages"]:
        if step <= 0:
            break
        stage = asdict(Stage(**stage))  # what was added to stages since is as it was then
        # Where a stage ends matters once it has ended, or if its learning rate falls until then.
        stages.append(stage if stage["decay"] else stage | {"steps": min(stage["steps"], step)})
        step -= stage["steps"]
    return options | {"stages": stages}


def _of_the_run(options: BackboneTraining) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name not in _NOT_OF_THE_RUN}


@contextlib.contextmanager
def _tensorboard(folder: str) -> Iterator[Callable[[str, float, int], object]]:
    """Give a function that records one number of one step; it does nothing where no folder is asked for."""
    if not folder:
        yield lambda name, value, step: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder) as writer:
        yield writer.add_scalar


def learning_rate(step: int, stages: Sequence[Stage], warmup: int) -> float:
    """Return the learning rate at `step` (from 1): its stage's, after a linear warm-up over the first steps of all."""
    place = step
    for stage in stages:
        if place <= stage.steps:
            break
        place -= stage.steps
    fall = 1 - 0.9 * place / stage.steps if stage.decay else 1.0
    return stage.lr * fall * min(1.0, step / max(warmup, 1))
