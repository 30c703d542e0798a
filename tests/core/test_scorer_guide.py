"""The guide to writing a scorer is true: its example runs, obeys the budget, and takes ten lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from families import build, prompt

from locret import RetentionCache, RetentionPolicy, prefill

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "scorers.md").read_text(), re.DOTALL)


def test_the_example_rates_units_and_answers_within_the_budget() -> None:
    names: dict[str, Any] = {"model": build("llama"), "ids": prompt(90), "__name__": __name__}
    for block in BLOCKS:
        exec(compile(block, "docs/scorers.md", "exec"), names)
    cache, answer = names["cache"], names["answer"]
    assert answer.shape == (1, 98)
    assert cache.kept_positions(0).shape[-1] <= 64 + 8 + 8

    wide = RetentionPolicy(budget=90, chunk_size=17, stabilizers=0, local_len=1)
    whole = RetentionCache(names["model"], names["ValueNormScorer"](), wide)
    prefill(names["model"], names["ids"], whole)
    torch.testing.assert_close(whole.kept_scores(1), whole.layers[1].store.values[:, :, :90].norm(dim=-1))


def test_the_files_that_the_guide_names_exist() -> None:
    root = Path(__file__).parents[2]
    paths = re.findall(r"`((?:locret|tests)/[\w./]+)`", (root / "docs" / "scorers.md").read_text())
    assert len(paths) >= 4
    assert [path for path in paths if not (root / path).exists()] == []
