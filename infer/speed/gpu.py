"""What only a GPU can say: `locret-bench` on three shapes, and the tests that need a card.

`make gpu` runs all pieces into build/gpu, again: those that are missing; `--tiny` shows on a CPU that they run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

_BENCH = (sys.executable, "-m", "locret.infer.speed.command", "--repeats", "3", "--overwrite")
_TINY = "--shape tiny --lengths 300 --budget 64 --chunk-size 32 --stabilizers 16 --local-len 8 --new-tokens 4"
BENCHES = {
    "llama": "--shape llama-3.1-8b --methods floor,locret --lengths 128K --memory-cap 24GB --new-tokens 128",
    "phi": "--shape phi-3-mini-128k --methods floor,locret --lengths 128K --memory-cap 24GB",
    "small": "--shape cpu-512 --methods full,floor,locret --lengths 16K,64K --device cuda --dtype bfloat16",
}
"""What is measured, by the names of the records."""
PIECES = (*BENCHES, "tests")
LIMIT = 240
"""Seconds that a piece may take."""


def run_piece(name: str, folder: Path, tiny: bool) -> bool:
    """Run a piece into `folder`; return whether it ended well."""
    if name == "tests":
        line = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "tests/core/test_label_kernel.py"]
    else:
        line = [*_BENCH, *(_TINY if tiny else BENCHES[name]).split(), "--output", str(folder / name)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT)
        said, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        said, code = f"cut short after {LIMIT} s", 1
    print(f"{name}: {'done' if code == 0 else 'failed'}\n{said}", flush=True)
    if code == 0:
        (folder / f"{name}.log").write_text(said, encoding="utf-8")
    return code == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pieces that have no log yet; return 0 if all of them ended well, else 1."""
    parser = argparse.ArgumentParser("gpu", description="Measure what only a GPU can say.")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="folder of the records (build/gpu)")
    parser.add_argument("--pieces", nargs="+", choices=PIECES, default=PIECES, help="which (all)")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU")
    options = parser.parse_args(argv)
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device is here; give --tiny to see on the CPU that the pieces run")
    options.output.mkdir(parents=True, exist_ok=True)
    missing = [name for name in options.pieces if not (options.output / f"{name}.log").exists()]
    ended_well = [run_piece(name, options.output, options.tiny) for name in missing]
    return int(not all(ended_well))


if __name__ == "__main__":
    raise SystemExit(main())
