"""Everything that only a GPU can say, most important first, in pieces of less than ten minutes that leave records.

    make gpu                                                      # all pieces, into build/gpu
    python -m locret.infer.speed.lab.gpu --within 9m              # as many as fit; the same command goes on from there
    python -m locret.infer.speed.lab.gpu --piece read-llama       # this one, also if it is there already
    python -m locret.infer.speed.lab.gpu --tiny                   # each piece on the CPU, to see that it starts

A piece is a command of this checkout in a process of its own. It leaves NAME.json (what was run, where, how long, how
it ended), NAME.log (what it printed) and its own record. A piece that ended well is not run again; others are.
Needs a clone and nothing from a network: weights are random, or the embedded backbone's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locret.files import write_text

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 570
"""Seconds that a piece may take."""
BENCH, LAB, VERIFY = "locret.infer.speed.command", "locret.infer.speed.lab", "locret.infer.verify.command"
_READ = "--lengths 128K --memory-cap 24GB --dtype bfloat16 --repeats 3"
_EMBEDDED = "--model checkpoints/tiny --heads checkpoints/tiny-heads"
_SMALL = (
    "--lengths 256 --budget 48 --chunk-size 64 --stabilizers 8 --local-len 8 --new-tokens 2 --repeats 1 --threads 1"
)
_SMALL_READ = "--budget 48 --chunk-size 64 --stabilizers 8 --local-len 8 --tokens 128"


@dataclass(frozen=True)
class Piece:
    """A command, and what it tells."""

    name: str
    about: str
    module: str
    flags: str
    """For a GPU; {output} is where its own record goes."""
    tiny: str
    """The same for a CPU and a second."""

    def arguments(self, output: Path, tiny: bool) -> list[str]:
        """Return the arguments of the module."""
        flags = (self.tiny if tiny else self.flags).split()
        return [part.format(output=output) for part in flags]


def _bench(name: str, about: str, flags: str, tiny: str) -> Piece:
    own = "--output {output} --overwrite --quiet"
    return Piece(name, about, BENCH, f"{flags} {own}", f"--shape tiny {_SMALL} {tiny} {own}")


def _lab(name: str, about: str, module: str, flags: str, tiny: str) -> Piece:
    own = "--output {output}"
    return Piece(name, about, f"{LAB}.{module}", f"{flags} {own}", f"--shape tiny --threads 1 {tiny} {own}")


PIECES: tuple[Piece, ...] = (
    Piece(
        "tests",
        "tests/gpu and the label kernels",
        "pytest",
        "-q -p no:cacheprovider tests/gpu tests/core/test_label_kernel.py",
        "-q -p no:cacheprovider tests/gpu",
    ),
    Piece(
        "verify",
        "locret-verify in float32",
        VERIFY,
        f"{_EMBEDDED} --dtype float32 --output {{output}} --quiet",
        f"{_EMBEDDED} --only full-budget,bytes --tokens 128 --output {{output}} --quiet",
    ),
    Piece(
        "verify-bfloat16",
        "locret-verify in bfloat16",
        VERIFY,
        f"{_EMBEDDED} --dtype bfloat16 --output {{output}} --quiet",
        f"{_EMBEDDED} --dtype bfloat16 --only full-budget --tokens 128 --output {{output}} --quiet",
    ),
    _lab(
        "label-kernel",
        "time and equality of the label kernels",
        "label_kernel",
        "--shape llama-3.1-8b --tokens 10240",
        "--tokens 128 --answer-tokens 8 --repeats 1",
    ),
    _bench(
        "read-llama",
        "the shape of Llama-3.1-8B reads and writes at 128K within 24 GB: time, peaks, shares of the card's rates",
        f"--shape llama-3.1-8b --methods floor,locret --budget 16384 --chunk-size auto {_READ}",
        "--methods floor,locret",
    ),
    _bench(
        "read-phi",
        "the same for the shape of Phi-3-mini-128K",
        f"--shape phi-3-mini-128k --methods floor,locret --budget 6000 --chunk-size auto {_READ}",
        "--methods locret",
    ),
    _bench(
        "full",
        "full attention beside the floor and locret at 128K, on the whole card",
        "--shape llama-3.1-8b --methods full,floor,locret --budget 16384 --lengths 128K --dtype bfloat16 --repeats 2",
        "--methods full,locret",
    ),
    _lab(
        "training",
        "what a training step costs over a forward pass, and its share of the matrix rate",
        "training_cost",
        "--shape llama-3.1-8b --tokens 10240 --repeats 5",
        "--tokens 96 --answer-tokens 8 --repeats 1",
    ),
    _lab(
        "retention",
        "reading over the same chunks without scores and eviction; twice the tokens; training over a forward pass",
        "retention_overhead",
        "--shape llama-3.1-8b --tokens 32768 --train-tokens 4096 --repeats 3",
        f"{_SMALL_READ} --train-tokens 64 --answer-tokens 8 --repeats 1",
    ),
    _bench(
        "compiled",
        "steps of one compiled program, as a CUDA graph, over steps as written",
        "--shape llama-3.1-8b --methods floor,locret --lengths 16K --new-tokens 128 --repeats 3 --dtype bfloat16 "
        "--compile",
        "--methods locret",
    ),
    _bench(
        "quantised",
        "units in eight and four bits: what they cost and save",
        "--shape llama-3.1-8b --methods floor,locret,locret+8bit,locret+4bit --lengths 64K --budget 16384 --repeats 2 "
        "--dtype bfloat16",
        "--methods locret,locret+4bit",
    ),
    _bench(
        "tiers",
        "a second tier in pinned host memory, with recall by each query",
        "--shape llama-3.1-8b --methods floor,locret,locret+recall,locret+recall:host_budget=all --lengths 32K "
        "--budget 8192 --repeats 2 --dtype bfloat16",
        "--methods locret+recall",
    ),
    _lab(
        "profile-prefill",
        "where the time of reading goes",
        "profile",
        "--shape llama-3.1-8b --what prefill --tokens 32768",
        f"--what prefill {_SMALL_READ} --answer-tokens 8",
    ),
    _lab(
        "profile-training",
        "where the time of a training step goes",
        "profile",
        "--shape llama-3.1-8b --what training --tokens 10240",
        f"--what training {_SMALL_READ} --answer-tokens 8",
    ),
    _lab(
        "rows",
        "rows of a batch read together over each by itself",
        "rows_together",
        "--shape llama-3.1-8b --tokens 16384 --rows 4 --repeats 3",
        f"{_SMALL_READ} --rows 2 --repeats 1",
    ),
    _lab(
        "scorers",
        "what each scorer costs over plain reading",
        "scorer_cost",
        "--shape llama-3.1-8b --tokens 16384 --repeats 2",
        f"{_SMALL_READ} --scorers locret,snapkv:window=8 --repeats 1",
    ),
    Piece(
        "sparse",
        "sparse attention to a chunk over dense attention",
        f"{LAB}.sparse_attention",
        "--slots 16384,65536,131072 --query-heads 32 --dtype bfloat16 --output {output}",
        "--slots 256 --tokens 128 --query-heads 2 --head-dim 32 --repeats 1 --threads 1 "
        "--strategies a_shape:sinks=8,window=32 --output {output}",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pieces and return an exit code: 0 if all that were run ended well, 1 if one did not."""
    options = _options(argv)
    chosen = [piece for piece in PIECES if options.piece is None or piece.name in options.piece]
    if options.list:
        print("\n".join(f"{piece.name:<18}{piece.about}" for piece in PIECES))
        return 0
    folder = Path(options.output).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), []
    for piece in chosen:
        if options.piece is None and finished(folder, piece, options.tiny):
            print(f"{piece.name}: done before")
            continue
        left = LIMIT if options.within is None else options.within - (time.monotonic() - began)
        if left < options.least:
            print(f"{piece.name}: no time left; run this again for it and those that follow")
            break
        record = run_piece(piece, folder, tiny=options.tiny, limit=min(LIMIT, left), together=options.together)
        print(f"{piece.name}: {record['outcome']} after {record['seconds']:.0f} s", flush=True)
        failed += [piece.name] if record["outcome"] != "done" else []
    if failed:
        print(f"see {', '.join(f'{folder / name}.log' for name in failed)}")
    return 1 if failed else 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu", description="Run everything that only a GPU can say.")
    parser.add_argument("--output", default="build/gpu", help="folder of the records (build/gpu)")
    parser.add_argument(
        "--piece", action="append", metavar="NAME", help="run this one, also if it is done (see --list)"
    )
    parser.add_argument("--list", action="store_true", help="print the pieces, and leave")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on the CPU, to see that pieces start")
    parser.add_argument("--together", action="store_true", help="with --tiny, run all but tests in this process")
    parser.add_argument("--within", type=_seconds, metavar="TIME", help="end by then, such as 9m; the rest waits")
    parser.add_argument("--least", type=_seconds, default=60, metavar="TIME", help="start nothing with less left (60)")
    options = parser.parse_args(argv)
    names = [piece.name for piece in PIECES]
    for name in options.piece or ():
        if name not in names:
            parser.error(f"--piece {name} is unknown; choose from {', '.join(names)}")
    if options.together and not options.tiny:
        parser.error("--together is for --tiny; a piece that fails on a GPU can break those after it")
    if not options.tiny and not options.list and not _has_gpu():
        parser.error("no CUDA device is here; give --tiny to see on the CPU that the pieces start")
    return options


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text} is no time; write 540, 9m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def finished(folder: Path, piece: Piece, tiny: bool) -> bool:
    """Return whether a piece has ended well, in this size."""
    try:
        record = json.loads((folder / f"{piece.name}.json").read_text())
        return bool(record["outcome"] == "done" and record["tiny"] == tiny)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_piece(piece: Piece, folder: Path, *, tiny: bool, limit: float, together: bool = False) -> dict[str, Any]:
    """Run a piece, and leave its record and log.

    Args:
        piece: What to run.
        folder: Where records are.
        tiny: Whether it is run on the CPU.
        limit: Seconds it may take.
        together: Whether it is run in this process, if it can be.

    Returns:
        The record.
    """
    from locret.environment import versions

    arguments = piece.arguments(folder / f"{piece.name}-record", tiny)
    record: dict[str, Any] = {
        "piece": piece.name,
        "about": piece.about,
        "command": " ".join(["python", "-m", piece.module, *arguments]),
        "tiny": tiny,
        "device": _device_name(),
        **versions(),
    }
    began = time.monotonic()
    with (folder / f"{piece.name}.log").open("w") as log:
        how: Callable[..., str] = _here if together and piece.module != "pytest" else _apart
        outcome = how(piece.module, arguments, log, limit)
    record |= {"outcome": outcome, "seconds": time.monotonic() - began}
    write_text(folder / f"{piece.name}.json", json.dumps(record, indent=1) + "\n")
    return record


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _apart(module: str, arguments: Sequence[str], log: Any, limit: float) -> str:
    """Run a module in a process of its own, which is ended with all that it started if it takes too long."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"too long: ended after {limit:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "done" if code == 0 else f"failed with exit code {code}"


def _here(module: str, arguments: Sequence[str], log: Any, _limit: float) -> str:
    """Run a module's command in this process."""
    command: Callable[[Sequence[str]], int] = importlib.import_module(module).command
    with redirect_stdout(log), redirect_stderr(log):
        try:
            code = command(arguments)
        except Exception as error:  # what a process of its own would end with
            print(f"{type(error).__name__}: {error}", file=log)
            code = 2
    return "done" if code == 0 else f"failed with exit code {code}"


if __name__ == "__main__":
    raise SystemExit(main())
