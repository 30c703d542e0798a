"""The page's files: served with what keeps foreign text harmless, well-formed, and asking only its own server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from locret.infer.serve import page

FOLDER = Path(page.__file__).parent


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(page.router)
    return TestClient(app)


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/page/page.css", "text/css"), ("/page/page.js", "text/javascript")]
)
def test_every_file_is_served_with_its_kind_and_a_policy(client: TestClient, path: str, kind: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"] == f"{kind}; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert (policy["default-src"], policy["script-src"], policy["connect-src"]) == ("'none'", "'self'", "'self'")
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/page/__init__.py", "/page/..%2fapp.py"])
def test_nothing_else_of_the_folder_is_served(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 404


def test_the_page_asks_no_other_host_and_puts_no_text_in_as_html() -> None:
    text = "".join((FOLDER / name).read_text(encoding="utf-8") for name in ("index.html", "page.css", "page.js"))
    assert set(re.findall(r"https?://[^\s\"')]+", text)) == {"http://www.w3.org/2000/svg"}
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "srcdoc"):
        assert way not in text
    assert not re.search(r"<[^>]*\s(on\w+|style)=", (FOLDER / "index.html").read_text(encoding="utf-8"))
