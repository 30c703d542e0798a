"""One of the processes that share a backbone by tensor parallelism, which test_tensor_parallel.py starts.

    torchrun --standalone --nproc-per-node 2 tensor_parallel_worker.py FOLDER

Each check compares with the whole backbone, which every process has beside its part, and returns plain data.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import families
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
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
from locret.backbone.adapters import ranks_of
from locret.labels import answer_labels
from locret.mergers.kernels import MergingKernels

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.argv[1])
TINY, HEADS = ROOT / "checkpoints" / "tiny", ROOT / "checkpoints" / "tiny-heads"
POLICY = {"budget": 48, "chunk_size": 64, "stabilizers": 8, "local_len": 8}
NEW = 5


def load(folder: Path, *, split: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """Load a backbone, whole or this process's part."""
    config = {"distributed_config": DistributedConfig(tp_size=dist.get_world_size())} if split else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **config)
    return model.eval().requires_grad_(False)


def tokens(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(5, 800, (1, length), generator=torch.Generator().manual_seed(seed))


class Both:
    """The embedded backbone, whole and in parts."""

    def __init__(self) -> None:
        self.whole, self.part = load(TINY), load(TINY, split=True)
        self.heads = RetainingHeads.from_pretrained(HEADS, allow_other_base=True)
        self.ranks = ranks_of(self.part)
        self.ids = tokens(200)
        if dist.get_rank() == 0:
            MergingKernels.for_model(self.whole, slots=4, seed=0).save_pretrained(FOLDER / "kernels")
            layer = [["vertical_and_slash", 8, 8, 1], ["stream_llm", 4, 16, 1], ["block_sparse", 2, 1, 1]]
            heads = self.whole.config.num_attention_heads
            patterns = [{str(n): layer[(n + nth) % 3] for n in range(heads)} for nth in range(5)]
            (FOLDER / "patterns.json").write_text(json.dumps(patterns))
        dist.barrier()

    def compare(self, scorer: Any = None, part_scorer: Any = None, **policy: Any) -> dict[str, Any]:
        """Read and answer in both; return how far they agree."""
        scorer = self.heads if scorer is None else scorer
        part_scorer = scorer if part_scorer is None else part_scorer
        return compare(self.whole, self.part, scorer, part_scorer, self.ids, **policy)


def compare(whole: Any, part: Any, scorer: Any, part_scorer: Any, ids: torch.Tensor, **policy: Any) -> dict[str, Any]:
    made = RetentionPolicy(**{**POLICY, **policy})
    ours = RetentionCache(part, part_scorer, made)  # what is refused is refused here
    theirs = RetentionCache(whole, scorer, made)
    reference, found = prefill(whole, ids, theirs), prefill(part, ids, ours)
    same = {"logits": float((reference - found).abs().max()), "kept": same_units(theirs, ours)}
    same["bytes"] = [ours.memory().actual, ours.memory().planned, theirs.memory().actual, ours.memory().peak]
    same["evicted"] = ours.seen - max(layer.fill for layer in ours.governed)
    same["tokens"] = [generate(m, cache=c, max_new_tokens=NEW).tolist() for m, c in ((whole, theirs), (part, ours))]
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


# -- the checks -------------------------------------------------------------------------------------------------------


METHODS: dict[str, dict[str, Any]] = {
    "heads, bounded answer": {"decode_budget": 40, "decode_interval": 4},
    "heads, decremental": {"memory": "sqrt", "decremental": True, "min_chunk": 16},
    "heads, 8 bits": {"key_bits": 8, "value_bits": 8, "exact_recent": 8},
    "heads, adaptive heads": {"head_budgets": "adaptive"},
    "infllm": {"scorer": "streaming", "budget": 128, "stabilizers": 0, "local_len": 1, "recall_by": "infllm"},
}


SPARSE = {
    "a_shape": "a_shape:sinks=4,window=64",
    "vertical_slash": "vertical_slash:vertical=8,slash=8",
    "block_sparse": "block_sparse:blocks=1",
    "minference": f"minference:patterns={FOLDER / 'patterns.json'}",
    "xattention": "xattention:threshold=0.5",
}
"""Patterns that leave something out of texts this short."""


def walk(both: Both) -> Any:
    """Run every scorer, lookup, merger and way of reading that there is."""
    cases = {name: dict(case) for name, case in METHODS.items()}
    for name in scorers.names(bare=True):
        cases[f"scorer {name}"] = {"scorer": name}
    for name in sorted({*lookups.names()} - {"infllm"}):
        cases[f"lookup {name}"] = {"host_budget": "all", "recall": 16, "recall_by": name}
    cases["merger loco"] = {"merge": f"loco:kernels={FOLDER / 'kernels'}"}
    for name in prefill_attention.names():
        cases[f"attention {name}"] = {"prefill_attention": SPARSE.get(name, name)}
    found = {}
    for name, case in cases.items():
        try:
            found[name] = _of_case(both, case)
        except ValueError as error:
            found[name] = {"refused": str(error)}
    return found


def _of_case(both: Both, case: dict[str, Any]) -> dict[str, Any]:
    name = case.pop("scorer", None)
    if name == "oracle":
        own = [answer_labels(model, both.ids, tokens(8, 2)) for model in (both.whole, both.part)]
        return both.compare(*(scorers.OracleScorer(labels=labels) for labels in own), **case)
    return both.compare(None if name in (None, "retaining_heads") else scorers.get(name), **case)


FAMILIES = ("qwen3-moe", "gemma3", "phi3")


def backbones(both: Both) -> Any:
    """Compare random backbones of several families; some hold all heads in every process."""
    found = {}
    for name in FAMILIES:
        if dist.get_rank() == 0:
            families.build(name, vocab_size=200).save_pretrained(FOLDER / name)
        dist.barrier()
        whole, part = load(FOLDER / name), load(FOLDER / name, split=True)
        heads, ids = RetainingHeads.for_model(whole, 16, seed=0), families.prompt(160)
        policy = {"budget": 24, "chunk_size": 40, "stabilizers": 4, "local_len": 4}
        found[name] = {"split": ranks_of(part) is not None, **compare(whole, part, heads, heads, ids, **policy)}
    return found


def files(both: Both) -> Any:
    """Save in one process and in all of them, and answer from either file in both ways."""
    policy = RetentionPolicy(**POLICY, host_budget="all", recall=8, recall_by="omnikv:selector=exp,window=8")
    answers = []
    for name, model in (("one", both.whole), ("all", both.part)):
        path, cache = FOLDER / f"{name}.ctx", RetentionCache(model, both.heads, policy)
        prefill(model, both.ids, cache)
        if name == "all" or dist.get_rank() == 0:
            save_cache(cache, path)
        dist.barrier()
        caches = [(one, load_cache(path, one, both.heads)) for one in (both.whole, both.part)]
        answers += [generate(one, cache=held, max_new_tokens=NEW).tolist() for one, held in caches]
    return answers


def broken(both: Both) -> Any:
    """Read with heads whose last process alone finds numbers that are none; every process must hear of it."""
    heads = RetainingHeads.from_pretrained(HEADS, allow_other_base=True)
    with torch.no_grad():
        heads[2].fc2.weight[-1] = torch.nan
    try:
        return repr(prefill(both.part, both.ids, RetentionCache(both.part, heads, RetentionPolicy(**POLICY))))
    except ValueError as error:
        return str(error)


def main() -> None:
    """Run the checks, and write what each process found."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    both, results = Both(), {}
    for check in (walk, backbones, files, broken):
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, check(both))
        results[check.__name__] = everywhere
    if dist.get_rank() == 0:
        (FOLDER / "found.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
