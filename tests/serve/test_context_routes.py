"""`/v1/contexts` over real HTTP: streams of any size, progress, one sentence for what is wrong, nothing left behind."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
import time
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
from running import listening

from locret import LongContextModel
from locret.infer.serve.engine import Engine
from locret.infer.serve.library import Library
from locret.infer.serve.plan import MemoryPlan
from locret.infer.serve.serve_options import ServeOptions
from locret.infer.serve.state import ServerState


@contextmanager
def served(library: Library, **options: Any) -> Iterator[str]:
    """Serve a library on a free port and yield its address; nothing is asked, so the engine is not started."""
    engine = Engine(library.lm.model, library.turns, kv_bytes=library.plan.engine)
    state = ServerState(engine=engine, library=library, model="tiny", options=ServeOptions(**options))
    with listening(state) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture(scope="module")
def shared_library(serving: LongContextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    plan = MemoryPlan.of(serving, 24 << 20)
    library = Library(tmp_path_factory.mktemp("contexts"), serving, plan, max_upload=300_000, stall=2.0)
    yield library
    library.close()


@pytest.fixture(scope="module")
def url(shared_library: Library) -> Iterator[str]:
    with served(shared_library) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str, book: str) -> Iterator[httpx.Client]:
    """Return a client of a server with two contexts, `book` and `short`."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for name, text in (("book", book), ("short", book[:1500])):
            made = client.post(
                "/contexts", params={"name": name, "wait": "true", "source": f"{name}.txt"}, content=text.encode()
            )
            assert made.status_code == 201, made.text
        yield client


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Delete what a test has made."""
    yield
    if "client" in request.fixturenames:
        client = request.getfixturevalue("client")
        for one in client.get("/contexts").json()["data"]:
            if one["name"] not in ("book", "short"):
                assert client.delete(f"/contexts/{one['name']}").status_code == 200


def refused(response: httpx.Response, status: int) -> str:
    """Return the sentence that a request is refused with, in the shape of OpenAI's errors."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert "Traceback" not in error["message"]
    assert error["message"].replace("...", "").count(". ") == 0
    return str(error["message"])


