"""`/v1/contexts` over real HTTP: streams of any size, progress, one sentence for what is wrong, nothing left behind."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from running import refused, running, until

from locret import LongContextModel
from locret.infer.serve import context_routes
from locret.infer.serve.library import Library
from locret.infer.serve.plan import MemoryPlan


@pytest.fixture(scope="module")
def shared(serving: LongContextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    plan = MemoryPlan.of(serving, 24 << 20)
    library = Library(tmp_path_factory.mktemp("contexts"), serving, plan, max_upload=300_000)
    yield library
    library.close()


@pytest.fixture(scope="module")
def connected(shared: Library, book: str) -> Iterator[httpx.Client]:
    """Return a client of a server with two contexts, `book` and `short`."""
    with running(shared) as server, httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:
        for name, text in (("book", book), ("short", book[:1500])):
            assert upload(client, name, text, wait="true", source=f"{name}.txt").status_code == 201
        yield client


@pytest.fixture
def client(connected: httpx.Client) -> Iterator[httpx.Client]:
    """Return the client, and delete what a test has made."""
    yield connected
    for name in names(connected):
        if name not in ("book", "short"):
            assert connected.delete(f"/contexts/{name}").status_code == 200


def upload(client: httpx.Client, name: str, content: Any, **params: Any) -> httpx.Response:
    """Upload a text."""
    content = content.encode() if isinstance(content, str) else content
    return client.post("/contexts", params={"name": name, **params}, content=content)


def names(client: httpx.Client) -> list[str]:
    return [one["name"] for one in client.get("/contexts").json()["data"]]


def shown(client: httpx.Client, name: str) -> Any:
    return client.get(f"/contexts/{name}").json()


def stored(library: Library) -> list[Any]:
    return list((library.folder / ".uploads").iterdir())


# -- uploading and looking --------------------------------------------------------------------------------------------


def test_a_text_is_streamed_read_and_described(client: httpx.Client, shared: Library, book: str) -> None:
    begun = upload(client, "new", iter([book[at : at + 500].encode() for at in range(0, len(book), 500)]))
    assert begun.status_code == 202
    assert begun.json()["state"] in ("waiting", "reading")
    going = []
    while (new := shown(client, "new"))["state"] in ("waiting", "reading"):
        going.append(new)
    assert (tokens := [one["tokens"] for one in (*going, new)]) == sorted(tokens)
    ready = shown(client, "book")
    assert [new[field] for field in ("object", "name", "state", "message")] == ["context", "new", "ready", ""]
    assert new["model"] == begun.json()["model"] == "tiny:new"
    assert all(new[field] == ready[field] for field in ("tokens", "units", "kept"))
    assert new["made"]["sha256"] == ready["made"]["sha256"]
    assert (len(new["kept"]), new["summary"].split()[1]) == (50, str(new["units"]))
    assert sum(new["kept"]) * new["tokens"] / 50 == pytest.approx(new["units"], rel=0.02)
    assert all(one["progress"]["bytes"] <= len(book.encode()) for one in going)
    assert shared.prefix(shared.get("new")).digest == shared.prefix(shared.get("book")).digest
    assert names(client) == ["book", "new", "short"]


def test_a_file_whose_name_is_no_utf_8_is_listed_and_spoils_nothing(client: httpx.Client, shared: Library) -> None:
    file = shared.folder / os.fsdecode(b"no\xff.ctx")
    for content in (b"", (shared.folder / "short.ctx").read_bytes()):
        file.write_bytes(content)
        assert names(client) == ["book", "no\\udcff", "short"]
        assert shown(client, "no\\udcff")["state"] == "unusable"
    assert client.delete("/contexts/no\\udcff").status_code == 200
    assert not file.exists()


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "kind", "params", "status", "message"),
    [
        (b"a text", "", {"name": None}, 400, "name is missing"),
        (b"a text", "", {"name": "book"}, 409, "a context book is there already"),
        (b"a text", "", {"name": "a/b"}, 400, "is no name of a context"),
        (b"a text", "", {"protect": "system"}, 400, "'protect' is no parameter of an upload; leave it out"),
        (b" \n\t", "", {"wait": "true"}, 400, "is empty; give a text to read"),
        (b"good \xff", "", {}, 400, "not UTF-8"),
        (b"a" * 300_001, "", {}, 413, "more than 300,000 bytes"),
        (b"{}", "application/json", {}, 415, "application/json is no text"),
        (b"a text", "text/plain; charset=latin-1", {}, 415, "charset=latin-1"),
    ],
)
def test_what_is_no_upload_is_refused(
    client: httpx.Client, shared: Library, content: bytes, kind: str, params: Any, status: int, message: str
) -> None:
    given = {name: value for name, value in {"name": "x", **params}.items() if value is not None}
    headers = {"content-type": kind} if kind else None
    assert message in refused(client.post("/contexts", params=given, content=content, headers=headers), status)
    until(lambda: not stored(shared))


def test_uploads_that_are_refused_while_they_come(client: httpx.Client, shared: Library, monkeypatch: Any) -> None:
    packed = client.post("/contexts", params={"name": "x"}, content=b"a text", headers={"content-encoding": "gzip"})
    assert "Content-Encoding gzip" in refused(packed, 415)
    for name in ("a/b", "y" * 300):  # no length is declared, and all is sent before the answer is read
        assert "name" in refused(upload(client, name, iter([b"word " * 100_000] * 8)), 400)

    def endless(part: bytes, pause: float) -> Iterator[bytes]:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            sent.append(1)
            yield part
            time.sleep(pause)

    monkeypatch.setattr(context_routes, "STALL", 0.3)
    slow = "stood still for 0.3 seconds, or came with fewer than 16,384 bytes a second; upload it again"
    for part, pause, status, message, most in (
        (b"word " * 2000, 0.001, 413, "more than 300,000 bytes", 5_000),
        (b"a", 0.1, 408, slow, 50),
    ):
        sent = list[int]()
        with suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):  # it may hang up meanwhile
            assert message in refused(upload(client, "x", endless(part, pause)), status)
        assert len(sent) < most  # it has hung up after two seconds
        assert "x" not in names(client)
        until(lambda: not stored(shared))


# -- ends in the middle -----------------------------------------------------------------------------------------------


def test_what_is_no_http_is_refused_in_one_sentence_too(client: httpx.Client) -> None:
    for sent in (b"HELLO\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\n"):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            connection.sendall(sent)
            head, _, body = connection.makefile("rb").read().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert b"application/json" in head
        assert "is not HTTP that can be read" in json.loads(body)["error"]["message"]


def test_who_goes_away_leaves_nothing(client: httpx.Client, shared: Library, book: str) -> None:
    host = client.base_url.host
    with socket.create_connection((host, client.base_url.port)) as connection:
        head = f"POST /v1/contexts?name=left HTTP/1.1\r\nHost: {host}\r\nContent-Length: 250000\r\n\r\n"
        connection.sendall(head.encode() + book.encode())
        until(lambda: bool(stored(shared)))
    until(lambda: not stored(shared))
    assert upload(client, "left", book[:900], wait="true").status_code == 201


def test_a_deleted_reading_ends(client: httpx.Client, shared: Library, book: str) -> None:
    upload(client, "gone", (book * 50)[:250_000])
    until(lambda: shown(client, "gone")["tokens"] > 0)
    assert client.delete("/contexts/gone").status_code == 200
    assert client.get("/contexts/gone").status_code == 404
    assert (shared.room.used, stored(shared)) == (0, [])


def test_no_more_texts_and_bytes_wait_than_may(
    client: httpx.Client, shared: Library, book: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "max_waiting", 4)
    with shared.turns.turn(lambda: None):
        assert upload(client, "long", b"word " * 40_000).status_code == 202
        response = upload(client, "e", b"word " * 40_000)
        assert "of the 300,000 bytes of --max-upload; try again later" in refused(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        assert len(stored(shared)) == 1
    assert client.delete("/contexts/long").status_code == 200
    with shared.turns.turn(lambda: None):  # nothing is read meanwhile
        assert [upload(client, name, book).status_code for name in "abc"] == [202] * 3
        with pytest.raises(httpx.ReadTimeout):  # what it has sent is read all the same
            client.post("/contexts", params={"name": "d", "wait": True}, content=book, timeout=0.5)
        assert "is being read; look at GET /v1/contexts/d, choose" in refused(upload(client, "d", book), 409)
        asked = {"context": "a", "messages": [{"role": "user", "content": "What?"}]}
        assert "still being read" in refused(client.post("/chat/completions", json=asked), 409)
        response = upload(client, "e", book)
        assert "4 texts are read or wait" in refused(response, 429)
        assert int(response.headers["retry-after"]) >= 1
    until(lambda: all(shown(client, name)["state"] == "ready" for name in "abcd"))
    assert upload(client, "e", book).status_code == 202
