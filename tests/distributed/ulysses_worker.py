"""One of several processes that share rows by their tokens; test_ulysses.py starts them.

    torchrun --standalone --nproc-per-node 2 ulysses_worker.py FILE

Each check compares with the whole row, which every process reads too. The first process writes to FILE what it found.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import families
import torch
from torch import Tensor, distributed
from training_cases import backbone, token_ids
from transformers import LlamaConfig

from locret import RetainingHeads
from locret.backbone.adapters import describe
from locret.distributed.ulysses import RowRanks, RowShare
from locret.infer.speed.allocations import peak_bytes
from locret.infer.speed.shapes import random_model
from locret.labels.base import LabelKind
from locret.labels.kinds import KINDS
from locret.load_options import BackboneSource
from locret.loading import load_config, load_model
from locret.train.memory_plan import layer_bytes, sketch
from locret.train.step import StepResult, train_step
from locret.train.training_options import Loss
from locret.weights.shares import WeightCount

# A kind of one's own, which sees whole rows: nothing about it says how it could be put together from parts.
KINDS["mean"] = LabelKind(
    name="mean",
    meaning="how far the attention weight is above the mean one",
    block=lambda logits, labelled: logits.softmax(-1)[..., :labelled].amax(1) * logits.shape[-1],
    whole_rows=True,
    comparable=True,
)


def differences(
    model: Any, ranks: RowRanks, prompt: Tensor, answer: Tensor, loss: Loss, part: Any = None, **more: Any
) -> dict[str, float]:
    """Return how far losses and gradients of shared rows are from those of whole rows, relative to the largest."""

    def step(row_ranks: RowRanks | None) -> tuple[StepResult, list[Tensor]]:
        model = part if row_ranks is not None and part is not None else whole_model
        heads = RetainingHeads.for_model(model, 16, seed=0).requires_grad_(True)
        result = train_step(model, heads, prompt, answer, loss, row_ranks=row_ranks, **more)
        gradients = [weight.grad for weight in heads.parameters()]
        assert all(gradient is not None for gradient in gradients)
        return result, gradients  # type: ignore[return-value]

    whole_model = model
    (whole, expected), (shared, found) = step(None), step(ranks)
    worst, largest = 0.0, max(float(one.abs().max()) for one in expected)
    for one, other in zip(expected, found, strict=True):
        distributed.all_reduce(other)
        worst = max(worst, float((one - other).abs().max() / largest))
    losses = {name: abs(float(getattr(shared, name) / getattr(whole, name)) - 1) for name in ("total", "fit")}
    losses["smoothness"] = float((shared.smoothness - whole.smoothness).abs())
    assert shared.tokens == whole.tokens
    return {**losses, "overlap": float((shared.overlap - whole.overlap).abs().max()), "gradients": worst}


def steps(ranks: RowRanks) -> dict[str, dict[str, float]]:
    """Compare steps over families, kinds of labels, objectives, lengths and policies."""
    llama, gemma = backbone("llama"), backbone("gemma2")
    built = families.build("phi3-longrope").eval().requires_grad_(False)
    sinks = families.build("gpt-oss").eval().requires_grad_(False)
    ids = {"prompt": token_ids(101), "answer": token_ids(14, 1)}
    cases: dict[str, tuple[Any, dict[str, Any], Loss, dict[str, Any]]] = {
        "llama": (llama, ids, Loss(), {}),
        "no groups": (backbone("llama-mha"), ids, Loss(label_kind="log_attention"), {}),
        "q and k norms": (backbone("qwen3"), ids, Loss(label_kind="log_attention"), {}),
        "windows and softcap": (gemma, ids, Loss(label_kind="log_attention"), {}),
        "fused projections, long factors": (built, ids, Loss(), {}),
        "learned sinks": (sinks, ids, Loss(label_kind="log_attention"), {}),
        "a kind of one's own": (llama, ids, Loss(label_kind="mean"), {}),
        "ranking": (llama, ids, Loss(objective="ranking", temperature=2.0, label_kind="log_attention"), {}),
        "smoothness alone counts": (llama, ids, Loss(alpha=100.0), {}),
        "a long answer": (llama, {"prompt": token_ids(30), "answer": token_ids(80, 1)}, Loss(), {}),
        "last prompt token": (llama, ids, Loss(include_last_prompt_token=True), {}),
        "trained up to the border": (llama, ids, Loss(), {"max_prompt_tokens": 58}),
        "trained past the border": (llama, ids, Loss(objective="ranking"), {"max_prompt_tokens": 59}),
        "trained before the border": (llama, ids, Loss(objective="ranking"), {"max_prompt_tokens": 20}),
        "one token": (llama, {"prompt": token_ids(1), "answer": token_ids(1, 1)}, Loss(), {}),
        "earlier answers": (llama, ids, Loss(), {"earlier_answers": [(20, 30), (55, 70)]}),
    }
    return {
        name: differences(model, ranks, rows["prompt"], rows["answer"], loss, **more)
        for name, (model, rows, loss, more) in cases.items()
    }


def sharded(ranks: RowRanks) -> dict[str, Any]:
    """Share rows of a backbone whose weights are shared too, and count its weights."""
    found: dict[str, Any] = {}
    for shard in ("fsdp", "tp"):
        source = BackboneSource(model="checkpoints/tiny", shard=shard)
        config = load_config(source)
        part = load_model(source, config, torch.device("cpu"), torch.float32)
        weights = WeightCount(sketch(config), torch.float32)
        found[shard] = {
            "counted": sum(getattr(one, "_local_tensor", one).nbytes for one in part.parameters()),
            "planned": weights.shard(2) if shard == "fsdp" else weights.split(2),
            "whole": weights.total,
        }
        if shard == "fsdp":
            whole = load_model(BackboneSource(model="checkpoints/tiny"), config, torch.device("cpu"), torch.float32)
            ids = {"prompt": token_ids(301, vocabulary=800), "answer": token_ids(20, 1, 800)}
            more = {"part": part, "loss": Loss(label_kind="log_attention")}
            found["steps"] = {
                "sharded": differences(whole, ranks, **ids, **more),
            }
    return found


def low_precision(ranks: RowRanks) -> dict[str, float]:
    """Compare in bfloat16 under autocast, as on a GPU; roundings differ where a sum is cut."""
    model = backbone("llama").to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        return differences(model, ranks, token_ids(101), token_ids(14, 1), Loss())


def memory(ranks: RowRanks) -> dict[str, dict[str, int]]:
    """Count what a step holds at its peak, for a whole row and a shared one."""
    exchange = RowShare._exchange

    def settled(*args: Any) -> Tensor:
        # gloo's thread lets go of what it sent a moment later; the counter sees only what this thread frees.
        received = exchange(*args)
        time.sleep(0.02)
        return received

    RowShare._exchange = settled  # type: ignore[method-assign]
    usual = {"intermediate_size": 3 * 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    shapes = {"as models are": usual, "no groups": {**usual, "num_key_value_heads": 8, "intermediate_size": 256}}
    prompt, answer, found = token_ids(1900), token_ids(100, 1), {}
    for name, shape in shapes.items():
        numbers: dict[str, Any] = {"hidden_size": 256, "head_dim": 32, "vocab_size": 256, **shape}
        model = random_model(LlamaConfig(**numbers, num_hidden_layers=2))
        heads = RetainingHeads.for_model(model, 32, seed=0).requires_grad_(True)
        loss = Loss(label_kind="log_attention")
        counted = found[name] = {}
        for way, row_ranks in (("whole", None), ("shared", ranks)):
            step = partial(train_step, model, heads, prompt, answer, loss, row_ranks=row_ranks)
            step()  # gradients are there from now on
            counted[way] = peak_bytes(step).everything
            processes = 1 if row_ranks is None else row_ranks.size
            counted[f"planned {way}"] = layer_bytes(model.config, 32, 4, 4, 2000, 1900, row_ranks=processes)
    RowShare._exchange = exchange  # type: ignore[method-assign]
    return found


def refusals(ranks: RowRanks) -> dict[str, str]:
    """Return what is said of what cannot be shared."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    turning = backbone("llama", rope_parameters=dynamic, max_position_embeddings=64)
    heads = RetainingHeads.for_model(turning, 8, seed=0).requires_grad_(True)
    long = token_ids(60), token_ids(10, 1)
    found = {}
    for name, attempt in {
        "dynamic NTK": lambda: train_step(turning, heads, *long, row_ranks=ranks),
        "three": lambda: RowRanks.split(3),
        "states": lambda: ranks.check(describe(families.build("granite4").config)),
        "one KV head": lambda: ranks.check(describe(families.build("llama-mqa"))),
    }.items():
        try:
            attempt()
            found[name] = "nothing"
        except ValueError as error:
            found[name] = str(error)
    return found


def main() -> None:
    """Run all checks and write down what they found."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = RowRanks.split(2)
    checks: list[Callable[[RowRanks], Any]] = [steps, low_precision, memory, refusals, sharded]
    found = {check.__name__: check(ranks) for check in checks}
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
