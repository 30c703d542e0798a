"""The options of `locret-verify` that no other command has."""

from __future__ import annotations

from dataclasses import dataclass

from locret.infer.infer_options import ReportOptions

Names = str | list[str]

TOKENS, QUICK_TOKENS, LEAST_TOKENS = 1024, 256, 64
"""Tokens of a text: usually, with --quick, and at least, so that there are chunks to cut."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What is read, and which checks run."""

    text_file: str | None = None
    """Text file, UTF-8, to take the tokens from, by the backbone's tokenizer; without it token ids are drawn."""
    tokens: int | None = None
    """Tokens of the text; by default 1,024, with --quick 256, and no more than the backbone's positions."""
    seed: int = 0
    """Seed of the token ids, and of rounding noise."""
    quick: bool = False
    """A shorter text."""
    only: Names | None = None
    """Checks to run, such as full-budget,save; by default all (see --list)."""
    list: bool = False
    """Print the checks, and leave."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < LEAST_TOKENS:
            raise ValueError(f"--tokens {self.tokens} leaves nothing to cut into chunks; give {LEAST_TOKENS} or more")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"--seed {self.seed} is not a number of 64 bits; give a smaller one")
        if self.text_file == "":
            raise ValueError("--text-file is empty; name a file, or leave it out for drawn token ids")

    def checks(self) -> tuple[str, ...]:
        """Return the names of the checks that were asked for; none: all.

        Raises:
            ValueError: If there is a list without a name.
        """
        if self.only is None:
            return ()
        parts = self.only.split(",") if isinstance(self.only, str) else self.only
        found = tuple(dict.fromkeys(part.strip() for part in parts if part.strip()))
        if not found:
            raise ValueError("--only is empty; name at least one check (--list shows what there is)")
        return found

    @property
    def wanted_tokens(self) -> int:
        """Tokens of the text, before it is known how many the backbone has positions for."""
        return self.tokens or (QUICK_TOKENS if self.quick else TOKENS)


@dataclass(frozen=True, kw_only=True)
class VerifyOutput(ReportOptions):
    """What comes out."""

    json: bool = False
    """Print one JSON object instead of the table."""
    output: str | None = None
    """Folder for the record (verify.json and verify.md): machine, versions, options, rows. Made if need be."""
    dry_run: bool = False
    """Print the plan: text, policy, memory and work, without the backbone's weights."""

    def __post_init__(self) -> None:
        if self.output == "":
            raise ValueError("--output is empty; name a folder, or leave it out")
