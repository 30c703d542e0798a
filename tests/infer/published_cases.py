"""Tiny files in the published layouts of some benchmarks, with rows of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    "loogle/data/longdep_qa": [{"context": _TEXT, "question": t["input"], "answer": t["answer"]} for t in _TURNS],
    "rock_paper_scissors/rock_paper_scissors_dominant_rock": [{"user_choice": move} for move in "ABCAABACBACA"],
}


def published(folder: Path) -> Path:
    """Write all of them, and return the folder."""
    for name, rows in ROWS.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return folder
