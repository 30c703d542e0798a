"""The page about contexts does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "contexts.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the embedded backbone knows")
def test_the_python_of_the_page_runs_in_two_processes_worth_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8").replace("/tmp/", f"{tmp_path}/")
    first, later, together = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(first, "docs/contexts.md", "exec"), names)
    out = capsys.readouterr().out
    assert "Context('pass_key.txt': 8,1" in out
    assert out.count("The pass key is 43600.") >= 4
    exec(compile(later, "docs/contexts.md", "exec"), {"LongContextModel": names["LongContextModel"]})
    assert capsys.readouterr().out == "The pass key is 43600.\n" * 2
    exec(compile(together, "docs/contexts.md", "exec"), {"lm": names["lm"]})
    key, number = "The pass key is 43600.\n", "The special magic number for Dallas is: 4155567.\n"
    assert capsys.readouterr().out == key + number + key
