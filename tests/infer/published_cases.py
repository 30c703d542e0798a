"""Tiny files in the published layouts of InfiniteBench, L-Eval and LongBench, with rows of our own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LETTERS = ("house", "door", "garden", "river")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def infinitebench(folder: Path, rows: int = 2) -> Path:
    """Write the nine tasks of Locret's table, so many rows each, 600 words of context."""
    questions = {
        "passkey": ("What is the pass key?", ["48213"]),
        "number_string": ("What is the sequence of digits?", ["4482211300"]),
        "longbook_sum_eng": ("", ["The house stands near the river."]),
        "longbook_qa_eng": ("Where is the house?", ["near the river", "the river"]),
        "longbook_choice_eng": ("What stands near the river?", ["house"]),
        "longbook_qa_chn": ("房子在哪里？", ["河边"]),
        "longdialogue_qa_eng": ("", ["OSLO"]),
        "code_debug": ("", ["house"]),
        "math_find": ("What is the largest number?", [48213]),
    }
    for name, (asked, answer) in questions.items():
        if name == "math_find":
            asked = "The largest number of the list"
        options = list(LETTERS) if name in ("longbook_choice_eng", "code_debug") else []
        found = [
            {
                "id": index,
                "context": f"{NOISE} " * 30 + f"The number of row {index} is {48213 + index}. " + f"{NOISE} " * 3,
                "input": asked,
                "answer": answer,
                "options": options,
            }
            for index in range(rows)
        ]
        write_rows(folder / "infinitebench" / "data" / f"{name}.jsonl", found)
    return folder


def leval(folder: Path) -> Path:
    """Write two tasks of L-Eval's table: a document with two questions each."""
    for name, metric in (("natural_question", "f1"), ("meeting_summ", "rouge")):
        row = {
            "input": f"{NOISE} " * 30,
            "instructions": ["Where is the house?", "What is blue?"],
            "outputs": ["near the river", "the sky"],
            "source": "own",
            "evaluation": metric,
        }
        write_rows(folder / "leval" / "LEval-data" / "Open-ended-tasks" / f"{name}.jsonl", [row])
    return folder


def longbench(folder: Path) -> Path:
    """Write three tasks of LongBench, among them one that stops at a line's end."""
    for name in ("qasper", "triviaqa", "samsum"):
        row = {
            "input": "Where is the house?",
            "context": f"{NOISE} " * 20,
            "answers": ["near the river"],
            "length": 400,
            "dataset": name,
            "language": "en",
            "all_classes": None,
            "_id": "own",
        }
        write_rows(folder / "longbench" / "data" / f"{name}.jsonl", [row, row])
    return folder
