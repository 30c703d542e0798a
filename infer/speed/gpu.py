"""What only a GPU can say, in pieces that leave records, most important first; weights are random.

    make gpu                                                        # all, into build/gpu; again: those that are missing
    python -m locret.infer.speed.gpu --pieces writing=40,profile    # these, the first within 40 seconds
    python -m locret.infer.speed.gpu --tiny --output build/tiny     # on the CPU, to see that they run

A piece writes NAME.json after every line, so that one that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from locret import RetentionCache, generate
from locret.cache import compiled_step
from locret.environment import versions
from locret.files import write_text
from locret.infer.speed.bench_options import BenchOptions
from locret.infer.speed.cost import Pass, cost
from locret.infer.speed.machine import measure_rates, now
from locret.infer.speed.plan import BenchPlan
from locret.infer.speed.resolve import make_plan
from locret.infer.speed.runs import BoundedRun, make_setup, new_run
from locret.infer.speed.side_by_side import quantiles

PIECES = ("writing", "profile", "reading", "compiled", "tests")
LIMIT = 240
"""Seconds that a piece may take."""
SKIPPED = 8
"""Tokens that are not timed: meanwhile steps are compiled and captured."""


class Pieces:
    """The shape, and what is measured with it: a method for every piece."""

    def __init__(self, folder: Path, tiny: bool) -> None:
        self.folder, self.tiny, self.cuda = folder, tiny, not tiny
        self.setup = make_setup(self.plan(131072))
        self.device, self.decoder = self.setup.prompt_1N.device, self.setup.model.get_decoder()
        self.rates = measure_rates(self.device, self.setup.plan.dtype)

    def plan(self, length: int, **numbers: int) -> BenchPlan:
        """Return the plan of a prompt; on the tiny shape everything is a hundredth as long."""
        given: dict[str, Any] = {"budget": 6000, "chunk_size": 3072, "stabilizers": 2500, "local_len": 100, **numbers}
        given = {name: -(-value // (96 if self.tiny else 1)) for name, value in {**given, "lengths": length}.items()}
        shape = ("tiny", "cpu", "float32", 24) if self.tiny else ("llama-3.1-8b", "cuda", "bfloat16", 128)
        given |= {
            "methods": "floor,locret",
            **dict(zip(("shape", "device", "dtype", "new_tokens"), shape, strict=True)),
        }
        return make_plan(BenchOptions(**given), set(given))

    def run(self, name: str, limit: int) -> str:
        """Run a piece and return how it ended, in a sentence."""
        self.name, self.rows, outcome, trace = name, list[dict[str, Any]](), "done", None
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(limit)
        try:
            getattr(self, name)()
        except Exception as error:  # the next piece runs whatever happened to this one
            outcome, trace = " ".join(f"{type(error).__name__}: {error}".split())[:300], traceback.format_exc()
        finally:
            signal.alarm(0)
        self._save(outcome, trace)
        return outcome

    def _note(self, **row: Any) -> None:
        self.rows.append(row)
        print(f"{self.name}: {json.dumps(row)[:400]}", flush=True)
        self._save("cut short")

    def _save(self, outcome: str, trace: str | None = None) -> None:
        where = {"device": torch.cuda.get_device_name() if self.cuda else "cpu", **versions(), **vars(self.rates)}
        record = {"outcome": outcome, "trace": trace, **where, "rows": self.rows}
        write_text(self.folder / f"{self.name}.json", json.dumps(record, indent=1) + "\n")

    def writing(self) -> None:
        """Write with steps that are run as written, and captured: locret, the floor, and over all units."""
        some, every = self._read(6000), self._read(16384)
        for rows in (1, 8):
            self._write(some, "locret", "captured", rows)
            self._write(some, "floor", "captured", rows)
            self._write(some, "locret", "as written", rows)
            self._write(every, "full", "captured", rows)

    def compiled(self) -> None:
        """Write with steps compiled by inductor; captured ones again, for what was run meanwhile may slow them."""
        torch._logging.set_logs(perf_hints=True)  # says why a graph is not replayed
        read = self._read(6000)
        for method, how, rows in (("locret", "captured", 1), ("locret", "compiled", 1), ("floor", "compiled", 1)):
            self._write(read, method, how, rows)
        self._write(read, "locret", "compiled", 8)

    def profile(self) -> None:
        """Look into two chunks of a prompt, and into ten written tokens."""
        with self._looking("two chunks", 5):
            self._read(6000, 32768)
        read = self._read(6000)
        for how in ("captured", "as written"):
            with self._looking(f"ten tokens {how}", SKIPPED + 2, 10):
                self._write(read, "locret", how, 1)

    def reading(self) -> None:
        """Read in chunks of several sizes, beside the floor."""
        self._read(6000)  # warms up
        for size, length in ((3072, 131072), (8192, 32768), (4096, 32768), (2048, 32768)):
            plan, floor = self.plan(length, chunk_size=size), 0.0
            for method in plan.methods:
                if self.cuda:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                run, start = new_run(replace(self.setup, plan=plan), method, plan.lengths[0]), now(self.device)
                run.read()
                seconds = now(self.device) - start
                floor = floor or seconds
                rate = plan.cost(method, plan.lengths[0])["prefill"].flops / seconds
                self._note(
                    method=method.name, chunk_size=size, tokens=plan.lengths[0], seconds=seconds,
                    tokens_per_second=plan.lengths[0] / seconds, to_floor=seconds / floor,
                    share_of_matrix_rate=rate / self.rates.flops_per_second,
                    peak_bytes=torch.cuda.max_memory_allocated() if self.cuda else None,
                )  # fmt: skip

    def tests(self) -> None:
        """Run the tests that need a GPU."""
        line = [sys.executable, "-m", "pytest", "-q", "tests/gpu", "tests/core/test_label_kernel.py"]
        done = subprocess.run(line, capture_output=True, text=True)
        self._note(said=(done.stdout + done.stderr).splitlines()[-20:])
        if done.returncode:
            raise RuntimeError(f"pytest ended with {done.returncode}")

    def _read(self, budget: int, length: int = 16384) -> RetentionCache:
        plan = self.plan(length, budget=budget)
        run = new_run(replace(self.setup, plan=plan), plan.methods[1], plan.lengths[0])
        assert isinstance(run, BoundedRun)
        run.read()
        return run.cache

    def _write(self, read: RetentionCache, method: str, how: str, rows: int) -> None:
        """Write after what was read; the floor leaves out of the same step what retention adds."""
        plan, cache, beats = self.setup.plan, read.copy(), [time.perf_counter()]
        cache.batch_repeat_interleave(rows)
        held = (cache.governed[0].fill,) * plan.sizes.backbone.num_layers
        changed: dict[str, Any] = {"Step": compiled_step.Step if method == "locret" else PlainStep}
        if how == "captured":
            changed["_program"] = lambda run, *_, **__: Captured(run)
        options: dict[str, Any] = {"max_new_tokens": plan.new_tokens, "do_sample": False}
        options["compile"] = how != "as written" and ("eager" if self.tiny else True)
        hook = self.decoder.register_forward_pre_hook(lambda *_: beats.append(time.perf_counter()))
        try:
            with patch.multiple(compiled_step, **changed):
                ids = generate(self.setup.model, cache=cache, **options)
        finally:
            hook.remove()
        # A pass begins when the token of the one before has come to the host.
        seconds = quantiles([after - before for before, after in pairwise(beats[SKIPPED:])])
        weights = plan.sizes.element_size * (plan.sizes.linear + plan.sizes.lm_head)
        units = cost(plan.sizes, [Pass(1, held, cache.seen, 1)]).bytes - weights
        rate = (weights + rows * units) / seconds["p50"]
        self._note(
            method=method, how=how, rows=rows, units=held[0], seconds_per_token=seconds,
            tokens_per_second=rows / seconds["p50"], share_of_memory_rate=rate / self.rates.bytes_per_second,
            seconds_before=beats[SKIPPED] - beats[0], ids=ids[0, :12].tolist(),
            inductor={k: v for k, v in torch._dynamo.utils.counters["inductor"].items() if "cudagraph" in k},
        )  # fmt: skip

    @contextmanager
    def _looking(self, what: str, first: int, passes: int = 2) -> Iterator[None]:
        """Profile so many forward passes, and what is between them."""
        record = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.cuda])
        moments: list[float] = []

        def at_pass(*_: Any) -> None:
            moments.append(now(self.device))
            if len(moments) == first:
                record.start()
            elif len(moments) == first + passes:
                record.stop()

        hook = self.decoder.register_forward_pre_hook(at_pass)
        try:
            yield
        finally:
            hook.remove()
        events = sorted(record.key_averages(), key=lambda e: -e.self_device_time_total)
        kernels = [e for e in events if e.device_type != torch.autograd.DeviceType.CPU]
        calls = sorted((e for e in events if e not in kernels), key=lambda e: -e.self_cpu_time_total)
        driver = [e for e in calls if e.key.startswith("cu") or e.key == "aten::_local_scalar_dense"]
        self._note(
            what=what, ms=1e3 * (moments[first + passes - 1] - moments[first - 1]),
            kernel_ms=sum(e.self_device_time_total for e in kernels) / 1e3,
            driver=[(e.key, e.count, e.self_cpu_time_total / 1e3) for e in driver],
            kernels=[(e.key[:120], e.count, e.self_device_time_total / 1e3) for e in kernels[:25]],
            calls=[(e.key[:60], e.count, e.self_cpu_time_total / 1e3) for e in calls[:25]],
        )  # fmt: skip
        record.export_chrome_trace(str(self.folder / f"{what.replace(' ', '_')}.trace.json.gz"))


class PlainStep(compiled_step.Step):
    """The same step over the same slots, without features, original positions and scores."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.keys[layer_idx].index_copy_(2, self.slot, key_states)
        self.values[layer_idx].index_copy_(2, self.slot, value_states)
        self.projections[layer_idx].clear()
        return self.keys[layer_idx], self.values[layer_idx]

    def advance(self, hidden: Any) -> None:
        self.reader.cache.finished(hidden)
        self._left -= 1
        if self._left:
            self.slot += 1
            self.mask.index_fill_(-1, self.slot, 0)


