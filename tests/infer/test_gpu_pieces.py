"""`make gpu`: every piece starts, tiny and on the CPU; ended ones are skipped, failed and endless ones say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from locret.infer.speed.lab import gpu
from locret.infer.speed.lab.gpu import PIECES, Piece, main, run_piece


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_every_piece_starts_and_leaves_its_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tiny", "--together", "--output", str(tmp_path)]) == 0, capsys.readouterr().out
    for piece in PIECES:
        record = json.loads((tmp_path / f"{piece.name}.json").read_text())
        assert (record["outcome"], record["tiny"], record["device"]) == ("done", True, "cpu")
        assert (tmp_path / f"{piece.name}.log").exists()
    own = {path.name.partition("-record")[0] for path in tmp_path.glob("*-record*")}
    assert own == {piece.name for piece in PIECES} - {"tests"}
    capsys.readouterr()
    assert main(["--tiny", "--together", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{piece.name}: done before" for piece in PIECES]


def test_a_piece_that_fails_or_never_ends_says_so_and_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = Piece("endless", "", "http.server", "", "0 --bind 127.0.0.1")
    wrong = Piece("wrong", "", "locret.infer.speed.command", "", "--shape nothing")
    monkeypatch.setattr(gpu, "PIECES", (wrong,))
    for _ in range(2):
        assert main(["--tiny", "--together", "--output", str(tmp_path)]) == 1
        assert "wrong: failed with exit code 2 after" in capsys.readouterr().out
    assert "--shape nothing is unknown" in (tmp_path / "wrong.log").read_text()
    assert run_piece(endless, tmp_path, tiny=True, limit=1)["outcome"] == "too long: ended after 1 s"
    assert main(["--tiny", "--output", str(tmp_path), "--within", "5", "--least", "1m"]) == 0
    assert "wrong: no time left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--piece", "nothing"], "--piece nothing is unknown; choose from tests, verify"),
        (["--within", "soon"], "soon is no time"),
        (["--together"], "--together is for --tiny"),
        ([], "no CUDA device is here; give --tiny"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available() and not flags:
        pytest.skip("a CUDA device is here")
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_pieces_are_listed_most_important_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [piece.name for piece in PIECES]
    assert listed[:4] == ["tests", "verify", "verify-bfloat16", "label-kernel"]
