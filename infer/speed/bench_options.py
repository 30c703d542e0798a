"""The options of `locret-bench`: a field is a flag and a key of a recipe; lists are written `a,b` or as YAML lists."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from locret.base import method_spec
from locret.base.fields import MOST_THREADS
from locret.loading.options import DTYPES, WeightOptions
from locret.policy.budget import parse_bytes
from locret.policy.resolve import PolicyFlags

Numbers = int | str | list[int | str]
Names = str | list[str]
MOST_PASSES = 2**18
"""Forward passes that are planned one by one; more take days."""
_THOUSANDS = {"": 1, "K": 1024, "M": 1024**2}


@dataclass(frozen=True, kw_only=True)
class BenchOptions(WeightOptions, PolicyFlags):
    """What is measured, and how often."""

    shape: str = "cpu-512"
    """Backbone of random weights: cpu-512, cpu-deep, tiny, llama-3.1-8b, phi-3-mini-128k or qwen3-8b."""
    model: str | None = None
    """Instead of --shape: folder of a backbone, or its Hub id."""
    heads: str | None = None
    """Trained retaining heads, a folder or a Hub id; fresh ones, which cost the same, if none."""
    hidden_dim: int | None = None
    """Width between a fresh head's two layers, d_R; the shape's if not given."""
    methods: str | list[str | dict[str, Any]] = "full,floor,locret"
    """Methods to compare: full (transformers' own cache), floor (the same chunks without scores and eviction), locret
    (retaining heads) or any scorer, with options and modifiers as in locret-eval: snapkv:kernel=7,pooling=max+pyramid,
    package.module:Class, or in a recipe {snapkv: {kernel: 7}}."""
    lengths: Numbers | None = None
    """Prompt tokens, such as 8192,16384 or 8K,16K (K is 1024); the shape's if not given."""
    budget: int | None = None  # type: ignore[assignment]
    """Cache units kept per KV head; the shape's if not given, as all that follow."""
    chunk_size: int | Literal["auto"] | None = None  # type: ignore[assignment]
    """Prompt tokens per forward pass, for every method; auto: what locret-infer takes here for the bounded methods."""
    new_tokens: int = 32
    """Tokens generated after every prompt."""
    repeats: int = 10
    """Rounds in which everything is measured once."""
    threads: int | None = None
    """CPU threads; as many as PyTorch takes if not given."""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes the first CUDA device, else the CPU (for the larger shapes: nothing)."""
    dtype: str = "auto"
    """bfloat16, float16 or float32; auto takes the backbone's own on a GPU and what suits the CPU there."""
    memory_cap: str | None = None
    """Device memory that the process may take, such as 24GB; what does not fit is reported as out of memory."""
    seed: int = 0
    """Of random weights, fresh heads and prompts."""
    exclusive: ClassVar = (("shape", "model"),)

    def __post_init__(self) -> None:
        for name, most in (
            ("new_tokens", MOST_PASSES),
            ("repeats", None),
            ("threads", MOST_THREADS),
            ("hidden_dim", 2**20),
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value} is too small; give 1 or more")
            if value is not None and most is not None and value > most:
                raise ValueError(f"--{name.replace('_', '-')} {value} is too large; give at most {most}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype} is unknown; choose one of {', '.join(DTYPES)}")
        self.check_weights()
        if self.given() and self.model is None:
            raise ValueError(
                f"{', '.join('--' + name.replace('_', '-') for name in self.given())}: the weights of --shape are "
                "random and made here; give a backbone with --model, or drop it"
            )
        if self.memory_cap is not None:
            self.cap_bytes()

    def prompt_lengths(self) -> tuple[int, ...] | None:
        """Return the lengths in ascending order, without repeats; None: the shape's.

        Raises:
            ValueError: For what is not a length.
        """
        if self.lengths is None:
            return None
        given = self.lengths
        parts = given.split(",") if isinstance(given, str) else given if isinstance(given, list) else [given]
        return tuple(sorted({_length(str(part).strip(), given) for part in parts}))

    def method_names(self) -> list[Any]:
        """Return the methods as they were written, in the order given, without repeats.

        Raises:
            ValueError: If there are none.
        """
        found = method_spec.split(self.methods)
        if not found:
            raise ValueError("--methods is empty; name at least one, such as full,floor,locret")
        return found

    def cap_bytes(self) -> int | None:
        """Return the bytes of `--memory-cap`.

        Raises:
            ValueError: For what is not an amount of memory.
        """
        if self.memory_cap is None:
            return None
        try:
            return parse_bytes(self.memory_cap)
        except ValueError as error:
            raise ValueError(f"--memory-cap: {error}") from None


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
    """Print what would be measured, with planned bytes, and measure nothing."""
    quiet: bool = False
    """Print no warnings, no progress, and no table in addition to the JSON of --dry-run."""

    def paths(self) -> dict[str, Path]:
        """Return the files of a record by kind, after making sure that they can be written; none without --output.

        Raises:
            ValueError: If BASE is a folder, its folder does not exist, or there is a record of that name.
            OSError: If its folder cannot be written.
        """
        if self.output is None:
            return {}
        base = Path(os.path.expanduser(self.output))
        if base.is_dir():
            raise ValueError(f"--output {self.output} is a folder; name the files in it, such as {base / 'record'}")
        if not base.parent.is_dir():
            raise ValueError(f"--output {self.output}: there is no folder {base.parent}; make it first")
        if not os.access(base.parent, os.W_OK):
            raise OSError(f"--output {self.output}: {base.parent} cannot be written; choose another folder")
        # Not with_suffix: a dot in BASE, as in llama-3.1-8b, is part of the name.
        files = {kind: base.with_name(f"{base.name}.{kind}") for kind in ("json", "md")}
        there = [file for file in files.values() if file.exists()]
        if there and not (self.overwrite or self.dry_run):
            raise ValueError(f"--output {self.output}: there is {there[0]}; choose another name, or give --overwrite")
        return files

    @contextmanager
    def held(self) -> Iterator[dict[str, Path]]:
        """Give the files of `paths`, which no other command writes until the block ends.

        Raises:
            ValueError: As `paths`, or if another process holds them.
            OSError: As `paths`.
        """
        from locret.base.files import locked

        paths = self.paths()
        if not paths or self.dry_run:
            yield paths
            return
        base = paths["json"].with_suffix("")
        with locked(base.parent, f"--output {self.output}", name=f".{base.name}.lock"):
            yield self.paths()


OPTION_CLASSES = (BenchOptions, BenchOutput)


def _length(text: str, given: Numbers) -> int:
    match = re.fullmatch(r"(\d+)([KM]?)", text, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"--lengths {given} is not a list of prompt lengths; write it like 8192,16384 or 8K,16K")
    return int(match[1]) * _THOUSANDS[match[2].upper()]
