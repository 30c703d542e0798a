"""Heads of a backbone whose attention heads are shared by processes: each has the part that its own q, k and v need.

A head's first product is split by its inputs, the q, k and v of this process, and one sum over the processes makes the
same hidden numbers everywhere; the second is split by its outputs, the KV heads of this process; what mixes the hidden
numbers of neighbouring tokens is whole in every process. Files hold whole heads, whatever the number of processes.
"""

# R = hidden_dim, F features, K KV heads

from __future__ import annotations

import torch
from torch import Tensor, nn

from locret.backbone.head_ranks import HeadRanks
from locret.heads.config import HeadsConfig
from locret.heads.heads import RetainingHeads


class ShardedHeads(RetainingHeads):
    """This process's part of retaining heads, as `sharded` makes it; `config` is that of the whole."""

    ranks: HeadRanks

    @classmethod
    def of(cls, whole: RetainingHeads, ranks: HeadRanks) -> ShardedHeads:
        """Return this process's part of whole heads.

        Raises:
            ValueError: For gates, which read whole hidden states.
        """
        if whole.config.gate is not None:
            raise ValueError(
                f"gates ({whole.config.gate['name']}) are not shared by processes, as tensor parallelism would have "
                "it; leave out --shard tp"
            )
        with torch.device("meta"):
            heads = cls(whole.config)
        heads.ranks, heads.allow_other_base = ranks, whole.allow_other_base
        weights = whole.state_dict()
        with torch.inference_mode(False), torch.no_grad():
            for layer in heads.layers:
                head = heads[layer]
                head.ranks = ranks
                for part in ("fc1", "fc2", *(["mix"] if head.mix is not None else [])):
                    name = f"heads.{layer}.{part}.weight"
                    own = part_of(weights[name], name, whole.config, ranks).clone()
                    getattr(head, part).weight = nn.Parameter(own, requires_grad=False)
                head.fc1.in_features, head.fc2.out_features = head.fc1.weight.shape[1], head.fc2.weight.shape[0]
        return heads.eval()

    def whole(self) -> RetainingHeads:
        """Return the whole heads, on the CPU; called in all processes alike."""
        weights = {
            name: whole_of(weight, name, self.config, self.ranks).cpu() for name, weight in self.state_dict().items()
        }
        heads = RetainingHeads._with_weights(self.config, weights)
        heads.allow_other_base = self.allow_other_base
        return heads


def sharded(heads: RetainingHeads, ranks: HeadRanks | None) -> RetainingHeads:
    """Return this process's part of heads; they themselves where nobody shares them, or they are a part already."""
    return heads if ranks is None or isinstance(heads, ShardedHeads) else ShardedHeads.of(heads, ranks)


def part_of(whole: Tensor, name: str, config: HeadsConfig, ranks: HeadRanks) -> Tensor:
    """Return this process's part of a weight, or of anything of its shape."""
    if _is_mix(name):
        return whole
    widths = _widths(name, config)
    if widths is None:
        return ranks.own(whole, 0)
    return torch.cat([ranks.own(states, 1) for states in whole.split(widths, dim=1)], dim=1)


def whole_of(own: Tensor, name: str, config: HeadsConfig, ranks: HeadRanks) -> Tensor:
    """Undo `part_of`; called in all processes alike."""
    if _is_mix(name):
        return own
    widths = _widths(name, config)
    if widths is None:
        return ranks.gather(own, 0)
    states = own.split([width // ranks.size for width in widths], dim=1)
    return torch.cat([ranks.gather(one, 1) for one in states], dim=1)


def _is_mix(name: str) -> bool:
    return name.endswith(".mix.weight")


def _widths(name: str, config: HeadsConfig) -> list[int] | None:
    """Return how many inputs of W1 are q, k and v; None for W2, whose outputs are KV heads."""
    _, layer, part, _ = name.split(".")
    shape = config.shape(int(layer))
    if part == "fc2":
        return None
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    return [heads * shape.query_dim, kv_heads * shape.head_dim, kv_heads * shape.value_dim]