def events(client: httpx.Client, name: str) -> list[tuple[str, Any]]:
    """Return all server-sent events of a context."""
    with client.stream("GET", f"/contexts/{name}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        text = stream.read().decode()
    found = [re.fullmatch(r"event: (\w+)\ndata: (.*)", block) for block in text.strip().split("\n\n")]
    return [(one[1], json.loads(one[2])) for one in found if one]


# -- uploading and looking --------------------------------------------------------------------------------------------


def test_a_text_is_streamed_read_and_described(client: httpx.Client, shared_library: Library, book: str) -> None:
    def pieces() -> Iterator[bytes]:
        for at in range(0, len(book), 500):
            yield book[at : at + 500].encode()

    begun = client.post("/contexts", params={"name": "new"}, content=pieces())
    assert begun.status_code == 202
    assert begun.json()["state"] in ("waiting", "reading")
    happened = events(client, "new")
    assert [name for name, _ in happened] == ["progress"] * (len(happened) - 1) + ["end"]
    tokens = [one["tokens"] for _, one in happened]
    assert tokens == sorted(tokens)
    last = happened[-1][1]
    shown = client.get("/contexts/new").json()
    assert shown == last
    assert (shown["object"], shown["name"], shown["state"], shown["message"]) == ("context", "new", "ready", "")
    ready = client.get("/contexts/book").json()
    for field in ("tokens", "units", "text", "kept"):
        assert shown[field] == ready[field]
    assert shown["made"]["sha256"] == ready["made"]["sha256"]
    assert len(shown["kept"]) == 50
    entry, old = shared_library.get("new"), shared_library.get("book")
    assert shared_library.prefix(entry).digest == shared_library.prefix(old).digest
    names = [one["name"] for one in client.get("/contexts").json()["data"]]
    assert names == ["book", "new", "short"]


@pytest.mark.parametrize("boundary", ["x", "----WebKitFormBoundary7MA4YWxkTrZu0gW"])
def test_a_file_of_a_form_is_the_same_text(client: httpx.Client, book: str, boundary: str) -> None:
    kind = {"content-type": f"multipart/form-data; boundary={boundary}"}
    files = {"file": ("böse/../name.txt", book.encode(), "text/plain")}
    made = client.post("/contexts", params={"name": "form", "wait": "true"}, files=files, headers=kind)
    assert made.status_code == 201
    assert made.json()["source"] == "böse/../name.txt"
    assert made.json()["made"]["sha256"] == client.get("/contexts/book").json()["made"]["sha256"]


@pytest.mark.parametrize("kind", ["", "text/plain; charset=UTF-8", "application/x-www-form-urlencoded"])
def test_whatever_clients_call_a_text_it_is_one(client: httpx.Client, book: str, kind: str) -> None:
    headers = {"content-type": kind} if kind else {}
    request = client.build_request(
        "POST", "/contexts", params={"name": "n", "wait": "true"}, content=book[:900], headers=headers
    )
    assert client.send(request).status_code == 201


def test_a_system_message_comes_before_the_text(client: httpx.Client, shared_library: Library, book: str) -> None:
    made = client.post(
        "/contexts", params={"name": "sys", "wait": "true", "system": "Be brief."}, content=book.encode()
    )
    assert made.json()["tokens"] > client.get("/contexts/book").json()["tokens"]
    assert shared_library.lm.load(shared_library.get("sys").path)._transcript.system == "Be brief."


def test_the_picture_shows_every_head_along_the_text(client: httpx.Client) -> None:
    response = client.get("/contexts/book/picture")
    assert response.headers["content-type"] == "image/svg+xml"
    tree, shown = ET.fromstring(response.text), client.get("/contexts/book").json()
    texts = [text for element in tree.iter() if (text := element.text)]
    assert texts[0] == f"book: {shown['units']} of {shown['tokens']:,} tokens kept per KV head"
    image = next(element for element in tree.iter() if element.tag.endswith("image"))
    data = base64.b64decode(image.attrib["href"].removeprefix("data:image/png;base64,"))
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (400, 5 * 4)  # layers times KV heads
    length = int.from_bytes(data[33:37], "big")
    assert len(zlib.decompress(data[41 : 41 + length])) == height * (1 + 3 * width)


def test_passages_that_were_kept_are_of_the_text(client: httpx.Client, shared_library: Library, book: str) -> None:
    found = client.get("/contexts/book/kept", params={"count": 5}).json()["data"]
    starts = [one["start"] for one in found]
    assert starts == sorted(starts)
    assert len(found) == 5
    tokens = client.get("/contexts/book").json()["tokens"]
    whole = " ".join((shared_library.lm._transcript().opening() + book).split())
    for one in found:
        assert " ".join(one["text"].split()) in whole
        assert 0 < one["share"] <= 1
        assert one["end"] == min(one["start"] + 12, tokens)
        assert one["place"] == pytest.approx(one["start"] / tokens, abs=1e-4)
    cache = shared_library.lm.load(shared_library.get("book").path).cache
    held = sum(
        int(((cache.kept_positions(layer)[0] // 12) == starts[0] // 12).sum()) for layer in cache.backbone.layers
    )
    assert found[0]["share"] == pytest.approx(held / (5 * 4 * 12), abs=1e-3)


# -- making others ----------------------------------------------------------------------------------------------------


def test_forks_shrunk_and_composed_contexts(client: httpx.Client) -> None:
    whole = client.get("/contexts/book").json()
    fork = client.post("/contexts/book/fork", json={"name": "fork"})
    small = client.post("/contexts/fork/shrink", json={"name": "small", "budget": 20})
    both = client.post("/contexts/compose", json={"name": "both", "contexts": ["small", "short"], "shares": "fair"})
    assert [response.status_code for response in (fork, small, both)] == [201] * 3
    assert (fork.json()["units"], fork.json()["tokens"], fork.json()["text"]) == (whole["units"], whole["tokens"], True)
    assert (small.json()["units"], small.json()["made"]) == (20, {"of": ["fork"]})
    assert both.json()["made"] == {"of": ["small", "short"]}
    assert both.json()["tokens"] > whole["tokens"]
    assert (
        client.post("/contexts/fork/shrink", json={"name": "later", "budget": 10}, params={"wait": "false"}).status_code
        == 202
    )
    assert events(client, "later")[-1][1]["state"] == "ready"
    assert client.delete("/contexts/fork").json() == {"object": "context.deleted", "name": "fork", "deleted": True}
    assert client.get("/contexts/small/kept").status_code == 200
    assert "is not kept" in refused(client.get("/contexts/both/kept"), 404)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/bok/fork", {"name": "x"}, 404, "did you mean book"),
        ("/book/fork", {"name": "../x"}, 400, "is no name of a context"),
        ("/book/fork", {"name": "short"}, 409, "is there already"),
        ("/book/fork", {}, 400, "name is missing"),
        ("/book/fork", {"name": "x", "nme": 1}, 400, "nme"),
        ("/book/shrink", {"name": "x", "budget": 10_000}, 400, "budget=10000 is not fewer than the"),
        ("/book/shrink", {"name": "x", "budget": 0}, 400, "budget 0"),
        ("/compose", {"name": "x", "contexts": ["book"]}, 400, "contexts"),
        ("/compose", {"name": "x", "contexts": ["book", "nobody"]}, 404, "no context 'nobody'"),
        ("/compose", {"name": "x", "contexts": ["book", "short"], "shares": "best"}, 400, "shares='best' is unknown"),
        ("/compose", {"name": "x", "contexts": ["book", "short"], "shares": [1]}, 400, "1 numbers for 2 contexts"),
        ("/compose", {"name": "x", "contexts": ["book"] * 64}, 400, "bytes"),
    ],
)
def test_what_cannot_be_made_is_refused(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, message: str
) -> None:
    assert message in refused(client.post(f"/contexts{path}", json=body), status)
    assert [one["name"] for one in client.get("/contexts").json()["data"] if one["state"] == "ready"] == [
        "book",
        "short",
    ]


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "content", "headers", "status", "message"),
    [
        ({}, b"a text", {}, 400, "name is missing"),
        ({"name": "book"}, b"a text", {}, 409, "a context book is there already"),
        ({"name": "a/b"}, b"a text", {}, 400, "is no name of a context"),
        ({"name": "x", "source": "y" * 201}, b"a text", {}, 400, "source"),
        ({"name": "x"}, b"", {}, 400, "the text is empty"),
        ({"name": "x", "wait": "true"}, b" \n\t", {}, 400, "is empty; give a text to read"),
        ({"name": "x"}, b"good \xff", {}, 400, "not UTF-8"),
        ({"name": "x"}, "half \u00e9".encode()[:-1], {}, 400, "not UTF-8"),
        ({"name": "x"}, b"a" * 300_001, {}, 413, "more than the 300,000 that the server takes"),
        ({"name": "x"}, b"{}", {"content-type": "application/json"}, 415, "application/json is no text"),
        ({"name": "x"}, b"a text", {"content-type": "text/plain; charset=latin-1"}, 415, "charset=latin-1"),
        ({"name": "x"}, b"a text", {"content-encoding": "gzip"}, 415, "Content-Encoding gzip"),
        ({"name": "x"}, b"a text", {"content-type": "multipart/form-data"}, 400, "no boundary"),
        ({"name": "x"}, b"a text", {"content-type": "multipart/form-data; boundary=x"}, 400, "form"),
        ({"name": "x"}, b"a", {"content-type": f"multipart/form-data; boundary={'y' * 300}"}, 400, "more than 70"),
        ({"name": "x"}, b"--x\r\n", {"content-type": "multipart/form-data; boundary=x"}, 400, "breaks off"),
        ({"name": "x"}, b"", {"content-type": "multipart/form-data; boundary=x"}, 400, "breaks off"),
    ],
)
def test_what_is_no_upload_is_refused(
    client: httpx.Client,
    shared_library: Library,
    params: dict[str, str],
    content: bytes,
    headers: dict[str, str],
    status: int,
    message: str,
) -> None:
    assert message in refused(client.post("/contexts", params=params, content=content, headers=headers), status)
    until(lambda: not list((shared_library.folder / ".uploads").iterdir()))


