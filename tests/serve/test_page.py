"""The page's files, what docs/server.md says, and what a server tells of its memory: all as a client finds them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
from pathlib import Path

import httpx
import pytest
from running import ROOT, text_with

from locret import LongContextModel
from locret.infer.serve import page

FOLDER = Path(page.__file__).parent
DOCUMENTED = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def url(process: tuple[str, Path, object]) -> str:
    """Return the address of a server."""
    return process[0]


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/page/page.css", "text/css"), ("/page/page.js", "text/javascript")]
)
def test_every_file_is_served_with_its_kind_and_a_policy(url: str, path: str, kind: str) -> None:
    response = httpx.get(url + path)
    assert (response.status_code, response.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    for other in ("/page/__init__.py", "/page/..%2fapp.py"):
        assert httpx.get(url + other).status_code == 404


def test_the_page_asks_no_other_host_and_puts_no_text_in_as_html() -> None:
    text = "".join((FOLDER / name).read_text(encoding="utf-8") for name in ("index.html", "page.css", "page.js"))
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "srcdoc"):
        assert way not in text
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<[^>]*\s(on\w+|style)=", html)
    read = re.findall(r"<(?:link rel=.stylesheet.|script) (?:href|src)=.([\w./]+)", re.sub("(?s)<!--.*?-->", "", html))
    assert read == ["page/page.css", "page/page.js"], "which are served above"


def block(language: str, containing: str) -> str:
    """Return the code block of the documentation that contains a text."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", DOCUMENTED, re.DOTALL) if containing in text]
    return found


def test_the_examples_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in block("bash", "curl").replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace(ADDRESS, url))
        printed = subprocess.run([*words, "-s", "-S", "--fail-with-body"], capture_output=True, text=True)
        assert printed.returncode == 0, printed
    assert "43600" in json.loads(printed.stdout)["choices"][0]["message"]["content"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(block("python", "import OpenAI").replace(ADDRESS, url), "docs/server.md", "exec"), {})
    first, second = out.getvalue().strip().splitlines()
    assert first == second == "The pass key is 43600."


def test_a_server_tells_what_it_has_planned_and_what_it_holds(url: str, serving: LongContextModel) -> None:
    before = httpx.get(f"{url}/v1/memory").json()
    made = httpx.post(f"{url}/v1/contexts?name=told&wait=true", content=text_with(43600, 40), timeout=60)
    assert made.status_code == 201
    body = {"context": "told", "messages": [{"role": "user", "content": "What?"}], "max_tokens": 6}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    after = httpx.get(f"{url}/v1/memory").json()
    for name, part in after["parts"].items():
        assert part["planned"] == before["parts"][name]["planned"]
        assert 0 <= part["used"] <= part["planned"]
    assert after["parts"]["answers"]["used"] > before["parts"]["answers"]["used"]
    assert (after["parts"]["reading"]["used"], after["answers"]) == (0, {"waiting": 0, "running": 0})
    weights = sum(weight.nbytes for weight in serving.model.parameters())
    assert weights <= after["parts"]["weights"]["planned"] < 2 * weights
    assert sum(part["planned"] for name, part in after["parts"].items() if name != "weights") <= 32 << 20
    assert after["resident"] > 1 << 20
    assert httpx.get(f"{url}/healthz").json() == {"status": "ready"}
