"""Heads of a backbone whose attention heads are shared by processes: each has the part that its own q, k and v need.

A head's first product is split by its inputs, the q, k and v of this process, and one sum over the processes makes the
same hidden numbers everywhere; the second is split by its outputs, the KV heads of this process; what mixes the hidden
numbers of neighbouring tokens is whole in every process. Files hold whole heads, whatever the number of processes.
"""

from __future__ import annotations

import torch
from torch import nn

from locret.backbone.head_ranks import HeadRanks
from locret.heads.fingerprint import weight_fingerprint
from locret.heads.heads import RetainingHeads


class ShardedHeads(RetainingHeads):
    """This process's part of retaining heads, as `sharded` makes it; `config` is that of the whole."""

    whole: str | None
    """Fingerprint of the whole heads."""

    def fingerprint(self) -> str | None:
        """Return that of the whole heads."""
        return self.whole


def sharded(heads: RetainingHeads, ranks: HeadRanks | None) -> RetainingHeads:
    """Return this process's part of heads; they themselves where nobody shares them, or they are a part already.

    Raises:
        ValueError: For gates, which read whole hidden states.
    """
    if ranks is None or isinstance(heads, ShardedHeads):
        return heads
    if heads.config.gate is not None:
        raise ValueError(
            f"gates ({heads.config.gate['name']}) are not shared by processes, as tensor parallelism would have it; "
            "leave out --shard tp"
        )
    with torch.device("meta"):
        parts = ShardedHeads(heads.config)
    parts.whole, parts.allow_other_base = weight_fingerprint(heads), heads.allow_other_base
    with torch.inference_mode(False), torch.no_grad():
        for layer in heads:
            whole, own, shape = heads[layer], parts[layer], heads.config.shape(layer)
            keys, values = shape.num_kv_heads * shape.head_dim, shape.num_kv_heads * shape.value_dim
            states = whole.fc1.weight.split([shape.num_heads * shape.query_dim, keys, values], dim=1)
            own.fc1.weight = _frozen(torch.cat([ranks.own(one, 1) for one in states], dim=1))
            own.fc2.weight = _frozen(ranks.own(whole.fc2.weight, 0))
            own.fc1.in_features, own.fc2.out_features = own.fc1.weight.shape[1], own.fc2.weight.shape[0]
            own.ranks = ranks
    return parts.eval()


def _frozen(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=False)
