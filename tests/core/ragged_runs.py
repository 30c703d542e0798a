"""Follow what every head attends to, and compute it again with dense masks. Imported by the tests beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from locret import RetainingHeads, RetentionPolicy, scorers
from locret.cache.ragged import RaggedStore

BY_HEAD = [scorer.name for scorer in scorers._SCORERS if scorer.by_head]
REFUSED = [scorer.name for scorer in scorers._SCORERS if not scorer.causal and not scorer.by_head]
both_positions = pytest.mark.parametrize("positions", ["compact", "original"])
GREEDY = {"do_sample": False, "eos_token_id": None}


def policy(**changes: Any) -> RetentionPolicy:
    numbers = {"budget": 24, "chunk_size": 10, "stabilizers": 5, "local_len": 6, "head_budgets": "adaptive"}
    return RetentionPolicy(**{**numbers, **changes})


def make(name: str, heads: RetainingHeads) -> Any:
    options: dict[str, dict[str, Any]] = {
        "snapkv": {"window": 7},
        "scissorhands": {"history": 8},
        "expected_attention": {"queries": 8, "future": 30},
    }
    return heads if name == "heads" else scorers.get(name, **options.get(name, {}))


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    width = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - row.shape[1] :] = row[0]
        mask[index, width - row.shape[1] :] = 1
    return ids, mask


class Watch:
    """Records, for each forward pass and store, the positions that each head holds while it attends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: dict[int, list[tuple[int, Tensor]]] = {}
        """Per store, by id: new tokens, and positions held by the heads of the first row."""
        self.stores: list[RaggedStore] = []
        append = RaggedStore.append

        def watched(store: RaggedStore, key_states: Tensor, *rest: Any, **named: Any) -> None:
            append(store, key_states, *rest, **named)
            if id(store) not in self.passes:
                self.stores.append(store)
            held = store.held("positions")[0].clone()
            self.passes.setdefault(id(store), []).append((key_states.shape[2], held))
            self._check_slots(store)

        monkeypatch.setattr(RaggedStore, "append", watched)

    @staticmethod
    def _check_slots(store: RaggedStore) -> None:
        """Check that no two heads share a slot, and none leaves the buffer."""
        for spans in store.segments:
            for one, following in zip(spans, [*spans[1:], slice(store.keys.shape[1], None)], strict=True):
                assert 0 <= one.start <= one.stop <= following.start

    def masks(self, tokens: int) -> list[Tensor]:
        """Return per store (K, tokens, tokens): 0 where a head's queries look, -inf elsewhere."""
        result = []
        for store in self.stores:
            kv_heads = store.counts.shape[1]
            mask = torch.full((kv_heads, tokens, tokens), -torch.inf)
            for new, held in self.passes[id(store)]:
                for head in range(kv_heads):
                    units = held[head][held[head] >= 0].long()
                    for query in range(int(units[-1]) - new + 1, int(units[-1]) + 1):
                        mask[head, query, units[units <= query]] = 0
            result.append(mask)
        return result


def dense_logits(model: Any, ids: Tensor, masks: list[Tensor]) -> Tensor:
    """Return (tokens, vocabulary) logits of one pass over a text in which every head has a mask of its own."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any
    ) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        weights = query @ key.transpose(-1, -2) * scaling + masks[module.layer_idx].repeat_interleave(groups, 0)
        return (weights.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("dense_masks", attention)
    usual = model.config._attn_implementation
    model.set_attn_implementation("dense_masks")
    try:
        with torch.no_grad():
            return model(ids).logits[0]
    finally:
        model.set_attn_implementation(usual)
