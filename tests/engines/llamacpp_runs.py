"""llama.cpp, unchanged, as the tests use it: contexts through its C functions, and llama-server."""

from __future__ import annotations

import ctypes
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp as lib
import numpy as np

from locret.engines.llamacpp import CACHE_TYPES

QUIET = lib.llama_log_callback(lambda level, text, data: None)
lib.llama_log_set(QUIET, ctypes.c_void_p(0))
lib.llama_backend_init()


class Model:
    """A GGUF file, loaded."""

    def __init__(self, path: Path) -> None:
        options = lib.llama_model_default_params()
        options.n_gpu_layers = 0
        self.pointer = lib.llama_model_load_from_file(str(path).encode(), options)
        assert self.pointer, path
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.pointer))


class Engine:
    """A llama.cpp context, with the cache of a layout."""

    def __init__(
        self,
        model: Model,
        cache_type: str = "f16",
        cache_type_v: str | None = None,
        *,
        flash: bool | None = None,
        length: int = 512,
        sequences: int = 1,
        unified: bool = True,
    ) -> None:
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = length, 2048, 512
        options.n_seq_max, options.kv_unified = sequences, unified
        options.n_threads = options.n_threads_batch = 1
        options.type_k = CACHE_TYPES[cache_type]
        options.type_v = CACHE_TYPES[cache_type_v or cache_type]
        if flash is not None:
            options.flash_attn_type = int(flash)
        self.pointer = lib.llama_init_from_model(model.pointer, options)
        assert self.pointer, "llama.cpp refuses such a context"
        self.model, self.memory = model, lib.llama_get_memory(self.pointer)

    def close(self) -> None:
        lib.llama_free(self.pointer)

    def feed(self, ids: Sequence[int], start: int, sequence: int = 0) -> np.ndarray:
        """Read ids at the positions from `start` on; return the logits of the last one."""
        for at in range(0, len(ids), 2048):
            part = ids[at : at + 2048]
            batch = lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for i, token in enumerate(part):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, start + at + i, 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = int(at + i == len(ids) - 1)
            done = lib.llama_decode(self.pointer, batch)
            lib.llama_batch_free(batch)
            assert done == 0
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self.pointer, -1), (self.model.vocabulary,)).copy()

    def answer(self, ids: Sequence[int], start: int, sequence: int = 0, *, most: int = 16, end: int = 2) -> list[int]:
        """Return what it answers, greedily, to ids at the positions from `start` on."""
        written, logits = [], self.feed(ids, start, sequence)
        while True:
            written.append(int(logits.argmax()))
            if len(written) == most or written[-1] == end:
                return written
            logits = self.feed(written[-1:], start + len(ids) + len(written) - 1, sequence)

    def forget(self, sequence: int = 0, start: int = 0) -> None:
        lib.llama_memory_seq_rm(self.memory, sequence, start, -1)

    def copy(self, source: int, target: int) -> None:
        lib.llama_memory_seq_cp(self.memory, source, target, -1, -1)

    def state(self, sequence: int = 0) -> bytes:
        size = lib.llama_state_seq_get_size(self.pointer, sequence)
        buffer = (ctypes.c_uint8 * size)()
        assert lib.llama_state_seq_get_data(self.pointer, buffer, size, sequence) == size
        return bytes(buffer)

    def set(self, blob: bytes, sequence: int = 0) -> int:
        """Give a sequence a state; return the bytes that were read, 0 if it is refused."""
        buffer = (ctypes.c_uint8 * len(blob)).from_buffer_copy(blob)
        return int(lib.llama_state_seq_set_data(self.pointer, buffer, len(blob), sequence))

    def load(self, file: Path, sequence: int = 0, most: int = 4096) -> tuple[int, list[int]]:
        """Give a sequence the state of a file; return the bytes that were read and the ids."""
        ids, count = (ctypes.c_int32 * most)(), ctypes.c_size_t(0)
        path = str(file).encode()
        size = lib.llama_state_seq_load_file(self.pointer, path, sequence, ids, most, ctypes.byref(count))
        return int(size), list(ids[: count.value])


class Server:
    """A running llama-server."""

    def __init__(self, url: str, process: subprocess.Popen[bytes]) -> None:
        self.url, self.process = url, process

    def call(self, path: str, body: Any = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            with error:
                return {"http": error.code, **json.loads(error.read() or b"{}")}

    def restore(self, file: str, slot: int = 0) -> dict[str, Any]:
        return self.call(f"/slots/{slot}?action=restore", {"filename": file})

    def ask(self, prompt: list[Any], slot: int = 0, **options: Any) -> dict[str, Any]:
        greedy = {"n_predict": 16, "temperature": 0, "id_slot": slot, "return_tokens": True}
        return self.call("/completion", {"prompt": prompt, **greedy, **options})


@contextmanager
def served(program: Path, model: Path, folder: Path, *options: str) -> Iterator[Server]:
    """Run llama-server on a free port with the slot files of a folder, and end it."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), "-t", "1"]
    command += ["--slot-save-path", str(folder), *options]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        server = Server(f"http://127.0.0.1:{port}", process)
        try:
            for _ in range(150):
                time.sleep(0.1)
                if process.poll() is not None:
                    break
                try:
                    if server.call("/health").get("status") == "ok":
                        break
                except OSError:
                    continue
            assert process.poll() is None, (folder / "server.log").read_text()[-1000:]
            yield server
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
