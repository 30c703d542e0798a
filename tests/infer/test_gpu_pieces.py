"""The pieces that are measured on a GPU run on a CPU too, on a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from locret.infer.speed import gpu


@pytest.mark.slow
def test_every_piece_leaves_its_record_and_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = [name for name in gpu.PIECES if name != "tests"]
    line = ["--tiny", "--output", str(tmp_path), "--pieces", ",".join(pieces)]
    assert gpu.main(line) == 0
    rows = {name: json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in pieces}
    written = [row for row in rows["writing"] if row["units"] == rows["writing"][0]["units"]]
    assert len({tuple(row["ids"]) for row in written}) == 1
    assert {row["captured"] for row in written} == {True, False}
    capsys.readouterr()
    assert gpu.main(line) == 0
    assert capsys.readouterr().out == ""


def test_a_piece_that_fails_says_so_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_self: object) -> None:
        raise RuntimeError("no room\nlong story")

    for name, piece in (("writing", fails), ("profile", lambda self: self._note(ran=True))):
        monkeypatch.setattr(gpu.Pieces, name, piece)
    assert gpu.main(["--tiny", "--output", str(tmp_path), "--pieces", "writing,profile"]) == 1
    said = capsys.readouterr().out
    assert "writing: RuntimeError: no room long story\n" in said
    assert json.loads((tmp_path / "profile.json").read_text())["outcome"] == "done"


def test_an_unknown_piece_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--tiny", "--pieces", "speed"])
    assert "--pieces speed is unknown; choose from writing, profile" in capsys.readouterr().err
