"""lm-evaluation-harness's own long-context tasks through the model `locret`, on local rows in their published formats.

The rows are our own; the prompts, the splitting into requests and the metrics are the harness's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra locret[eval])")
pytestmark = pytest.mark.engine

CHECKPOINT = Path(__file__).parents[2] / "checkpoints" / "tiny"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
ROWS = [
    {"input": f"{NOISE * 12}Mary went to the {place}. {NOISE}", "question": "Where is Mary?", "target": place}
    for place in ("office", "garden")
]


def local_task(folder: Path) -> str:
    """Write a task that differs from the harness's BABILong in its rows alone, and return its name."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    base = Path(lm_eval.__file__).parent / "tasks/babilong/babilong_qa1.yaml"
    (folder / "own.yaml").write_text(
        f"include: {base}\ntask: own\ntag: local\ncustom_dataset: null\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs:\n  data_files:\n    qa1: {rows}\n"
    )
    return "own"


def test_a_task_of_the_harness_runs_through_the_bounded_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    from locret.infer.evaluation.harness_model import LocretLM

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    own = local_task(tmp_path)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    sizes = {"stabilizers": 8, "chunk_size": 64, "local_len": 8}
    options: dict[str, Any] = {"gen_kwargs": "max_gen_toks=4", "bootstrap_iters": 0, "log_samples": True}
    for budget in (64, 4096):
        model = LocretLM(pretrained=str(CHECKPOINT), device="cpu", scorer="streaming", budget=budget, **sizes)
        found = lm_eval.simple_evaluate(model=model, tasks=[own], task_manager=manager, **options)
        samples = found["samples"][own]
        assert len(samples) == len(ROWS)
        assert all("green" in str(sample["arguments"]) for sample in samples)
        assert any(isinstance(value, float) for value in found["results"][own].values())
        # What stays of a prompt, its last tokens and the answer.
        assert (model.peak_units <= 64 + 8 + 4) == (budget == 64)
