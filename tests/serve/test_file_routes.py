"""`/v1/files` by OpenAI's official client: documents are uploaded, become contexts, and are asked."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from running import QUESTION, ROOT, Running, refused, running, text_with, until

from locret import LongContextModel
from locret.infer.serve import convert
from locret.infer.speed.served import ServedOptions, measure

MARKITDOWN = importlib.util.find_spec("markitdown") is not None
HTML = f"<html><body><h1>Keys</h1><p>{text_with(43600)}</p><script>no()</script></body></html>"


@pytest.fixture(scope="module")
def server(serving: LongContextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running((serving, tmp_path_factory.mktemp("contexts"))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def left(server: Running) -> list[Any]:
    """Return what remains of uploads when nothing is read any more."""
    while any(entry.going for entry in server.state.library.entries()):
        time.sleep(0.01)
    return list((server.state.library.folder / ".uploads").iterdir())


@pytest.mark.parametrize("name", ["A manual (1).html" if MARKITDOWN else "A manual (1).md", "Ünder.txt"])
def test_a_document_is_uploaded_asked_listed_and_deleted(server: Running, client: openai.OpenAI, name: str) -> None:
    content = HTML if name.endswith("html") else text_with(43600)
    names = name, f"{name.rpartition('.')[0]}.txt"
    first, second = (client.files.create(file=(one, content.encode()), purpose="user_data") for one in names)
    expected = "Under" if name.startswith("Ü") else "A-manual-1"
    assert (first.id, second.id) == (expected, f"{expected}-2")
    file = client.files.wait_for_processing(first.id)
    assert (file.status, file.filename, file.bytes) == ("processed", name, len(content.encode()))
    assert (file.purpose, file.status_details) == ("user_data", None)
    for purpose, listed in {"user_data": 2, "batch": 0}.items():
        assert len({first.id, second.id} & {one.id for one in client.files.list(purpose=purpose)}) == listed
    said: Any = [{"role": "user", "content": QUESTION}]
    about = {"model": "tiny", "extra_body": {"context": first.id}}
    for how in ({"model": first.to_dict()["model"]}, about):
        assert "43600" in str(client.chat.completions.create(messages=said, **how).choices[0].message.content)
    part: Any = [{"type": "file", "file": {"file_id": first.id}}, {"type": "text", "text": QUESTION}]
    named = client.chat.completions.create(messages=[{"role": "user", "content": part}], model="tiny")
    part = [{"type": "input_file", "file_id": first.id}, {"type": "input_text", "text": QUESTION}]
    newer = client.responses.create(input=[{"role": "user", "content": part}], model="tiny")
    assert "43600" in newer.output_text == named.choices[0].message.content
    for one in (first, second):
        assert client.files.delete(one.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no context"):
        client.files.retrieve(first.id)
    assert left(server) == []


FILE = 'Content-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nwords'
PURPOSE = 'Content-Disposition: form-data; name="purpose"\r\n\r\n'
LAST = "--B--\r\n"
FORMS = [  # parts of a form, its end, the sentence
    ([f"{PURPOSE}fine-tune", FILE], LAST, "purpose 'fine-tune' has no effect here; give assistants or user_data"),
    ([FILE], LAST, "purpose None has no effect here; give"),
    ([f"{PURPOSE}user_data"], LAST, "there is no whole form with a file; send purpose and file"),
    ([f"{PURPOSE}user_data", FILE], "", "there is no whole form with a file; send purpose and file"),
    ([FILE, FILE], LAST, "'file' has no effect here; send purpose and one file, as file"),
    ([FILE.replace('"file"', '"expires_after[anchor]"')], LAST, "'expires_after[anchor]' has no effect here"),
    ([FILE.replace("words", "")], LAST, "a.txt is empty; give a file with words"),
    ([FILE.replace("words", "\xff")], LAST, "a.txt is not text in UTF-8"),
    ([FILE.replace("\r\n\r\n", "\r\nContent-Type: message/rfc822\r\n\r\n")], LAST, "file is of type message/rfc822; "),
    (
        [FILE.replace("txt", "pdf")],
        LAST,
        "a.pdf cannot be read as PDF (" if MARKITDOWN else "a.pdf is a file of format",
    ),
]


def test_what_is_no_document_is_refused_in_one_sentence(server: Running, tmp_path: Path) -> None:
    kind, form = "multipart/form-data; boundary=B", tmp_path / "form"
    for parts, end, message in FORMS:
        form.write_bytes(("".join(f"--B\r\n{part}\r\n" for part in parts) + end).encode("latin-1"))
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            convert.main(form, kind)
    body, headers = form.read_bytes(), {"Content-Type": kind}
    response = httpx.post(f"{server.url}/v1/files", content=body, headers=headers, timeout=60)
    assert refused(response, 400).startswith(FORMS[-1][2])
    assert left(server) == []


def test_files_have_the_limits_of_uploads(server: Running, client: openai.OpenAI, monkeypatch: Any) -> None:
    monkeypatch.setattr(server.state.library, "max_upload", 102_400)
    with pytest.raises(openai.APIStatusError, match="the text has more than 102,400 bytes"):
        client.files.create(file=("long.txt", b"word " * 30_000), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="'limit' has no effect here; leave it out"):
        client.files.list(limit=3)
    monkeypatch.setattr(server.state, "options", server.state.options.__class__(timeout=0.01))
    assert "takes longer than 0.01 s" in refused(
        httpx.post(
            f"{server.url}/v1/files", files={"file": ("a.txt", b"x")}, data={"purpose": "user_data"}, timeout=60
        ),
        408,
    )
    assert left(server) == []


def test_what_converts_ends_after_its_time_and_with_the_server() -> None:
    hang = "import os, time; from locret.infer.serve.convert import bound; bound({}); print(os.getpid(), flush=True)"
    line, environment = f"{hang}; time.sleep(60)", {**os.environ, "PYTHONPATH": str(ROOT)}
    alone = subprocess.run([sys.executable, "-c", line.format(1)], env=environment, capture_output=True)
    assert alone.returncode == -signal.SIGALRM
    outer = [
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {line.format(50)!r}])",
    ]
    with subprocess.Popen(outer, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        child = psutil.Process(int(server.stdout.readline()))
        server.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def test_a_server_is_measured_by_whole_texts_or_by_contexts(server: Running) -> None:
    about = ServedOptions(url=f"{server.url}/v1", model="tiny", tokenizer="checkpoints/tiny", texts=[2], tokens=300)
    whole, named = measure(about), measure(replace(about, contexts=True))
    assert (named.keys() - whole.keys(), len(whole["at_once"])) == ({"read_seconds"}, 2)
    assert sum(entry.name.startswith("text") for entry in server.state.library.entries()) == 2
    with pytest.raises(openai.NotFoundError, match="nowhere"):
        measure(replace(about, model="nowhere"))
