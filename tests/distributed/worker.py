"""What the tests beside it start in two processes: parts of a backbone beside the whole one.

    torchrun --standalone --nproc-per-node 2 tests/distributed/worker.py fsdp FOLDER

Every process measures, the first one prints a JSON object: name -> what each of them found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import families
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from locret import (
    RetainingHeads,
    RetentionCache,
    RetentionPolicy,
    generate,
    load_cache,
    lookups,
    prefill,
    prefill_attention,
    save_cache,
    scorers,
)
from locret.backbone.adapters import input_device, ranks_of
from locret.backbone.passes import in_step
from locret.distributed.ranks import Ranks, joined
from locret.heads.fingerprint import weight_fingerprint
from locret.labels import answer_labels
from locret.loading import load_config, load_model
from locret.loading.options import ShardedSource
from locret.mergers.kernels import MergingKernels
from locret.train.step import train_step

MODEL, CPU, FOLDER = "checkpoints/tiny", torch.device("cpu"), Path(sys.argv[2])
POLICY = {"budget": 48, "chunk_size": 64, "stabilizers": 8, "local_len": 8}
NEW = 5


def loaded(model: str | Path = MODEL, **options: Any) -> Any:
    """Load a backbone, whole or this process's part."""
    source = ShardedSource(model=str(model), dtype="float32", **options)
    return load_model(source, load_config(source), CPU, torch.float32)


def heads() -> RetainingHeads:
    return RetainingHeads.from_pretrained("checkpoints/tiny-heads", allow_other_base=True)


def tokens(length: int, seed: int = 1) -> Tensor:
    return torch.randint(5, 800, (1, length), generator=torch.Generator().manual_seed(seed))


def compare(
    whole: Any, part: Any, scorer: Any, ids: Tensor, part_scorer: Any = None, new: int = NEW, **policy: Any
) -> dict[str, Any]:
    """Read and answer with both; return how far they agree."""
    made = RetentionPolicy(**{**POLICY, **policy})
    ours = RetentionCache(part, part_scorer or scorer, made)  # what is refused is refused here
    theirs = RetentionCache(whole, scorer, made)
    reference, found = prefill(whole, ids, theirs), prefill(part, ids, ours)
    same: dict[str, Any] = {"logits": float((reference - found).abs().max()), "kept": same_units(theirs, ours)}
    same["bytes"] = [ours.memory().actual, ours.memory().planned, theirs.memory().actual, ours.memory().peak]
    same["evicted"] = ours.seen - max(layer.fill for layer in ours.governed)
    same["tokens"] = [generate(m, cache=c, max_new_tokens=new).tolist() for m, c in ((whole, theirs), (part, ours))]
    same["kept_after"] = same_units(theirs, ours)
    return same


def same_units(whole: RetentionCache, part: RetentionCache) -> bool:
    """Return whether this process holds the units of its KV heads, and scores them alike."""
    alike = True
    for layer in whole.backbone.layers:
        positions, scores = whole.kept_positions(layer), whole.kept_scores(layer)
        if part.ranks is not None:
            positions, scores = (part.ranks.own(one, 1) for one in (positions, scores))
        alike &= torch.equal(positions, part.kept_positions(layer))
        alike &= bool(torch.allclose(scores, part.kept_scores(layer), rtol=1e-4, atol=1e-4))
    return alike


# -- layers that come together while they run -------------------------------------------------------------------------


def gathered(own: Ranks, shard: str) -> dict[str, Any]:
    """Compare a backbone of which every process holds a slice of each layer; each process has a text of its own.

    Products must not depend on where a weight lies (MKL_CBWR=COMPATIBLE): what was gathered lies elsewhere.
    """
    whole, part = loaded(), loaded(shard=shard)
    row = tokens(300 + 256 * own.rank, 7 + own.rank)
    found: dict[str, Any] = {"train_step": float((trained(whole, row) - trained(part, row)).abs().max())}
    # As many as the number of the process says, and answers of other lengths.
    found["read"] = compare(whole, part, heads(), row, new=3 + 6 * own.rank)
    with in_step(part):  # only one process has something to read
        found["alone"] = found["read"] if own.is_main else compare(whole, part, heads(), row)
    found["same"] = weight_fingerprint(part) == weight_fingerprint(whole) and input_device(part) == CPU
    found["share"] = held(part) / sum(weight.numel() for weight in whole.parameters())
    if own.is_main:
        write_adapter(FOLDER / "adapter")
    own.gather(None)
    adapted = (loaded(adapter=str(FOLDER / "adapter"), shard=way) for way in (None, shard))
    return found | {"adapter": compare(*adapted, heads(), tokens(200, own.rank))}


def trained(model: nn.Module, row: Tensor) -> Tensor:
    """Return loss and gradients of one row, in one vector."""
    fresh = RetainingHeads.for_model(model, 32, seed=0).requires_grad_(True)
    result = train_step(model, fresh, row[:, :-20], row[:, -20:])
    return torch.cat([result.total[None], *(p.grad.flatten() for p in fresh.parameters() if p.grad is not None)])


