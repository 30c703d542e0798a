"""How many units of each layer answers look at: budgets of layers, measured on the rows that are held out.

Layers are not alike: some look at neighbours and hardly at the text, others find what is asked. Log attention compares
across layers, so of as many units as a uniform budget keeps, the best of all layers together say how many each needs.
Half of the budget stays uniform, because an answer needs something of every layer (the floor of Ada-KV, arXiv
2407.11550, whose rule for the heads of a layer this is).
"""

# L layers, K KV heads, T document tokens

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from locret.data.training.stream import TrainingExample
from locret.labels.labels import answer_labels
from locret.labels.many_answers import labels_of_answers

FLOOR = 0.5
"""Part of the budget that all layers have alike."""


def layer_shares(model: nn.Module, rows: Sequence[TrainingExample], budget: int) -> tuple[float, ...]:
    """Return the share of each full-attention layer in a budget, 1 on average.

    Args:
        model: The backbone.
        rows: Rows to measure on.
        budget: Units per KV head.

    Raises:
        ValueError: If no row has more tokens than that.
    """
    longer = check_longer(rows, budget)
    found = [shares_of(_labels(model, row), budget) for row in longer]
    mean_L = torch.stack(found).mean(0)
    return tuple(round(FLOOR + (1 - FLOOR) * share, 3) for share in mean_L.tolist())


def check_longer(rows: Sequence[TrainingExample], budget: int) -> list[TrainingExample]:
    """Return the rows that a budget cannot hold whole: in the others all layers are alike.

    Raises:
        ValueError: If there are none.
    """
    longer = [row for row in rows if row.prompt_ids.shape[1] > budget]
    if not longer:
        most = max(row.prompt_ids.shape[1] for row in rows)
        raise ValueError(
            f"--layer-shares {budget} holds every held-out row whole, the longest of which has {most:,} tokens, so all "
            "layers would be alike; lower it, or give longer rows"
        )
    return longer


def shares_of(labels_LKT: Tensor, budget: int) -> Tensor:
    """Return (L,) the units per KV head of each layer among the best of all, `budget` per head; 1 on average."""
    layers, kv_heads, tokens = labels_LKT.shape
    heads_L = labels_LKT.isfinite().any(dim=-1).sum(dim=-1)  # rows that a layer does not have are -inf
    best = min(budget, tokens) * int(heads_L.sum())
    chosen = labels_LKT.flatten().topk(best).indices // (kv_heads * tokens)
    units_L = torch.bincount(chosen, minlength=layers) / heads_L.clamp(min=1)
    return units_L * layers / units_L.sum()


def _labels(model: nn.Module, row: TrainingExample) -> Tensor:
    if row.asked:
        return labels_of_answers(model, row.prompt_ids, row.asked, "log_attention", include_last_prompt_token=True)
    return answer_labels(model, row.prompt_ids, row.answer_ids, "log_attention", True, row.earlier_answers)
