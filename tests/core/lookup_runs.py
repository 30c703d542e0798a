"""Runs of lookups that are methods of their own, and the oracle beside them. Imported by the tests."""

from __future__ import annotations

from typing import Any

import oracle as reference
import torch
from oracle.sparse_reading import Visible
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, generate, lookups

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
LAYERS = {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
INV_FREQ = 10000.0 ** -(torch.arange(0, 8, 2).float() / 8)


def method(spec: str, recall: int | None = None, **changes: Any) -> RetentionPolicy:
    """Return the policy of a lookup that is a method of its own."""
    own = lookups.get(spec).as_method()
    assert own is not None
    given = {} if recall is None else {"recall": recall}
    return RetentionPolicy(**{"chunk_size": 17, **own, "recall_by": spec, **given, **changes})


def fresh(model: Any, policy: RetentionPolicy) -> RetentionCache:
    """Return a cache that keeps the newest units in fast memory."""
    return RetentionCache(model, "streaming:sinks=0", policy)


def answered(model: Any, cache: RetentionCache, ids: Tensor | None, tokens: int = 5, **options: Any) -> Any:
    """Return the answer with its logits."""
    asked = {"max_new_tokens": tokens, "output_logits": True, "return_dict_in_generate": True}
    return generate(model, ids, cache=cache, **asked, **GREEDY, **options)


@torch.no_grad()
def differs_from_oracle(
    model: Any, ids: Tensor, policy: RetentionPolicy, passes: list[int], visible: Visible
) -> tuple[float, float]:
    """Return by how much logits of an answer differ from the oracle's, and from full attention's.

    The last token of the prompt is fed once more for its logits, so that it is read as an answer is.
    """
    out = answered(model, fresh(model, policy), ids)
    ours, text = torch.stack(out.logits)[:, 0], out.sequences[0, :-1]
    steps = [*passes, *[1] * len(ours)]
    theirs = reference.read_by_choice(model, text, steps, INV_FREQ, 1.0, visible)[-len(ours) :]
    full = model(text[None]).logits[0, -len(ours) :]
    return float((ours - theirs).abs().max()), float((ours - full).abs().max())
