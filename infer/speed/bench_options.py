"""The options of `locret-bench`: a field is a flag and a key of a recipe; lists are written `a,b` or as YAML lists."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from locret.base import method_spec
from locret.base.fields import Range, check_ranges
from locret.infer.evaluation.eval_options import Numbers
from locret.loading.options import DTYPES, WeightOptions
from locret.policy.resolve import PolicyFlags

MOST_PASSES = 2**18
"""Forward passes that are planned one by one; more take days."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(
    WeightOptions,
    PolicyFlags,
    usual=("shape", "model", "heads", "methods", "lengths", "budget", "new_tokens", "repeats"),
):
    """What is measured, and how often."""

    shape: Literal["cpu-512", "tiny", "llama-3.1-8b", "phi-3-mini-128k"] = "cpu-512"
    """Backbone of random weights."""
    model: str | None = None
    """Instead of --shape: folder of a backbone, or its Hub id."""
    heads: str | None = None
    """Trained retaining heads, a folder or a Hub id; fresh ones, which cost the same, if none."""
    methods: str | list[str] = "full,floor,locret"
    """Methods to compare: full (transformers' own cache), floor (the same chunks without scores and eviction), llamacpp
    (llama.cpp, of the same GGUF file), locret (retaining heads) or any scorer, with options and modifiers as in
    locret-eval: snapkv:kernel=7,pooling=max+pyramid, package.module:Class."""
    lengths: Numbers | None = None
    """Prompt tokens, such as 8192,16384 or 8K,16K (K is 1024); the shape's if not given."""
    budget: int | None = None  # type: ignore[assignment]
    """Cache units kept per KV head; the shape's if not given, as all that follow."""
    chunk_size: int | None = None  # type: ignore[assignment]
    """Prompt tokens per forward pass, for every method."""
    new_tokens: int = 32
    """Tokens generated after every prompt."""
    repeats: int = 10
    """Rounds in which everything is measured once."""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes the first CUDA device, else the CPU (for the larger shapes: nothing)."""
    dtype: str = "auto"
    """bfloat16, float16 or float32; auto takes the backbone's own on a GPU and what suits the CPU there."""
    seed: int = 0
    """Of random weights, fresh heads and prompts."""
    exclusive: ClassVar = (("shape", "model"),)

    def __post_init__(self) -> None:
        check_ranges(self, {"new_tokens": Range(1, MOST_PASSES), "repeats": Range(1, 10**6), "dtype": DTYPES})
        self.check_weights()
        if self.given() and self.model is None:
            raise ValueError(
                f"--{next(iter(self.given())).replace('_', '-')}: the weights of --shape are random and made here; "
                "give a backbone with --model, or drop it"
            )

    def method_names(self) -> list[str]:
        """Return the methods as they were written, in the order given, without repeats."""
        found = method_spec.split(self.methods)
        if not found:
            raise ValueError("--methods is empty; name at least one, such as full,floor,locret")
        return found


@dataclass(frozen=True, kw_only=True)
class BenchOutput:
    """Where the record goes."""

    output: str | None = None
    """Write the record as BASE.json and BASE.md."""
    overwrite: bool = False
    """Replace the files of an earlier record of that name."""
    json: bool = False
    """Print the record as one JSON object instead of tables."""
    dry_run: bool = False
    """Print what would be measured, with planned bytes, as JSON, and measure nothing."""
    quiet: bool = False
    """Print no warnings and no progress."""

    def paths(self) -> list[Path]:
        """Return the files of a record, after making sure that they can be written; none without --output."""
        if self.output is None:
            return []
        # Not with_suffix: a dot in BASE, as in llama-3.1-8b, is part of the name.
        base = Path(os.path.expanduser(self.output))
        files = [base.with_name(f"{base.name}.{kind}") for kind in ("json", "md")]
        if base.is_dir() or not os.access(base.parent, os.W_OK):
            raise ValueError(f"--output {self.output} names no files in a folder that can be written; give such a name")
        if (there := [file for file in files if file.exists()]) and not (self.overwrite or self.dry_run):
            raise ValueError(f"--output {self.output}: there is {there[0]}; choose another name, or give --overwrite")
        return files


OPTION_CLASSES = (BenchOptions, BenchOutput)
