"""What runs of `locret-eval` leave, without the times, which differ, and tiny published files of our own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from locret.data.tasks import Sample, Task
from locret.data.tasks.prompts import build_prompt
from locret.infer.evaluation.methods import Prompt, Setup, text_tokens

RECORD: dict[str, Any] = {
    **{"task": "passkey", "version": 1, "tokens": 300, "index": 0, "method": "random"},
    **{"budget": 64, "chunk_size": 32, "stabilizers": 16, "protocol": "aware"},
    **{"score": 1.0, "prediction": "48213", "targets": ["48213"]},
    **dict.fromkeys(("prompt_tokens", "generated_tokens", "kept_units", "peak_units", "cache_bytes", "peak_bytes"), 9),
    **dict.fromkeys(("prefill_seconds", "decode_seconds"), 0.5),
}
"""A line of samples.jsonl."""
TIMES = ("prefill_seconds", "decode_seconds", "prefill_tokens_per_second", "decode_tokens_per_second")


def records(folder: Path, name: str = "samples.jsonl") -> list[dict[str, Any]]:
    lines = (folder / name).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def cells(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in cell.items() if k not in TIMES} for cell in results(folder)["cells"]]


def prompts(setup: Setup, task: Task, samples: Sequence[Sample]) -> list[Prompt]:
    """Return the prompts of questions about one text."""
    import torch

    text, built = partial(text_tokens, setup, task, samples[0]), partial(build_prompt, task, tokenizer=setup.tokenizer)
    return [Prompt(setup, task, torch.tensor([built(one).ids]), one, text) for one in samples]


NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
FACTS = {"Oslo": "4821337", "Rome": "9931205", "Bonn": "1120984"}
_PASSKEY = {"context": NOISE * 30 + "The pass key is 48213. " + NOISE * 3, "input": "What is the pass key?"}
_ASKED = {"instructions": ["Where is the house?", "What is blue?"], "outputs": ["near the river", "the sky"]}
_TEXT = NOISE * 4 + " ".join(f"The number of {key} is {value}." for key, value in FACTS.items()) + " " + NOISE * 4
_TURNS = [{"input": f"What is the number of {key}?", "answer": value} for key, value in FACTS.items()]
ROWS: dict[str, list[dict[str, Any]]] = {
    "infinitebench/data/passkey": [{**_PASSKEY, "id": number, "answer": ["48213"]} for number in range(5)],
    "leval/LEval-data/Open-ended-tasks/natural_question": [{"input": NOISE * 30, **_ASKED, "evaluation": "f1"}],
    "leval/LEval-data/Open-ended-tasks/meeting_summ": [{"input": NOISE * 30, **_ASKED, "evaluation": "rouge"}],
    "leval/LEval-data/Open-ended-tasks/review_summ": [{"input": "Text.", **_ASKED, "evaluation": "human"}],
    "longbench/data/samsum": [{"input": "Where is it?", "context": NOISE * 20, "answers": ["near the river"]}] * 2,
    # The first question of the second text of SCBench is its only one.
    "scbench/data/scbench_kv": [{"context": _TEXT, "multi_turns": _TURNS[: 3 - 2 * row]} for row in range(2)],
    "rock_paper_scissors/rock_paper_scissors_dominant_rock": [{"user_choice": move} for move in "ABCAABACBACA"],
}


def published(folder: Path) -> Path:
    """Write all of them, and return the folder."""
    for name, rows in ROWS.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return folder
