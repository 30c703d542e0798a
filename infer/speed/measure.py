"""Measures a plan: seconds and bytes, in rounds that run everything once.

The machine's own rates, of a matrix product and of a copy, are measured in every round: what it could do at best.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig

from locret import RetainingHeads, loading
from locret.conversation.chat import now
from locret.infer.speed.plan import BenchPlan, random_model
from locret.infer.speed.ways import Held, Way

Key = tuple[str, int]
"""Method and prompt tokens."""
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the square matrices: large enough that more changes nothing."""
COPY_BYTES = {"cpu": 2**28, "cuda": 2**28}
"""More than the caches of a processor hold."""


class Sample(NamedTuple):
    """One run: a prompt read and answered."""

    prefill: float
    """Seconds from the prompt's ids to the first new token on the host."""
    decode: float
    """Seconds for all new tokens."""
    read: Held
    """Bytes when the prompt was read."""
    written: Held
    """And at the end."""
    peak: int | None
    """The most that a GPU had allocated."""


@dataclass(frozen=True)
class Measurements:
    """What came out, round by round; of what ran out of memory nothing."""

    rates: list[tuple[float, float]] = field(default_factory=list)
    """Operations per second of a product of two square matrices; bytes per second of a copy, read and written."""
    samples: dict[Key, list[Sample]] = field(default_factory=dict)


class Bench:
    """A backbone, heads and a prompt, made or loaded once for all runs of a plan that has a device."""

    def __init__(self, plan: BenchPlan) -> None:
        assert plan.device is not None
        self.plan, self.device, self.tokenizer = plan, plan.device, None
        if plan.source is None:
            self.model: Any = random_model(plan.shape.config, plan.options.seed, plan.dtype, plan.device)
        else:
            self.model = loading.load_model(plan.source, plan.shape.config, plan.device, plan.dtype)
            self.tokenizer = loading.load_tokenizer(plan.source)
        # Nothing ends an answer early, and no published sampling settings apply.
        self.model.generation_config = GenerationConfig(pad_token_id=0)
        self.heads: RetainingHeads | None = None
        if any(method.needs_heads for method in plan.methods):
            width, seed = plan.shape.hidden_dim, plan.options.seed
            self.heads = plan.trained or RetainingHeads.for_model(self.model, width, seed=seed)
            self.heads.follow(self.model)
        generator = torch.Generator().manual_seed(plan.options.seed)
        words = self.model.config.get_text_config().vocab_size
        self.prompt: Tensor = torch.randint(words, (1, max(plan.shape.lengths)), generator=generator).to(plan.device)

    def run(self, method: Way, length: int) -> Sample:
        """Read and answer the beginning of the prompt once."""
        ids, on_gpu = self.prompt[:, :length], self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        start = now(self.device)
        cache, logits = method.read(self, ids)
        first = logits.argmax(dim=-1, keepdim=True)
        prefill, read = now(self.device) - start, method.held(cache)
        start = now(self.device)
        new = method.write(self, cache, ids, first).tolist()
        decode = now(self.device) - start
        assert len(new[0]) == self.plan.options.new_tokens
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else None
        return Sample(prefill, decode, read, method.held(cache), peak)


def measure(plan: BenchPlan, *, quiet: bool = False) -> Measurements:
    """Measure everything in a plan that has a device, with a progress bar where standard error is a terminal."""
    device, found, failed = plan.device, Measurements(), set[Key]()
    assert device is not None
    cases = [(method, length) for length in plan.shape.lengths for method in plan.methods]
    rounds = range(1 + plan.options.repeats)
    with tqdm(total=len(rounds) * len(cases), desc="measuring", disable=quiet or None) as bar:
        try:
            bench = Bench(plan)
        except torch.OutOfMemoryError as error:
            raise OSError(
                f"{device} is out of memory before a prompt is read; take a smaller --shape or --dtype"
            ) from error
        for timed in rounds:
            if timed:
                found.rates.append(measure_rates(device, plan.dtype))
            for method, length in cases:
                key = method.name, length
                try:
                    if key not in failed:
                        sample = bench.run(method, length)
                        if timed:  # the first round warms up
                            found.samples.setdefault(key, []).append(sample)
                except torch.OutOfMemoryError:
                    failed.add(key)
                    found.samples.pop(key, None)
                gc.collect()
                if key in failed and torch.cuda.is_available():
                    torch.cuda.empty_cache()  # here, because the exception held on to everything that was allocated
                bar.update()
    return found


def measure_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the operations per second of a matrix product, and the bytes per second of a copy."""
    size, count = MATMUL_SIZE[device.type], COPY_BYTES[device.type] // dtype.itemsize
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    product = torch.empty_like(left)
    flops = 2 * size**3 / _timed(device, lambda: torch.mm(left, right, out=product))
    # Zeros that were never written need no memory: both sides must be real.
    source, target = torch.ones(count, dtype=dtype, device=device), torch.ones(count, dtype=dtype, device=device)
    return flops, 2 * source.nbytes / _timed(device, lambda: target.copy_(source))


def _timed(device: torch.device, call: Callable[[], object]) -> float:
    call()  # warms up
    runs, start = 10 if device.type == "cuda" else 1, now(device)  # one call is as short as the wait for a GPU
    for _ in range(runs):
        call()
    return (now(device) - start) / runs