class Captured:
    """A decoder's forward pass as a CUDA graph of the kernels that it starts as written: no compiler is waited for."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.graph = run, torch.cuda.CUDAGraph() if torch.cuda.is_available() else None
        self.given: dict[str, Any] = {}

    def __call__(self, decoder: Any, **given: Any) -> Any:
        if self.graph is None:
            return self.run(decoder, **given)
        fresh = {name: given.pop(name) for name in ("input_ids", "position_ids")}
        if not self.given:
            self.given = {name: value.clone() for name, value in fresh.items()}
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.run(decoder, **self.given, **given)  # sets up what is set up once; its slot is written again
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self.graph):
                self.out = self.run(decoder, **self.given, **given)
        for name, value in fresh.items():
            self.given[name].copy_(value)
        self.graph.replay()
        return self.out


def _too_long(*_: Any) -> None:
    raise TimeoutError("its time is over")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pieces and return an exit code: 0 if all that were run ended well, 1 if one did not."""
    parser = argparse.ArgumentParser("gpu", description="Measure what only a GPU can say.")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="folder of the records (build/gpu)")
    parser.add_argument("--pieces", default=",".join(PIECES), help="NAME or NAME=SECONDS, with commas between")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape on the CPU")
    options = parser.parse_args(argv)
    chosen = [piece.partition("=") for piece in options.pieces.split(",")]
    for name in {name for name, *_ in chosen} - set(PIECES):
        parser.error(f"--pieces {name} is unknown; choose from {', '.join(PIECES)}")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device is here; give --tiny to see on the CPU that the pieces run")
    options.output.mkdir(parents=True, exist_ok=True)
    files = {name: options.output / f"{name}.json" for name in PIECES}
    chosen = [
        one for one in chosen if not files[one[0]].exists() or '"outcome": "done"' not in files[one[0]].read_text()
    ]
    pieces, ends = Pieces(options.output, options.tiny) if chosen else None, []
    for name, _, limit in chosen:
        began = time.monotonic()
        assert pieces is not None
        ends.append(pieces.run(name, int(limit or LIMIT)))
        print(f"{name}: {ends[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    return int(any(end != "done" for end in ends))


if __name__ == "__main__":
    raise SystemExit(main())
