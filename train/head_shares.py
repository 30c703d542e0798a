"""How many units each KV head needs, measured by what the backbone looks at while it repeats passages.

A few heads of a backbone find what is asked, and need most of a text; the others look at its beginning and its end
(DuoAttention, arXiv 2410.10819). Which these are hardly depends on the text, so a share of the budget is measured for
each once: over all heads and layers together, the units that are looked at most are counted, head by head, with a floor
for every head (Ada-KV, arXiv 2407.11550).
"""

# L layers, K KV heads, T tokens of a passage

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from locret.backbone.adapters import describe, input_device, unwrap
from locret.conversation.document import encode, leading_special_ids
from locret.conversation.turns import Transcript
from locret.data import real
from locret.data.training.rows import REQUEST
from locret.labels.many_answers import labels_of_answers

TOKENS, PASSAGES = 1024, 12
"""Of a passage; how many are read, from the parts of the shipped texts that heads may be trained on."""
_ROOM = 128
KEPT, FLOOR = 0.125, 0.2
"""The share of all units that is counted; the share of the mean that every head gets."""


def measurable(model: nn.Module, tokenizer: Any) -> bool:
    """Return whether the tokenizer can write the passages, and the backbone hold one twice."""
    return real.readable(tokenizer) and describe(unwrap(model)).max_positions >= 2 * TOKENS + _ROOM


def head_shares(model: nn.Module, tokenizer: Any, template: str) -> tuple[float, ...]:
    """Return the share of each KV head of each full-attention layer in a budget, layer by layer, 1 on average."""
    backbone = describe(unwrap(model))
    heads = [shape.num_kv_heads for shape in backbone.full_shapes]
    counts = torch.zeros(len(heads), max(heads))
    sets = [real.pieces(name, tokenizer, TOKENS, seen=True) for name in real.SETS if name != real.UNSEEN]
    passages = [piece.text for found in sets for piece in found[: PASSAGES // len(sets)]]
    for text in tqdm(passages, desc="head shares", unit="passage", disable=None):
        counts += counted(_labels(model, tokenizer, template, text)) / len(passages)
    return tuple(round(float(count), 4) for row, own in zip(counts, heads, strict=True) for count in row[:own])


def counted(labels_LKT: Tensor) -> Tensor:
    """Return (L, K) shares, 1 on average: how many of the units with the largest labels each head holds."""
    there = labels_LKT[..., 0] > -torch.inf
    heads, tokens = int(there.sum()), labels_LKT.shape[-1]
    least = max(1, int(FLOOR * KEPT * tokens))
    floor = torch.zeros_like(labels_LKT, dtype=torch.bool)
    floor.scatter_(-1, labels_LKT.topk(least, dim=-1).indices, True)
    ranked = labels_LKT.masked_fill(floor, torch.inf).masked_fill(~there[..., None], -torch.inf)
    kept = ranked.flatten().topk(int(KEPT * tokens) * heads).indices
    counts = torch.bincount(kept // tokens, minlength=there.numel()).view_as(there).float()
    return counts * heads / counts.sum()


def _labels(model: nn.Module, tokenizer: Any, template: str, text: str) -> Tensor:
    before, after = Transcript(tokenizer, template).around(REQUEST)
    special = leading_special_ids(tokenizer) if template != "chat" else []
    device = input_device(model)
    document, request, answer = (
        torch.tensor(ids, device=device)
        for ids in (special + encode(tokenizer, before + text), encode(tokenizer, after), encode(tokenizer, text))
    )
    return labels_of_answers(model, document, [(request, answer)], "log_attention", True).cpu()