@pytest.mark.parametrize("name", ["a/b", "y" * 300])
def test_a_large_upload_that_is_refused_at_once_is_told_why(client: httpx.Client, name: str) -> None:
    content = iter([b"word " * 100_000] * 8)  # no length is declared, and all is sent before the answer is read
    assert "name" in refused(client.post("/contexts", params={"name": name}, content=content), 400)


@pytest.mark.parametrize(
    "parts",
    [
        [("name", (None, "x"))],
        [("file", ("a.txt", b"one")), ("file", ("b.txt", b"two"))],
        [("file", ("a.txt", b"one")), ("system", (None, "two"))],
    ],
)
def test_a_form_with_other_parts_is_refused(client: httpx.Client, parts: list[Any]) -> None:
    assert "other parts than one file" in refused(client.post("/contexts", params={"name": "x"}, files=parts), 400)


@pytest.mark.parametrize(
    ("form", "status", "message"),
    [
        (b"--x\r\nA: b\r\n\r\none\r\n--x\r\nA: b\r\n\r\ntwo\r\n--x--\r\n", 400, "other parts than one file"),
        (
            b"--x\r\nContent-Disposition: form-data; name=f; filename=f\r\n\r\none\r\n--x--\r\n" + b"z" * 400_000,
            413,
            "the form has more than",
        ),
    ],
)
def test_a_form_that_is_none_is_refused(client: httpx.Client, form: bytes, status: int, message: str) -> None:
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    assert message in refused(client.post("/contexts", params={"name": "x"}, content=form, headers=headers), status)


