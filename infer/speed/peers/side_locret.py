"""This package: chunks, eviction after each, then `generate` on what is kept. Run by worker.py, in our environment."""

from __future__ import annotations

from typing import Any

from locret import RetainingHeads, RetentionCache, RetentionPolicy, generate
from locret.infer.speed import methods

PACKAGES = ("locret", "transformers")


def prepare(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the methods: functions of (ids, streamer) that return the units held in the end."""
    if job["heads"] is None:  # fresh weights cost what trained ones cost
        heads = RetainingHeads.for_model(model, job["hidden_dim"], seed=job["seed"])
    else:
        heads = RetainingHeads.from_pretrained(job["heads"])
    heads.to(model.device)
    shared = RetentionPolicy(**job["policy"])

    def make(name: str) -> Any:
        method = methods.get(name)
        assert isinstance(method, methods.Bounded)
        policy = method.policy(shared)

        def answer(ids: Any, streamer: Any) -> int:
            cache = RetentionCache(model, method.make_scorer(heads), policy)
            generate(model, ids, cache=cache, max_new_tokens=job["new_tokens"], do_sample=False, streamer=streamer)
            return cache.memory().units

        return answer

    return {name: make(name) for name in job["own"]}
