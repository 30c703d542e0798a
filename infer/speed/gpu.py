"""What only a GPU can say, in pieces that leave records, most important first; weights are random.

`make gpu` runs all into build/gpu, again: those that are missing; `python -m locret.infer.speed.gpu --pieces writing`
runs one, `--tiny` all on the CPU. A piece writes NAME.json after every line: one that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import profile

from locret import RetentionCache, generate
from locret.base.files import write_text
from locret.cache import captured_step
from locret.environment import versions
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.machine import measure_rates, now
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.runs import make_setup, new_run
from locret.infer.speed.side_by_side import quantiles

PIECES = ("writing", "profile", "reading", "tests")
LIMIT = 240
"""Seconds that a piece may take."""
SKIPPED = 8
"""Tokens that are not timed: meanwhile a step is captured."""


class Pieces:
    """The shape, and what is measured with it: a method for every piece."""

    def __init__(self, folder: Path, tiny: bool) -> None:
        self.folder, self.tiny = folder, tiny
        self.setup = make_setup(self.plan(131072))
        self.model, self.device = self.setup.model, self.setup.prompt_1N.device
        self.rates = measure_rates(self.device, self.setup.plan.dtype)

    def plan(self, length: int, **numbers: int) -> BenchPlan:
        """Return the plan of a prompt; on the tiny shape everything is a hundredth as long."""
        given: dict[str, Any] = {"budget": 6000, "chunk_size": 3072, "stabilizers": 2500, "local_len": 100, **numbers}
        given = {name: -(-value // (96 if self.tiny else 1)) for name, value in {**given, "lengths": length}.items()}
        shape = ("tiny", "cpu", "float32", 24) if self.tiny else ("llama-3.1-8b", "cuda", "bfloat16", 128)
        given |= dict(zip(("shape", "device", "dtype", "new_tokens"), shape, strict=True), methods="floor,locret")
        return make_plan(BenchOptions(**given), set(given))

    def run(self, name: str) -> str:
        """Run a piece and return how it ended."""
        self.name, self.rows, outcome = name, list[dict[str, Any]](), "done"
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(LIMIT)
        try:
            getattr(self, name)()
        except Exception as error:  # the next piece runs whatever happened to this one
            outcome = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        signal.alarm(0)
        print(f"{name}: {outcome}", flush=True)
        self._save(outcome)
        return outcome

    def _note(self, **row: Any) -> None:
        self.rows.append(row)
        print(f"{self.name}: {json.dumps(row)[:400]}", flush=True)
        self._save("cut short")

    def _save(self, outcome: str) -> None:
        where = {"device": "cpu" if self.tiny else torch.cuda.get_device_name(), **versions(), **vars(self.rates)}
        write_text(self.folder / f"{self.name}.json", json.dumps({"outcome": outcome, **where, "rows": self.rows}))

    def writing(self) -> None:
        """Write with steps that are captured, and as written: locret, the floor, and over all units."""
        some, every = self._read(6000), self._read(16384)
        for rows, (method, how) in product(
            (1, 8), (("locret", True), ("floor", True), ("full", True), ("locret", False))
        ):
            self._write(every if method == "full" else some, method, how, rows)

    def profile(self) -> None:
        """Look into ten written tokens, and into two chunks of a prompt."""
        read = self._read(6000)
        for captured in (True, False):
            with self._looking(f"ten tokens, captured: {captured}", self.model, SKIPPED + 2, 10):
                self._write(read, "locret", captured, 1)
        with self._looking("two chunks", self.model.get_decoder(), 5, 2):
            self._read(6000, 32768)

    def reading(self) -> None:
        """Read in chunks of several sizes, beside the floor."""
        self._read(6000)  # warms up
        for size, length in ((3072, 131072), (8192, 32768), (4096, 32768), (2048, 32768)):
            plan, floor = self.plan(length, chunk_size=size), 0.0
            for method in plan.methods:
                run, start = new_run(replace(self.setup, plan=plan), method, plan.lengths[0]), now(self.device)
                run.read()
                seconds = now(self.device) - start
                floor = floor or seconds
                self._note(
                    method=method.name, chunk_size=size, length=length, seconds=seconds, to_floor=seconds / floor
                )

    def tests(self) -> None:
        """Run the tests that need a GPU."""
        line = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "tests/core/test_label_kernel.py"]
        done = subprocess.run(line, capture_output=True, text=True)
        self._note(said=(done.stdout + done.stderr).splitlines()[-20:], code=done.returncode)

    def _read(self, budget: int, length: int = 16384) -> RetentionCache:
        plan = self.plan(length, budget=budget)
        run: Any = new_run(replace(self.setup, plan=plan), plan.methods[1], plan.lengths[0])
        run.read()
        return run.cache  # type: ignore[no-any-return]

    def _write(self, read: RetentionCache, method: str, captured: bool, rows: int) -> None:
        """Write after what was read; the floor leaves out of the same step what retention adds."""
        cache, beats = read.copy(), [time.perf_counter()]
        cache.batch_repeat_interleave(rows)
        changed: dict[str, Any] = {"DEVICES": (self.device.type,) if captured else ()}
        changed |= {"CapturingReader": PlainReader} if method == "floor" else {}
        changed |= {"capture": lambda step, _device: step} if self.tiny else {}  # a CPU has no graphs
        units = cache.governed[0].fill
        hook = self.model.register_forward_pre_hook(lambda *_: beats.append(time.perf_counter()))
        with patch.multiple(captured_step, **changed):
            ids = generate(self.model, cache=cache, max_new_tokens=self.setup.plan.new_tokens, do_sample=False)
        hook.remove()
        # A pass begins when the token of the one before has come to the host.
        seconds = quantiles([after - before for before, after in pairwise(beats[SKIPPED:])])
        self._note(
            method=method, captured=captured, rows=rows, units=units, seconds_per_token=seconds,
            seconds_before=beats[SKIPPED] - beats[0], ids=ids[0, :12].tolist(),
        )  # fmt: skip

    @contextmanager
    def _looking(self, what: str, module: torch.nn.Module, first: int, passes: int) -> Iterator[None]:
        """Profile so many forward passes of a module, and what is between them."""
        record, moments = profile(), list[float]()

        def at_pass(*_: Any) -> None:
            moments.append(now(self.device))
            if len(moments) in (first, first + passes):
                (record.start if len(moments) == first else record.stop)()

        hook = module.register_forward_pre_hook(at_pass)
        yield
        hook.remove()
        events, cpu = record.key_averages(), torch.autograd.DeviceType.CPU
        kernels = [(e.self_device_time_total / 1e3, e.count, e.key[:100]) for e in events if e.device_type != cpu]
        calls = [(e.self_cpu_time_total / 1e3, e.count, e.key[:60]) for e in events if e.device_type == cpu]
        ms = {"ms": 1e3 * (moments[first + passes - 1] - moments[first - 1]), "kernel_ms": sum(e[0] for e in kernels)}
        self._note(what=what, **ms, kernels=sorted(kernels)[:-26:-1], calls=sorted(calls)[:-41:-1])


class PlainReader(captured_step.CapturingReader):
    """The same steps over the same slots, without features, original positions and scores."""

    noted = 2

    def attended(self, layer: Any) -> None:
        if not self.static:
            super().attended(layer)

    def rate_waiting(self) -> None:
        """Rate nothing."""


def _too_long(*_: Any) -> None:
    raise TimeoutError("its time is over")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pieces and return an exit code: 0 if all that were run ended well, 1 if one did not."""
    parser = argparse.ArgumentParser("gpu", description="Measure what only a GPU can say.")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="folder of the records (build/gpu)")
    parser.add_argument("--pieces", default=",".join(PIECES), help="names with commas between (all)")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU")
    options = parser.parse_args(argv)
    chosen = options.pieces.split(",")
    if unknown := [name for name in chosen if name not in PIECES]:
        parser.error(f"--pieces {unknown[0]} is unknown; choose from {', '.join(PIECES)}")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device is here; give --tiny to see on the CPU that the pieces run")
    options.output.mkdir(parents=True, exist_ok=True)
    done = [file.stem for file in options.output.glob("*.json") if '"outcome": "done"' in file.read_text()]
    chosen = [name for name in chosen if name not in done]
    pieces = Pieces(options.output, options.tiny) if chosen else None
    ends = [pieces.run(name) for name in chosen if pieces is not None]
    return int(any(end != "done" for end in ends))


if __name__ == "__main__":
    raise SystemExit(main())
