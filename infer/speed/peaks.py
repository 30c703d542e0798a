"""Most bytes alive while a prompt is read and answered, as the allocator hands them out, split by what they are for.

weights     the backbone's, and those of heads
cache       what the cache holds on to at its largest, counted from its tensors
host        the second tier of a cache, in host memory; no part of the total
workspace   all else that is alive at the peak: hidden states, MLPs, logits, what kernels allocate, copies of the cache

On CUDA the allocator keeps the peak itself; on the CPU every allocation of one run is recorded and played back. Reading
and generating have a peak each, for a method that forgets only afterwards has a large one and a small one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from locret.infer.speed.allocations import peak_bytes, phase
from locret.infer.speed.methods import BenchMethod
from locret.infer.speed.runs import BenchRun, BenchSetup, new_run


@dataclass(frozen=True)
class PeakBytes:
    """The moment of most memory, split."""

    weights: int
    cache: int
    workspace: int
    host: int = 0

    @property
    def total(self) -> int:
        """All of it, without what lies in the second tier."""
        return self.weights + self.cache + self.workspace

    def to_dict(self) -> dict[str, int]:
        """Return the numbers as plain data."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class RunPeaks:
    """Peaks of one run."""

    prefill: PeakBytes
    decode: PeakBytes
    moved: tuple[int, int] = (0, 0)
    """Bytes fetched from the second tier, for the prompt's last tokens and for the answer."""

    def to_dict(self) -> dict[str, object]:
        """Return the numbers as plain data."""
        peaks = {"prefill": self.prefill.to_dict(), "decode": self.decode.to_dict()}
        return {**peaks, "moved": dict(zip(("prefill", "decode"), self.moved, strict=True))}


def measure_peaks(setup: BenchSetup, method: BenchMethod, length: int) -> RunPeaks:
    """Read and answer a prompt once, and return the bytes that took; the run is not timed."""
    device = setup.prompt_1N.device
    return (_on_cuda if device.type == "cuda" else _on_cpu)(setup, method, length)


def _on_cpu(setup: BenchSetup, method: BenchMethod, length: int) -> RunPeaks:
    weights, run = setup.weight_bytes(method), new_run(setup, method, length)
    held: list[tuple[int, int, int]] = []

    def both() -> None:
        with phase("prefill"):
            first = run.read()
        held.append(_held(run))
        with phase("decode"):
            run.write(first)
        held.append(_held(run))

    peaks = peak_bytes(both).phases
    # Weights were there before, so no recorded allocation is theirs.
    prefill, decode = (
        PeakBytes(weights, cache, peaks[name] - cache - host, host)
        for name, (cache, host, _) in zip(("prefill", "decode"), held, strict=True)
    )
    return RunPeaks(prefill, decode, _moved(*held))


def _on_cuda(setup: BenchSetup, method: BenchMethod, length: int) -> RunPeaks:
    device, weights, run = setup.prompt_1N.device, setup.weight_bytes(method), new_run(setup, method, length)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    first = run.read()
    read, before = torch.cuda.max_memory_allocated(device), _held(run)
    torch.cuda.reset_peak_memory_stats(device)
    run.write(first)
    written, after = torch.cuda.max_memory_allocated(device), _held(run)
    prefill, decode = (
        PeakBytes(weights, cache, peak - weights - cache, host)
        for peak, (cache, host, _) in ((read, before), (written, after))
    )
    return RunPeaks(prefill, decode, _moved(before, after))


def _held(run: BenchRun) -> tuple[int, int, int]:
    """Return the bytes of the cache, of its second tier, and of what was fetched from there so far."""
    return run.cache_bytes(), run.host_bytes(), run.moved_bytes()


def _moved(read: tuple[int, int, int], written: tuple[int, int, int]) -> tuple[int, int]:
    return read[2], written[2] - read[2]
