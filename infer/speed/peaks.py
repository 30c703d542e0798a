"""Most bytes alive while a prompt is read and answered, as the allocator hands them out, split by what they are for.

weights     the backbone's, and those of heads
cache       what the cache holds on to at its largest, counted from its tensors
workspace   all else that is alive at the peak: hidden states, MLPs, logits, what kernels allocate, copies of the cache

On CUDA the allocator keeps the peak itself; on the CPU every allocation of one run is recorded and played back. Reading
and generating have a peak each, for a method that forgets only afterwards has a large one and a small one. Beside it
stands what the process took from the system meanwhile: more, because memory that was freed is not given back at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from locret.infer.speed.allocations import peak_bytes, phase
from locret.infer.speed.methods import BenchMethod
from locret.infer.speed.resident import resident_growth
from locret.infer.speed.runs import BenchSetup, new_run


@dataclass(frozen=True)
class PeakBytes:
    """The moment of most memory, split."""

    weights: int
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.workspace

    def to_dict(self) -> dict[str, int]:
        """Return the numbers as plain data."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class RunPeaks:
    """Peaks of one run."""

    prefill: PeakBytes
    decode: PeakBytes
    process: int | None
    """What the process took for it, free blocks included, with the weights: device memory on CUDA, resident memory on
    the CPU; None where the system does not tell."""

    def to_dict(self) -> dict[str, object]:
        """Return the numbers as plain data."""
        return {"prefill": self.prefill.to_dict(), "decode": self.decode.to_dict(), "process": self.process}


def measure_peaks(setup: BenchSetup, method: BenchMethod, length: int) -> RunPeaks:
    """Read and answer a prompt once, and return the bytes that took; the run is not timed."""
    device = setup.prompt_1N.device
    return (_on_cuda if device.type == "cuda" else _on_cpu)(setup, method, length)


def _on_cpu(setup: BenchSetup, method: BenchMethod, length: int) -> RunPeaks:
    weights, run, caches = setup.weight_bytes(method), new_run(setup, method, length), []
    resident = resident_growth(lambda: run.write(run.read()))
    run = new_run(setup, method, length)

    def both() -> None:
        with phase("prefill"):
            first = run.read()
        caches.append(run.cache_bytes())
        with phase("decode"):
            run.write(first)
        caches.append(run.cache_bytes())

    peaks = peak_bytes(both).phases
    # Weights were there before, so no recorded allocation is theirs.
    prefill, decode = (
        PeakBytes(weights, cache, peaks[name] - cache)
        for name, cache in zip(("prefill", "decode"), caches, strict=True)
    )
    return RunPeaks(prefill, decode, None if resident is None else weights + resident)


def _on_cuda(setup: BenchSetup, method: BenchMethod, length: int) -> RunPeaks:
    device, weights, run = setup.prompt_1N.device, setup.weight_bytes(method), new_run(setup, method, length)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    first = run.read()
    read, cache = torch.cuda.max_memory_allocated(device), run.cache_bytes()
    reserved = torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run.write(first)
    written, grown = torch.cuda.max_memory_allocated(device), run.cache_bytes()
    prefill = PeakBytes(weights, cache, read - weights - cache)
    decode = PeakBytes(weights, grown, written - weights - grown)
    return RunPeaks(prefill, decode, max(reserved, torch.cuda.max_memory_reserved(device)))
