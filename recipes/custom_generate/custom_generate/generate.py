"""Answer a prompt of any length in a fixed amount of memory, as `model.generate(custom_generate=...)`."""

from __future__ import annotations

from typing import Any


def generate(
    model: Any,
    inputs: Any = None,
    input_ids: Any = None,
    attention_mask: Any = None,
    heads: str | None = None,
    scorer: str = "expected_attention",
    budget: int | None = None,
    policy: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Read the prompt chunk by chunk within a budget, then answer.

    Args:
        model: The model, given by transformers.
        inputs: (B, N) token ids, or `input_ids`.
        input_ids: See `inputs`.
        attention_mask: (B, N), 0 for padding on the left.
        heads: Folder or Hub id of retaining heads trained for this model.
        scorer: Name of a training-free method, where there are no heads.
        budget: Cache units (the key and value of one token in one KV head of one layer) that stay per head and layer.
        policy: Other numbers of locret.RetentionPolicy, by name.
        **options: Options of `model.generate`.
    """
    from locret import RetainingHeads, RetentionCache
    from locret import generate as answer
    from locret.policy.resolve import resolve

    rater = RetainingHeads.from_pretrained(heads) if heads else scorer
    recommended = (rater.config.policy or {}) if isinstance(rater, RetainingHeads) else {}
    own = {**(policy or {}), **({} if budget is None else {"budget": budget})}
    cache = RetentionCache(model, rater, resolve(own, recommended))
    ids = inputs if input_ids is None else input_ids
    return answer(model, ids, cache=cache, attention_mask=attention_mask, **options)
