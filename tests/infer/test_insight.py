"""The pictures that need the backbone: drawn from real samples, at lengths that all of them have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from locret.data import tasks
from locret.data.tasks import Sample
from locret.data.tasks.task import MadeSamples
from locret.infer.evaluation import insight, methods
from locret.infer.evaluation.allotment import Allotment
from locret.infer.evaluation.methods import Setup
from locret.infer.evaluation.runner import Case, plan_runs

POLICIES = [Allotment({"budget": n, "chunk_size": 32, "stabilizers": 8, "local_len": 8}) for n in (48, 32)]


@dataclass
class LooselyFilled(MadeSamples):
    """Samples that fall short of their length, each by another amount, as with long sentences."""

    def sample(self, number: int, tokenizer: Any) -> Sample:
        return self.task.sample(tokenizer, self.tokens - 9 * number, depth=0.5, seed=number)  # type: ignore[attr-defined]


def setup_of(backbone: Path) -> Setup:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    return Setup(model, AutoTokenizer.from_pretrained(backbone), None, 0)


def cases(kind: type[MadeSamples]) -> list[Case]:
    task = tasks.get("passkey")
    return [Case(kind(task, 160, 3, 0), task, index, index, 160, 0) for index in range(3)]


@pytest.mark.slow
def test_consistency_is_averaged_at_prefixes_that_every_text_has(backbone: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    setup = setup_of(backbone)
    shortest = insight.ask(setup, cases(LooselyFilled)[2])[0].ids_1N.shape[1]
    assert 128 <= shortest <= 142
    insight.write(setup, tmp_path, cases(LooselyFilled), plan_runs([methods.get("random")], POLICIES, 160))
    written = json.loads((tmp_path / "consistency.json").read_text())
    assert written["texts"] == 3
    assert written["prefixes"] == [shortest * step // 8 for step in range(1, 9)]
    # Read to its own end, the longest text has units that the prefix lacks.
    assert written["means"]["random"]["itself"] == [1.0] * 8
    assert written["means"]["random"]["everywhere"][-1] < 1


@pytest.mark.slow
def test_each_method_is_shown_and_the_plain_cache_is_not(backbone: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra locret[eval]")
    chosen = [methods.get(name) for name in ("full", "random", "streaming", "oracle")]
    names = insight.write(setup_of(backbone), tmp_path, cases(MadeSamples), plan_runs(chosen, POLICIES, 160))
    steps = [f"retention_steps_{name}.png" for name in ("random", "streaming", "oracle")]
    assert names == [*steps, "consistency.png", "consistency.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    # The oracle's scores are the labels themselves: its agreement with them is no finding.
    assert list(json.loads((tmp_path / "consistency.json").read_text())["means"]) == [
        "random",
        "streaming",
        "accumulated attention",
    ]


def test_plain_cache_alone_gives_no_picture(backbone: Path, tmp_path: Path) -> None:
    runs = plan_runs([methods.get("full")], POLICIES, 160)
    assert insight.write(setup_of(backbone), tmp_path, cases(MadeSamples), runs) == []
    assert list(tmp_path.iterdir()) == []