def test_a_stream_that_is_too_long_is_refused_where_it_is(client: httpx.Client, shared_library: Library) -> None:
    sent = []

    def endless() -> Iterator[bytes]:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            sent.append(1)
            yield b"word " * 2000
            time.sleep(0.001)

    with suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):  # it may hang up on what is still sent
        assert "more than 300,000 bytes" in refused(
            client.post("/contexts", params={"name": "x"}, content=endless()), 413
        )
    until(lambda: not shared_library.find("x").job)
    assert "300,000" in shared_library.find("x").message
    assert len(sent) < 5_000  # it has hung up after two seconds


@pytest.mark.parametrize("path", ["/nobody", "/nobody/events", "/nobody/picture", "/nobody/kept", "/%2e%2e", "/a%2fb"])
def test_what_is_not_there_is_not_found(client: httpx.Client, path: str) -> None:
    refused(client.get(f"/contexts{path}"), 404)


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- ends in the middle -----------------------------------------------------------------------------------------------


def sending(url: str, name: str, data: bytes, length: int) -> socket.socket:
    """Return a connection that has sent part of a text."""
    host, port = url.split("/")[2].split(":")
    connection = socket.create_connection((host, int(port)))
    head = f"POST /v1/contexts?name={name} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_who_goes_away_takes_the_reading_along(
    client: httpx.Client, url: str, shared_library: Library, book: str
) -> None:
    data = (book * 50).encode()[:250_000]
    connection = sending(url, "left", data, len(data) + 1000)
    until(lambda: client.get("/contexts/left").status_code == 200 and client.get("/contexts/left").json()["tokens"] > 0)
    refusal = refused(client.post("/contexts/left/fork", json={"name": "x"}), 409)
    assert "still being read" in refusal
    connection.close()
    until(lambda: client.get("/contexts/left").json()["state"] == "failed")
    assert "went away" in client.get("/contexts/left").json()["message"]
    assert shared_library.room.used == 0
    until(lambda: not list((shared_library.folder / ".uploads").iterdir()))
    assert client.post("/contexts", params={"name": "left", "wait": "true"}, content=book[:900]).status_code == 201


def test_who_sends_nothing_for_long_is_given_up(
    client: httpx.Client, url: str, shared_library: Library, book: str
) -> None:
    uploads = shared_library.folder / ".uploads"
    with sending(url, "slow", book.encode(), 100_000) as some, sending(url, "slower", b"", 100_000) as none:
        until(lambda: client.get("/contexts/slow").status_code == 200)
        assert len(list(uploads.iterdir())) >= 2
        for connection in (some, none):
            connection.settimeout(15)
            answer = b"".join(iter(lambda connection=connection: connection.recv(4096), b""))  # until it is cut
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"nothing of the text came for 2 seconds; upload it again" in answer
    until(lambda: client.get("/contexts/slow").json()["state"] == "failed")
    assert "nothing of the text came for 2 seconds" in client.get("/contexts/slow").json()["message"]
    assert client.get("/contexts/slower").status_code == 404
    until(lambda: not list(uploads.iterdir()))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("sent", [True, False])
