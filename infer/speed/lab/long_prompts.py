"""Reads a prompt of millions of tokens as a stream, and says what it took: host memory, cache, seconds, the answer.

    python -m locret.infer.speed.lab.long_prompts --model checkpoints/tiny --heads checkpoints/tiny-heads
    python -m locret.infer.speed.lab.long_prompts --kind number --tokens 10485760 --model checkpoints/tiny --read false

Host memory is the process's peak resident set, in which the backbone is; its growth since the backbone was loaded is
what the prompt and its cache cost. Without reading, only the stream is made and counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from locret import RetentionPolicy, loading
from locret.cli.command import parse_options, print_json, run
from locret.conversation.document import Document, ReadingBar
from locret.environment import peak_resident_bytes, versions
from locret.infer.answer import MeasuredCache, answer
from locret.infer.infer_options import GenerationOptions, ModelOptions
from locret.infer.speed.lab.streamed_prompts import LongPrompt, stream_needle, stream_number
from locret.load_options import ScorerOptions
from locret.policy.resolve import PolicyFlags, resolve_options

KINDS = ("needle", "needle-passkey", "number", "passkey")


@dataclass(frozen=True, kw_only=True)
class LongPromptOptions:
    """Which prompt is made, and whether it is read."""

    kind: str = "needle-passkey"
    """needle (the sandwich in essays), needle-passkey (a pass key in essays), number or passkey (InfiniteBench)."""
    tokens: int = 1 << 20
    """Length of the prompt."""
    depth: float = 0.5
    """Where the needle is, 0 to 1."""
    prompt_seed: int = 0
    """Same seed, same prompt."""
    data_dir: str | None = None
    """Where essays lie; filler if none."""
    read: bool = True
    """Read the prompt and answer it; if false, only make it."""
    threads: int = 1
    """CPU threads."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"--kind {self.kind} is unknown; choose one of {', '.join(KINDS)}")

    def prompt(self, tokenizer: Any) -> LongPrompt:
        """Return the stream.

        Raises:
            ValueError: If length, depth or essays do not fit.
        """
        if not self.kind.startswith("needle"):
            form = "number_string" if self.kind == "number" else self.kind
            return stream_number(tokenizer, self.tokens, depth=self.depth, seed=self.prompt_seed, form=form)
        return stream_needle(
            tokenizer,
            self.tokens,
            depth=self.depth,
            seed=self.prompt_seed,
            data_dir=None if self.data_dir is None else Path(self.data_dir).expanduser(),
            passkey=self.kind == "needle-passkey",
        )


class _Counted:
    """Passes a stream on and counts it."""

    def __init__(self, blocks: Iterable[list[int]]) -> None:
        self.blocks, self.tokens, self.longest = blocks, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        for block in self.blocks:
            self.tokens += len(block)
            self.longest = max(self.longest, len(block))
            yield block


def make(blocks: _Counted) -> dict[str, Any]:
    """Make the prompt, block by block, and return what it came to."""
    start = time.perf_counter()
    for _ in blocks:
        pass
    return {"prompt_tokens": blocks.tokens, "seconds": time.perf_counter() - start}


def reader(
    options: ModelOptions, scorer_options: ScorerOptions, flags: PolicyFlags, chosen: set[str]
) -> tuple[Any, RetentionPolicy]:
    """Return a backbone with an empty cache, and the policy of the cache.

    Raises:
        ValueError: If backbone, heads or policy do not fit.
    """
    config, device = loading.load_config(options), loading.device_of_source(options)
    scorer, recommended = loading.load_scorer(scorer_options)
    loading.check_matches(scorer_options, scorer, config)
    policy = resolve_options(flags, chosen, recommended)
    model = loading.load_model(options, config, device, loading.resolve_dtype(options.dtype, config, device))
    return (model, MeasuredCache(model, scorer, policy)), policy


def command(argv: Sequence[str] | None = None) -> int:
    """Make or read the prompt and print one JSON object.

    Raises:
        ValueError: If an option does not fit.
    """
    import torch

    classes = [LongPromptOptions, ModelOptions, ScorerOptions, GenerationOptions, PolicyFlags]
    name = "locret.infer.speed.lab.long_prompts"
    (options, model, scorer, generation, flags), chosen = parse_options(
        name, (__doc__ or "").split("\n")[0], classes, argv
    )
    torch.set_num_threads(options.threads)
    tokenizer = loading.load_tokenizer(model)
    prompt, found = options.prompt(tokenizer), {}
    blocks = _Counted(prompt.ids)
    if options.read:
        (backbone, cache), policy = reader(model, scorer, flags, chosen)
        before = peak_resident_bytes()
        bar = ReadingBar(Document("prompt", unit="tokens"))
        result = answer(backbone, tokenizer, bar.blocks(blocks), cache, generation, attn=model.attn, bar=bar)
        found = {**asdict(result), "policy": policy.to_dict()}
    else:
        before = peak_resident_bytes()
        found = make(blocks)
    found |= {"expected": prompt.answer, "haystack": prompt.haystack, "longest_block": blocks.longest}
    peak = peak_resident_bytes()
    memory = {"peak_resident_bytes": peak, "resident_growth_bytes": peak - before}
    print_json({**asdict(options), "model": model.model, **found, **memory, "versions": versions()})
    return 0


if __name__ == "__main__":
    run(command)
