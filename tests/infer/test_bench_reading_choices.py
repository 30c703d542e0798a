"""What is timed side by side does the same, and the record has a ratio for all that was tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from locret.cache.layer import UNIT_TENSORS, RetentionLayer
from locret.infer.speed.lab import reading_choices

TINY = reading_choices.ChoiceOptions(
    hidden=24, heads=4, kv_heads=2, head_dim=6, hidden_dim=10, budget=29, chunk=13, repeats=2
)


def sides() -> dict[str, object]:
    torch.manual_seed(3)
    return {name: side() for name, side in reading_choices.sides(TINY).items() if not name.startswith("evict")}


@pytest.mark.parametrize(
    ("used", "tried"),
    [
        ("chunk", "chunk, one mask"),
        ("token", "token, per query head"),
        ("scores", "scores, stacked"),
        ("ratings", "ratings, one at a time"),
    ],
)
def test_what_was_tried_computes_what_is_used(used: str, tried: str) -> None:
    found = sides()
    torch.testing.assert_close(found[used], found[tried], atol=2e-5, rtol=1e-4)


def kept(layer: RetentionLayer) -> list[list[tuple[float, ...]]]:
    """Return per KV head what stays, unit by unit: position, score, key and value."""
    held = [getattr(layer, name)[0, :, : layer.fill] for name in UNIT_TENSORS]
    rows = torch.cat([tensor[..., None].float() if tensor.ndim == 2 else tensor for tensor in held], dim=-1)
    return [sorted(tuple(unit) for unit in head.tolist()) for head in rows]


@pytest.mark.parametrize("chunk", [13, 40])
def test_every_way_to_evict_keeps_the_same_units(chunk: int) -> None:
    options = reading_choices.ChoiceOptions(**{**vars(TINY), "chunk": chunk})
    ways = {}
    for name in ("evict", "evict, number by number", "evict, into the evicted slots"):
        torch.manual_seed(3)
        layer = reading_choices._evictions(options, times=1)[name]()
        assert layer.fill == TINY.budget
        ways[name] = kept(layer)
    assert ways["evict"] == ways["evict, number by number"] == ways["evict, into the evicted slots"]
    assert len(ways["evict"][0]) == TINY.budget
    assert ways["evict"][0] != ways["evict"][1]


def test_a_record_has_a_ratio_for_all_that_was_tried(tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in vars(TINY).items() if name != "output"]
    assert reading_choices.command([*flags, "--output", str(tmp_path / "record")]) == 0
    ratios = json.loads((tmp_path / "record.json").read_text())["ratios"]
    assert len(ratios) == 6
    assert {"scores, stacked / one after the other", "ratings, one at a time / all at once"} < set(ratios)
    page = (tmp_path / "record.md").read_text()
    assert "`python -m locret.infer.speed.lab.reading_choices --heads 4 " in page
    assert all(f"{name} {value}" in page for name, value in (("--hidden", 24), ("--budget", 29), ("--chunk", 13)))
    with pytest.raises(ValueError, match="--heads 8 is no multiple of --kv-heads 3; groups must be equal"):
        reading_choices.command(["--kv-heads=3"])