def write_adapter(folder: Path) -> None:
    """Write a LoRA adapter that changes something."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), config).save_pretrained(folder)


def held(model: nn.Module) -> int:
    """Count the weights that this process holds between two passes."""
    count = 0
    for weight in model.parameters():
        if hasattr(weight, "ds_tensor"):
            count += weight.numel() + weight.ds_tensor.numel()
        else:
            count += weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel()
    return count


# -- heads that are shared out ----------------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "heads, bounded answer": {"decode_budget": 40, "decode_interval": 4},
    "heads, decremental": {"memory": "sqrt", "decremental": True, "min_chunk": 16},
    "heads, 8 bits": {"key_bits": 8, "value_bits": 8, "exact_recent": 8},
    "heads, adaptive heads": {"head_budgets": "adaptive"},
    "infllm": {"scorer": "streaming", "budget": 128, "stabilizers": 0, "local_len": 1, "recall_by": "infllm"},
    "merger loco": {"merge": f"loco:kernels={FOLDER / 'kernels'}"},
}
SPARSE = {
    "a_shape": "a_shape:sinks=4,window=64",
    "vertical_slash": "vertical_slash:vertical=8,slash=8",
    "block_sparse": "block_sparse:blocks=1",
    "minference": f"minference:patterns={FOLDER / 'patterns.json'}",
    "xattention": "xattention:threshold=0.5",
}
"""Patterns that leave something out of texts this short."""
PATTERNS = (["vertical_and_slash", 8, 8, 1], ["stream_llm", 4, 16, 1], ["block_sparse", 2, 1, 1])
FAMILIES = ("qwen3-moe", "gemma3", "phi3")


def shared_out(own: Ranks) -> dict[str, Any]:
    """Compare a backbone whose heads the processes share, and backbones of several families."""
    whole, part = loaded(), loaded(shard="tp")
    if own.is_main:
        MergingKernels.for_model(whole, slots=4, seed=0).save_pretrained(FOLDER / "kernels")
        count = whole.config.num_attention_heads
        patterns = [{str(n): PATTERNS[(n + nth) % 3] for n in range(count)} for nth in range(5)]
        (FOLDER / "patterns.json").write_text(json.dumps(patterns))
        for name in FAMILIES:
            families.build(name, vocab_size=200).save_pretrained(FOLDER / name)
    own.gather(None)
    found = {"walk": walk(whole, part), "backbones": {name: of_family(name) for name in FAMILIES}}
    return found | {"files": files(own, whole, part), "broken": broken(part)}


def walk(whole: Any, part: Any) -> dict[str, Any]:
    """Run every scorer, lookup, merger and way of reading that there is."""
    bare = [name for name in scorers.names() if not scorers.find(name).needs or name == "oracle"]
    cases = {
        **METHODS,
        **{f"scorer {name}": {"scorer": name} for name in bare},
        **{
            f"lookup {name}": {"host_budget": "all", "recall": 16, "recall_by": name}
            for name in lookups.names()
            if name != "infllm"
        },
        **{f"attention {name}": {"prefill_attention": SPARSE.get(name, name)} for name in prefill_attention.names()},
    }
    found = {}
    for name, case in cases.items():
        try:
            found[name] = of_case(whole, part, **case)
        except ValueError as error:
            found[name] = {"refused": str(error)}
    return found


def of_case(whole: Any, part: Any, scorer: str | None = None, **policy: Any) -> dict[str, Any]:
    """Read and answer by the method of that name, or by retaining heads."""
    ids, given = tokens(200), [heads(), None] if scorer is None else [scorer, None]
    if scorer == "oracle":
        given = [scorers.OracleScorer(labels=answer_labels(one, ids, tokens(8, 2))) for one in (whole, part)]
    return compare(whole, part, given[0], ids, given[1], **policy)


def of_family(name: str) -> dict[str, Any]:
    """Compare a random backbone of a family; some hold all heads in every process."""
    whole, part = loaded(FOLDER / name), loaded(FOLDER / name, shard="tp")
    policy = {"budget": 24, "chunk_size": 40, "stabilizers": 4, "local_len": 4}
    same = compare(whole, part, RetainingHeads.for_model(whole, 16, seed=0), families.prompt(160), **policy)
    return {"split": ranks_of(part) is not None, **same}


def files(own: Ranks, whole: Any, part: Any) -> list[Any]:
    """Save in one process and in all of them, and answer from either file in both ways."""
    policy = RetentionPolicy(**POLICY, host_budget="all", recall=8, recall_by="omnikv:selector=exp,window=8")
    answers = []
    for name, model in (("one", whole), ("all", part)):
        path, cache = FOLDER / f"{name}.ctx", RetentionCache(model, heads(), policy)
        prefill(model, tokens(200), cache)
        if name == "all" or own.is_main:
            save_cache(cache, path)
        own.gather(None)
        caches = [(one, load_cache(path, one, heads())) for one in (whole, part)]
        answers += [generate(one, cache=held, max_new_tokens=NEW).tolist() for one, held in caches]
    return answers


def broken(part: Any) -> str:
    """Read with heads whose last process alone finds numbers that are none; every process must hear of it."""
    spoilt = heads()
    with torch.no_grad():
        spoilt[2].fc2.weight[-1] = torch.nan
    try:
        return repr(prefill(part, tokens(200), RetentionCache(part, spoilt, RetentionPolicy(**POLICY))))
    except ValueError as error:
        return str(error)


def main(shard: str) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with joined() as own:
        found = own.gather(shared_out(own) if shard == "tp" else gathered(own, shard))
        if own.is_main:
            sys.stdout.write(json.dumps({name: [one[name] for one in found] for name in found[0]}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
