"""Questions about contexts in an unchanged llama-server, one whole run; skipped where there is none.

    LLAMA_SERVER=.../llama-server python -m pytest tests/engines/test_llamacpp_engine.py

It needs gguf besides the package; llama-server comes from the sdist of llama-cpp-python (docs/engines.md).
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

PROGRAM = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(not PROGRAM, reason="LLAMA_SERVER names no llama-server"),
]
END = 2


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


@pytest.mark.parametrize("cache_type", ["f16", "bf16"])
def test_answers_are_those_of_generate_with_the_options_in_the_record(tmp_path: Path, cache_type: str) -> None:
    reader = Path(__file__).with_name("read_contexts.py")
    subprocess.run([sys.executable, str(reader), str(tmp_path), "224", "8192", "1"], check=True, timeout=600)
    [questions] = json.loads((tmp_path / "record.json").read_text()).values()
    write_gguf("checkpoints/tiny", tmp_path / "tiny.gguf")
    _, record = export(tmp_path / "contexts/book1.ctx", tmp_path / "book.bin", cache_type)
    facts = json.loads(record.read_text())
    greedy = {"n_predict": 16, "temperature": 0, "id_slot": 0, "return_tokens": True}
    with served(tmp_path / "tiny.gguf", tmp_path, facts["server"]) as call:
        restored = call("/slots/0?action=restore", {"filename": facts["file"]})
        assert restored["n_restored"] == facts["units"]
        for asked in questions:
            reply = call("/completion", {"prompt": [*facts["placeholders"], *asked["ids"]], **greedy})
            assert [one for one in reply["tokens"] if one != END] == [one for one in asked["answer"] if one != END]
            assert reply["timings"]["cache_n"] >= facts["units"]
