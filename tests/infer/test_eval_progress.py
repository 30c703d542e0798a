"""Whoever watches `locret-eval` sees how far it is, how long it will take, and that pictures come after the bar."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from locret.cli.command import run
from locret.infer.evaluation import runner
from locret.infer.evaluation.command import command

LINE = ("--tasks", "passkey", "--lengths", "300", "--budget", "64", "--chunk-size", "32", "--local-len", "8")


class Terminal(io.StringIO):
    """A standard error that somebody watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def evaluate(backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Return a function that runs the command into one folder and gives exit code and errors."""

    def call(*arguments: object, terminal: bool) -> tuple[int, str]:
        stream = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        line = ["--model", str(backbone), *LINE, "--output", str(tmp_path / "out"), *map(str, arguments)]
        with pytest.raises(SystemExit) as leaving:
            run(command, line)
        return int(leaving.value.code or 0), stream.getvalue()

    return call


@pytest.mark.slow
def test_the_bar_of_a_resumed_run_starts_at_what_is_done_and_estimates_the_rest(
    evaluate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--methods", "full,random", "--samples", 4, "--figures", "none")
    answer, left = runner.answer, [3]

    def stopping(*given: Any) -> dict[str, Any]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return answer(*given)

    def slow(*given: Any) -> dict[str, Any]:
        time.sleep(0.2)  # the bar is drawn again at most every tenth of a second
        return answer(*given)

    monkeypatch.setattr(runner, "answer", stopping)
    assert evaluate(*arguments, terminal=True)[0] == 130
    monkeypatch.setattr(runner, "answer", slow)
    code, err = evaluate(*arguments, "--resume", terminal=True)
    assert code == 0, err
    # 8 answers of 300 tokens are 2,400 tokens; 3 answers were there.
    drawn = re.findall(r"(\S+)/2\.40k \[(\d\d:\d\d)<([^,]+), *([^],]+)", err)
    assert drawn[0][0] == "900"
    assert drawn[0][2] == "?"
    later = [line for line in drawn if line[0] in ("1.20k", "1.50k", "1.80k", "2.10k")]
    assert later
    assert all(re.fullmatch(r"00:0\d", estimate) for _, _, estimate, _ in later)
    assert all(re.fullmatch(r"[\d.]+k?tok/s", rate) for *_, rate in later)
    assert drawn[-1][0] == "2.40k"


def test_no_bar_is_drawn_where_nobody_watches(evaluate: Any) -> None:
    arguments = ("--methods", "full", "--samples", 1, "--figures", "none")
    assert evaluate(*arguments, terminal=False) == (0, "")
    assert evaluate(*arguments, "--overwrite", "--quiet", terminal=True) == (0, "")


@pytest.mark.slow
def test_pictures_leave_standard_output_to_the_results(evaluate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the pictures need locret[eval]")
    assert evaluate("--methods", "random", "--samples", 2, "--json", terminal=False) == (0, "")
    assert json.loads(capsys.readouterr().out)["figures"]