def test_a_reading_that_breaks_is_the_servers_fault(
    client: httpx.Client, shared_library: Library, book: str, sent: bool
) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("out of memory")

    def pieces() -> Iterator[bytes]:
        yield (book * 50).encode()[:200_000]
        until(lambda: sent or any(one.state == "failed" for one in shared_library.entries()))
        yield b" and so on"

    broken = shared_library.lm.model.model.layers[0].register_forward_pre_hook(full)
    try:
        made = client.post("/contexts", params={"name": "broken", "wait": "true"}, content=pieces())
    finally:
        broken.remove()
    assert "reading it failed (RuntimeError); see the server's log" in refused(made, 500)


def test_who_waits_for_a_context_waits_no_longer_than_requests_may(library: Library, book: str) -> None:
    with served(library, timeout=1.0) as url, httpx.Client(base_url=url, timeout=20) as client:
        with library.turns.turn(lambda: None):  # nothing is read meanwhile
            made = client.post("/contexts", params={"name": "late", "wait": "true"}, content=book)
            assert (made.status_code, made.json()["state"]) == (202, "reading")
        assert events(client, "late")[-1][1]["state"] == "ready"


def test_who_leaves_is_not_waited_for(library: Library, book: str) -> None:
    def answered() -> bool:
        return 'locret_requests_total{route="/v1/contexts",status="499"} 1.0' in httpx.get(f"{url[:-3]}/metrics").text

    with served(library) as url, httpx.Client(base_url=url, timeout=20) as client:
        with library.turns.turn(lambda: None):
            with pytest.raises(httpx.ReadTimeout):
                client.post("/contexts", params={"name": "left", "wait": "true"}, content=book, timeout=0.5)
            until(answered)
        assert events(client, "left")[-1][1]["state"] == "ready"  # it is read all the same


def test_a_deleted_reading_ends_and_says_so(client: httpx.Client, shared_library: Library, book: str) -> None:
    client.post("/contexts", params={"name": "gone"}, content=(book * 50).encode()[:250_000])
    happened: list[tuple[str, Any]] = []
    thread = threading.Thread(target=lambda: happened.extend(events(client, "gone")))
    thread.start()
    until(lambda: client.get("/contexts/gone").json()["tokens"] > 0)
    assert client.delete("/contexts/gone").status_code == 200
    thread.join(5)
    assert happened[-1] == ("end", {"object": "context.deleted", "name": "gone", "deleted": True})
    assert client.get("/contexts/gone").status_code == 404
    assert shared_library.room.used == 0


def test_no_more_texts_wait_than_may(client: httpx.Client, shared_library: Library, book: str) -> None:
    shared_library.max_waiting, before = 2, shared_library.max_waiting
    try:
        for name in "ab":
            assert client.post("/contexts", params={"name": name}, content=(book * 50)[:250_000]).status_code == 202
        response = client.post("/contexts", params={"name": "c"}, content=book)
        assert "2 texts are read or wait" in refused(response, 429)
        assert int(response.headers["retry-after"]) >= 1
    finally:
        shared_library.max_waiting = before


def test_texts_that_wait_take_bounded_disk(client: httpx.Client, shared_library: Library, book: str) -> None:
    shared_library.max_upload, before = 4000, shared_library.max_upload
    try:
        with shared_library.turns.turn(lambda: None):  # nothing is read meanwhile
            for name in "abcd":
                assert client.post("/contexts", params={"name": name}, content=book.encode()).status_code == 202
            response = client.post("/contexts", params={"name": "e"}, content=book)
            assert "texts of 16,000 bytes are stored" in refused(response, 429)
        until(lambda: all(client.get(f"/contexts/{name}").json()["state"] == "ready" for name in "abcd"))
        assert client.post("/contexts", params={"name": "e"}, content=book.encode()).status_code == 202
    finally:
        shared_library.max_upload = before
