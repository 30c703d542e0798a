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
ROWS: dict[str, list[dict[str, Any]]] = {
    "babilong/babilong_qa1": [
        {"input": f"{NOISE * 12}Mary went to the {place}. {NOISE}", "question": "Where is Mary?", "target": place}
        for place in ("office", "garden")
    ],
    "longbench2/academic_single": [
        {"context": f"{NOISE * 12}It is {word}.", "question": "Which?", "choices": list("wxyz"), "answer": answer}
        for answer, word in enumerate(("w", "x"))
    ],
    "longproc/path_traversal_0.5k": [
        {
            "input_prompt": f"{NOISE * 12}Oslo is joined to Rome. Name the route.",
            "reference_output": "From Oslo, take a bus to Rome.",
            "metadata": "{}",
        }
    ]
    * 2,
}


def local_task(folder: Path, name: str) -> str:
    """Write a task that differs from the harness's in its rows alone, and return its name."""
    family, _, file = name.partition("/")
    rows, own = folder / f"{file}.jsonl", f"local_{family}"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    base = Path(lm_eval.__file__).parent / "tasks" / family / f"{file}.yaml"
    split = {"babilong": "qa1", "longbench2": "train", "longproc": "test"}[family]
    (folder / f"{own}.yaml").write_text(
        f"include: {base}\ntask: {own}\ntag: local\ncustom_dataset: null\ndataset_path: json\ndataset_name: null\n"
        f"dataset_kwargs:\n  data_files:\n    {split}: {rows}\n"
    )
    return own


@pytest.mark.parametrize("name", ROWS)
def test_a_task_of_the_harness_runs_through_the_bounded_cache(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    from locret.infer.evaluation.harness_model import LocretLM

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    own = local_task(tmp_path, name)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    for budget in (64, 4096):
        model = LocretLM(
            pretrained=str(CHECKPOINT), device="cpu", scorer="streaming", budget=budget, stabilizers=8, chunk_size=64,
            local_len=8,
        )  # fmt: skip
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[own],
            task_manager=manager,
            gen_kwargs=None if "bench" in name else "max_gen_toks=4",
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=True,  # all of longproc is marked so, as one of its metrics compiles answers
        )
        samples = found["samples"][own]
        assert len(samples) == len(ROWS[name])
        assert all("green" in str(sample["arguments"]) for sample in samples)
        assert any(isinstance(value, float) for value in found["results"][own].values())
        # What stays of a prompt, its last tokens and the answer.
        assert (model.peak_units <= 64 + 8 + 4) == (budget == 64)


def test_its_ruler_finds_a_needle_among_noise_in_64_units() -> None:
    pytest.importorskip("wonderwords", reason="its RULER needs wonderwords (pip install 'lm_eval[ruler]')")
    pytest.importorskip("nltk", reason="its RULER needs nltk (pip install 'lm_eval[ruler]')")
    from lm_eval.tasks import TaskManager

    from locret.infer.evaluation.harness_model import LocretLM

    heads = str(CHECKPOINT.parent / "tiny-heads")
    model = LocretLM(
        pretrained=str(CHECKPOINT), device="cpu", heads=heads, budget=64, stabilizers=8, chunk_size=128, local_len=16
    )
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=["niah_single_1"],
        task_manager=TaskManager(metadata={"max_seq_lengths": [512], "pretrained": str(CHECKPOINT)}),
        gen_kwargs="max_gen_toks=24",
        apply_chat_template=True,
        limit=3,
        bootstrap_iters=0,
    )
    assert found["results"]["niah_single_1"]["512,none"] == 1.0
    assert model.peak_units <= 64 + 16 + 24
