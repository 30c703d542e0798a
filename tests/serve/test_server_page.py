"""What docs/server.md says is so: its examples run against a server, its options and routes exist."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from running import ROOT

from locret.infer.serve import command, context_routes, openai_routes, page, watching

PAGE = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def block(language: str, containing: str) -> str:
    """Return the code block of the page that contains a text."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if containing in text]
    return found


def test_the_examples_answer(process: tuple[str, Path, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    url, _, _ = process
    for line in block("bash", "curl").replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace(ADDRESS, url))
        printed = subprocess.run([*words, "-s", "-S", "--fail-with-body"], capture_output=True, text=True)
        assert printed.returncode == 0, printed
    assert "43600" in json.loads(printed.stdout)["choices"][0]["message"]["content"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(block("python", "import OpenAI").replace(ADDRESS, url), "docs/server.md", "exec"), {})
    first, second = out.getvalue().strip().splitlines()
    assert first == second == "The pass key is 43600."


def test_options_and_routes_of_the_page_exist(capsys: pytest.CaptureFixture[str]) -> None:
    parts = (context_routes, openai_routes, page, watching)
    routes = {(method, one.path) for part in parts for one in part.router.routes for method in one.methods}
    with pytest.raises(SystemExit):
        command.command(["--help", "all"])
    told = capsys.readouterr().out
    for option in set(re.findall(r"`(--[a-z-]+)", PAGE)) - {"--data-binary"}:
        assert option in told, option
    for method, path in set(re.findall(r"`(GET|POST|DELETE) (/[\w/.]*)", PAGE)) - {("GET", "/openapi.json")}:
        assert (method, path.replace("/book", "/{name}")) in routes
