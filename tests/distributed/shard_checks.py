"""What `test_sharding.py` starts in two processes: a sharded backbone beside a whole one.

torchrun --standalone --nproc-per-node 2 tests/distributed/shard_checks.py fsdp

Every process measures, the first one prints a JSON object: name -> what each of them found.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate, prefill
from locret.backbone.adapters import input_device
from locret.backbone.passes import in_step
from locret.distributed.ranks import Ranks, joined
from locret.heads.fingerprint import weight_fingerprint
from locret.loading import load_config, load_model
from locret.loading.options import BackboneSource
from locret.train.step import train_step

MODEL, CPU = "checkpoints/tiny", torch.device("cpu")
POLICY = RetentionPolicy(budget=64, chunk_size=128, stabilizers=16, local_len=16)


def ids(own: Ranks, tokens: int) -> Tensor:
    """Return text that every process has another of."""
    return torch.randint(5, 800, (1, tokens), generator=torch.Generator().manual_seed(7 + own.rank))


def trained(model: nn.Module, row: Tensor) -> Tensor:
    """Return loss and gradients of one row, in one vector."""
    heads = RetainingHeads.for_model(model, 32, seed=0).requires_grad_(True)
    result = train_step(model, heads, row[:, :-20], row[:, -20:])
    return torch.cat([result.total[None], *(p.grad.flatten() for p in heads.parameters() if p.grad is not None)])


def answered(model: nn.Module, heads: RetainingHeads, row: Tensor, new: int, **options: Any) -> tuple[Tensor, Any]:
    """Return the logits after a prompt; and what was written, kept and held."""
    cache = RetentionCache(model, copy.deepcopy(heads), POLICY)
    logits = prefill(model, row, cache)
    text = generate(model, cache=cache, max_new_tokens=new, **options)
    kept = [cache.kept_positions(layer).tolist() for layer in range(len(cache.governed))]
    return logits, [text.tolist(), kept, cache.memory().to_dict(), cache.seen]


def measure(own: Ranks, whole: nn.Module, model: nn.Module, heads: RetainingHeads) -> dict[str, Any]:
    """Return differences between the backbones, which are to be 0.0 or True."""
    row = ids(own, 300 + 256 * own.rank)

    def apart(function: Callable[[nn.Module], Tensor]) -> float:
        return (function(whole) - function(model)).abs().max().item()

    found: dict[str, Any] = {"train_step": apart(lambda one: trained(one, row))}
    # As many as the number of the process says, and answers of other lengths.
    (logits, facts), (others, same) = (answered(one, heads, row, 3 + 6 * own.rank) for one in (whole, model))
    found |= {"prefill": (logits - others).abs().max().item(), "generate": facts == same}
    with in_step(model):  # only one process has something to read
        found["alone"] = own.is_main or answered(model, heads, row, 5)[1] == answered(whole, heads, row, 5)[1]
    found["fingerprint"] = weight_fingerprint(model) == weight_fingerprint(whole)
    found["device"] = input_device(model) == CPU
    found["share"] = held(model) / sum(weight.numel() for weight in whole.parameters())
    return found


def adapted_alike(own: Ranks, shard: str, heads: RetainingHeads) -> bool:
    """Return whether a sharded backbone with an adapter reads and writes what a whole one does.

    Products must not depend on where a weight lies (MKL_CBWR=COMPATIBLE): what was gathered lies elsewhere.
    """
    adapter = f"{own.gather(tempfile.mkdtemp())[0]}/adapter"
    if own.is_main:
        write_adapter(Path(MODEL), adapter)
    own.gather(None)
    (logits, one), (others, other) = (
        answered(loaded(adapter=adapter, shard=shard), heads, ids(own, 200), 5) for shard in (None, shard)
    )
    return bool(torch.equal(logits, others)) and one == other


def loaded(**options: Any) -> Any:
    source = BackboneSource(model=MODEL, dtype="float32", **options)
    return load_model(source, load_config(source), CPU, torch.float32)


def write_adapter(backbone: Path, adapter: str) -> None:
    """Write a LoRA adapter that changes something."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(backbone), config).save_pretrained(adapter)


def held(model: nn.Module) -> int:
    """Count the weights that this process holds between two passes."""
    count = 0
    for weight in model.parameters():
        if hasattr(weight, "ds_tensor"):
            count += weight.numel() + weight.ds_tensor.numel()
        else:
            count += weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel()
    return count


def main(shard: str) -> None:
    torch.set_num_threads(1)
    with joined("shard_checks") as own:
        heads = RetainingHeads.from_pretrained("checkpoints/tiny-heads", allow_other_base=True)
        whole, model = loaded(), loaded(shard=shard)
        found = own.gather(measure(own, whole, model, heads) | {"adapter": adapted_alike(own, shard, heads)})
        if own.is_main:
            sys.stdout.write(json.dumps({name: [one[name] for one in found] for name in found[0]}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
