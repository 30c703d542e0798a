"""What an optimizer remembers of heads that processes share: saved as if one process had trained the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from locret.heads.heads import RetainingHeads
from locret.heads.shard import ShardedHeads, part_of, whole_of


def whole_moments(state: Mapping[str, Any], heads: RetainingHeads) -> dict[str, Any]:
    """Return the state of an optimizer with the moments of whole heads; called in all processes alike.

    Args:
        state: Of an optimizer of the heads' parameters, in their order.
        heads: The heads; where nobody shares them, the state is whole already.
    """
    if not isinstance(heads, ShardedHeads):
        return dict(state)
    return _changed(state, heads, partial(whole_of, config=heads.config, ranks=heads.ranks))


def own_moments(state: Mapping[str, Any], heads: RetainingHeads) -> dict[str, Any]:
    """Undo `whole_moments`."""
    if not isinstance(heads, ShardedHeads):
        return dict(state)
    return _changed(state, heads, partial(part_of, config=heads.config, ranks=heads.ranks))


def _changed(state: Mapping[str, Any], heads: RetainingHeads, change: Callable[..., Tensor]) -> dict[str, Any]:
    names = [name for name, _ in heads.named_parameters()]
    moments = {
        index: {key: change(one, names[index]) if one.ndim == 2 else one for key, one in held.items()}
        for index, held in state["state"].items()
    }
    return {**state, "state": moments}
