"""Time one question on a text of 8,144 tokens in llama.cpp, from the whole text and from its units.

    PYTHONPATH=.:tests python tests/engines/time_llamacpp.py

Prints seconds and bytes as a table; one thread, through the C API.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import llama_cpp
import torch
from llamacpp_runs import Engine, Model
from test_llamacpp_engine import POLICY, book
from tiny_gguf import write_gguf

from locret import LongContextModel
from locret.engines.llamacpp import Layout, slot_file

MORE = 64


def timed(engine: Engine, ids: list[int], start: int, before: float) -> tuple[list[int], float, float]:
    """Return an answer of 16 tokens, the seconds since `before`, and the tokens per second of longer ones."""
    answer = engine.answer(ids, start)
    first = time.perf_counter() - before
    engine.forget(0, start + len(ids))
    began = time.perf_counter()
    written = engine.answer(ids[-1:], start + len(ids), most=MORE, end=-1)
    return answer, first, len(written) / (time.perf_counter() - began)


def main() -> None:
    """Print what was measured."""
    torch.set_num_threads(1)
    one = book(LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=POLICY), 1)
    question, wanted = one.questions[0]
    with tempfile.TemporaryDirectory() as folder:
        write_gguf("checkpoints/tiny", Path(folder, "tiny.gguf"))
        slot, model = Path(folder, "book.bin"), Model(Path(folder, "tiny.gguf"))
        slot.write_bytes(slot_file(one.prefix, Layout()))
        whole, units = Engine(model, length=8704), Engine(model, length=1024)
        began = time.perf_counter()
        whole.feed(one.text, 0)
        full = Path(folder, "full.bin")
        ids = (llama_cpp.llama_token * len(one.text))(*one.text)
        rows = [("full text", *timed(whole, question, len(one.text), began))]
        whole.forget(0, len(one.text))
        llama_cpp.llama_state_seq_save_file(whole.pointer, str(full).encode(), 0, ids, len(one.text))
        began = time.perf_counter()
        units.load(slot)
        rows.append((f"{one.prefix.units} units", *timed(units, question, one.prefix.units, began)))
        for (name, answer, first, speed), file in zip(rows, (full, slot), strict=True):
            sys.stdout.write(
                f"{name}: first answer {first:.2f} s, {speed:.0f} further tokens/s, slot file {file.stat().st_size} "
                f"bytes, {'the answer of locret.generate' if answer == wanted else 'another answer'}\n"
            )
    for kind in ("f32", "f16", "q8_0", "q4_0"):
        sys.stdout.write(f"slot file with {kind}: {len(slot_file(one.prefix, Layout(cache_type=kind)))} bytes\n")


if __name__ == "__main__":
    main()
