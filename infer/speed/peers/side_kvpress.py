"""kvpress: the whole context is read, a press keeps the best units, then question and answer. Run by worker.py.

The steps are those of kvpress's own pipeline, without its tokenizer: the decoder alone reads the context under the
press; the question, here the last `local_len` tokens, is read behind it; a greedy loop calls the model at the positions
that tokens have in the text.
"""

from __future__ import annotations

from typing import Any

import kvpress
import torch
from transformers import DynamicCache

PACKAGES = ("kvpress", "transformers")
_PRESSES = {"snapkv": "SnapKVPress", "expected_attention": "ExpectedAttentionPress", "keydiff": "KeyDiffPress"}


def prepare(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the methods: functions of (ids, streamer) that return the units held in the end."""

    def method(kind: str) -> Any:
        return lambda ids, streamer: _answer(model, ids, streamer, kind, job)

    return {name: method(kind) for name, kind in _PRESSES.items()}


def _answer(model: Any, ids: Any, streamer: Any, kind: str, job: dict[str, Any]) -> int:
    context, question = ids[:, : -job["local_len"]], ids[:, -job["local_len"] :]
    seen, cache = context.shape[1], DynamicCache()
    with getattr(kvpress, kind)(compression_ratio=_ratio(seen, job["budget"]))(model):
        model.model(input_ids=context, past_key_values=cache)
    positions = torch.arange(seen, ids.shape[1], device=ids.device)[None]
    logits = model(input_ids=question, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits
    streamer.put(ids)
    for step in range(job["new_tokens"]):
        token = logits[:, -1].argmax(-1)
        streamer.put(token.cpu())
        if step + 1 < job["new_tokens"]:
            positions = torch.tensor([[ids.shape[1] + step]], device=ids.device)
            logits = model(input_ids=token[:, None], past_key_values=cache, position_ids=positions).logits
    streamer.end()
    return int(cache.layers[0].keys.shape[-2])


def _ratio(seen: int, budget: int) -> float:
    # kvpress rounds the kept share of `seen` down: half a unit more keeps exactly `budget`.
    return 0.0 if budget >= seen else 1 - (budget + 0.5) / seen
