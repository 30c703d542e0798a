"""An evaluation names the versions of every process that wrote its answers, not of the last one alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locret.infer.evaluation import output_folder

LINE = ("--methods", "full", "--tasks", "passkey", "--lengths", "300", "--samples", "2", "--figures", "none")
OLD = {"locret": "0.1", "torch": "2.9", "commit": "abc"}
NEW = {"locret": "0.2", "torch": "2.9", "commit": "def"}


@pytest.fixture
def evaluate(evaluate_with: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs the command into one folder and gives what it says on standard error."""
    monkeypatch.setattr(output_folder, "versions", lambda: NEW)

    def call(*arguments: str, code: int = 0) -> str:
        found = evaluate_with(*LINE, "--output", tmp_path / "out")(*arguments)
        assert found.code == code
        return str(found.err)

    return call


@pytest.fixture
def interrupted(evaluate: Any, stopped_after: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of a run of other versions that was stopped after its first answer."""
    with monkeypatch.context() as patch, stopped_after(1):
        patch.setattr(output_folder, "versions", lambda: OLD)
        evaluate(code=130)
    return tmp_path / "out"


def held(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def test_other_versions_are_said_in_one_line_and_stay_on_record(
    evaluate: Callable[..., str], interrupted: Path
) -> None:
    before = held(interrupted, "results.json")
    assert before["versions"] == OLD
    assert before["commit"] == "abc"
    assert "resumed_from" not in before
    assert evaluate("--resume") == (
        "locret-eval: warning: --resume mixes answers of different versions (locret 0.1 is now 0.2, commit abc is now "
        "def); results.json names all of them, --overwrite starts again\n"
    )
    results = held(interrupted, "results.json")
    assert results["resumed_from"] == [OLD]
    assert results["versions"] == NEW
    assert results["configuration_sha256"] == before["configuration_sha256"]
    assert results["config"] == before["config"]
    # Going on once more with the same versions adds none and says nothing.
    assert evaluate("--resume") == ""
    assert held(interrupted, "results.json") == results


@pytest.mark.parametrize(("results", "known"), [(True, OLD), (False, {"commit": "unknown"})])
def test_a_folder_of_an_older_toolkit_is_gone_on_with(
    results: bool, known: dict[str, str], evaluate: Callable[..., str], interrupted: Path
) -> None:
    configuration = held(interrupted, "configuration.json")
    assert configuration.pop("versions") == [OLD]
    (interrupted / "configuration.json").write_text(json.dumps(configuration))
    if not results:
        (interrupted / "results.json").unlink()
    assert f"commit {known['commit']} is now def" in evaluate("--resume")
    written = held(interrupted, "results.json")
    assert written["complete"]
    assert written["resumed_from"] == [known]


def test_overwriting_forgets_earlier_versions(evaluate: Callable[..., str], interrupted: Path) -> None:
    assert evaluate("--overwrite") == ""
    assert "resumed_from" not in held(interrupted, "results.json")
    assert held(interrupted, "configuration.json")["versions"] == [NEW]
