"""Questions about contexts in an unchanged llama-server, and in llama-cpp-python; skipped where there is none.

    LLAMA_SERVER=.../llama-server python -m pytest tests/engines/test_llamacpp_engine.py

It needs the extra llamacpp; llama-server comes from the sdist of llama-cpp-python (docs/engines.md).
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="gguf is not installed")

from tiny_gguf import write_gguf

from locret.engines.llamacpp import export
from locret.infer.command import command

PROGRAM = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
pytestmark = [pytest.mark.engine, pytest.mark.long]
END = 2


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a context, questions about it and their answers, and the backbone's GGUF file."""
    folder, reader = tmp_path_factory.mktemp("read"), Path(__file__).with_name("read_contexts.py")
    subprocess.run([sys.executable, str(reader), str(folder), "224", "8192", "1"], check=True, timeout=600)
    write_gguf("checkpoints/tiny", folder / "tiny.gguf")
    return folder


@contextmanager
def served(model: Path, folder: Path, options: list[str]) -> Iterator[Callable[[str, Any], Any]]:
    """Run llama-server on a free port with the slot files of a folder; yield what calls it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def call(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    line = [str(PROGRAM), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-t", "1"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen([*line, "--slot-save-path", str(folder), *options], stdout=log, stderr=log)
    try:
        for _ in range(150):
            time.sleep(0.1)
            assert process.poll() is None, (folder / "server.log").read_text()[-1000:]
            try:
                if call("/health").get("status") == "ok":
                    break
            except OSError:
                continue
        yield call
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(not PROGRAM, reason="LLAMA_SERVER names no llama-server")
@pytest.mark.parametrize("cache_type", ["f16", "bf16"])
def test_answers_are_those_of_generate_with_the_options_in_the_record(
    read: Path, tmp_path: Path, cache_type: str
) -> None:
    [questions] = json.loads((read / "record.json").read_text()).values()
    _, record = export(read / "contexts/book1.ctx", tmp_path / "book.bin", cache_type)
    facts = json.loads(record.read_text())
    greedy = {"n_predict": 16, "temperature": 0, "id_slot": 0, "return_tokens": True}
    with served(read / "tiny.gguf", tmp_path, facts["server"]) as call:
        restored = call("/slots/0?action=restore", {"filename": facts["file"]})
        assert restored["n_restored"] == facts["units"]
        for asked in questions:
            reply = call("/completion", {"prompt": [*facts["placeholders"], *asked["ids"]], **greedy})
            assert [one for one in reply["tokens"] if one != END] == [one for one in asked["answer"] if one != END]
            assert reply["timings"]["cache_n"] >= facts["units"]


def test_what_llamacpp_writes_is_what_the_command_writes_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    line = ["--model", "smollm2", "--heads", "auto", "--json", "--dtype", "float32", "--max-new-tokens", "16"]
    line += ["--prompt-file", "recipes/infer/sqlite_limits.txt"]
    line += ["--question", "What is the default maximum trigger recursion depth?"]
    more = (["--head-budgets", "uniform"], ["--engine", "llamacpp"], ["--engine", "llamacpp", "--stop", "maximum"])
    own, theirs, stopped = (json.loads(capsys.readouterr().out) for one in more if command([*line, *one]) == 0)
    [theirs], [stopped] = theirs["answers"], stopped["answers"]
    assert stopped["answer"] == own["answer"].partition("maximum")[0] + "maximum"
    for name in ("answer", "kept_units", "prompt_tokens", "new_tokens", "finished"):
        assert theirs[name] == own[name]
    assert own["peak_cache_bytes"] < theirs["peak_cache_bytes"] < 2 * own["peak_cache_bytes"]
