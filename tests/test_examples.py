"""Examples in docstrings give what they say, on the embedded pair."""

from __future__ import annotations

import doctest
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import locret
import locret.data.tasks
import locret.labels
import locret.train

NAMES = (
    "RetentionPolicy",
    "RetentionCache",
    "prefill",
    "generate",
    "save_cache",
    "load_cache",
    "LongContextModel",
    "Context",
    "compose",
    "RetainingHeads",
    "scorers.get",
    "data.tasks.get",
    "labels.answer_labels",
    "train.retention_loss",
)


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Return what examples may use: the public names, a backbone with heads, a policy, and ids of a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pair = locret.shipped.find("checkpoints/tiny")
    tokenizer = AutoTokenizer.from_pretrained(pair)
    fact = "The pass key is 71432. Remember it. 71432 is the pass key. "
    text = "The grass is green. " * 40 + fact + "The sky is blue. " * 40
    chat = [{"role": "user", "content": text + "\nWhat is the pass key?"}]
    return {
        **{name: getattr(locret, name) for name in locret.__all__},
        "torch": torch,
        "tasks": locret.data.tasks,
        "answer_labels": locret.labels.answer_labels,
        "retention_loss": locret.train.retention_loss,
        "model": AutoModelForCausalLM.from_pretrained(pair).eval(),
        "tokenizer": tokenizer,
        "heads": locret.RetainingHeads.from_pretrained("checkpoints/tiny-heads"),
        "policy": locret.RetentionPolicy(budget=64, chunk_size=128, stabilizers=16, local_len=16),
        "ids": tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False),
    }


@pytest.mark.parametrize("name", NAMES)
def test_examples_give_what_they_say(
    name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (examples,) = doctest.DocTestFinder(recurse=False).find(attrgetter(name)(locret), name, globs=dict(names))
    assert examples.examples
    report: list[str] = []
    doctest.DocTestRunner().run(examples, out=report.append)
    assert not report, "".join(report)
