"""Who the trained heads are compared with: nobody who has them too, and nobody who keeps more besides."""

from __future__ import annotations

from locret.infer.evaluation.world import record

_HELD = {"cache_bytes": 720, "kept_units": 72}
SHARES = {
    **{"locret": 0.5, "locret+adaptive_heads": 0.9, "locret+recall:host_budget=512": 1.0, "locret+original": 1.0},
    **{"oracle_agnostic+original": 1.0, "tova": 0.1, "random": 0.0},
}


def test_no_rival_has_the_trained_heads_or_units_besides_the_budget() -> None:
    own = [
        {"seed": 0, "task": "passkey", "tokens": 256, "index": text, "method": name, "score": score, **_HELD}
        for name, score in SHARES.items()
        for text in range(2)
    ]
    assert record.best(own, 1) == ["tova"]
    assert [(one["rival"], one["difference"]) for one in record.ahead(own)] == [("tova", 40.0)]
    assert record.untrained(SHARES) == ["tova", "random"]
    assert record.bounded(SHARES) == [name for name in SHARES if "recall" not in name]
