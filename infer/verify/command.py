"""`locret-verify`: check a backbone, and heads for it, on this machine before trusting what is read with them.

    locret-verify --model checkpoints/tiny --heads checkpoints/tiny-heads

Everything is compared with the backbone itself, and tolerances follow from rounding noise that is measured on it.
Exit codes: 0, all checks passed; 1, one failed; 2, the options are refused; 130, interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from locret.cli.command import FAILURE, parse_options, print_json, run, warnings_as_lines
from locret.distributed.ranks import Ranks, joined, launched
from locret.files import locked, visible, write_text
from locret.infer.infer_options import ModelOptions, ReportOptions
from locret.load_options import ScorerOptions
from locret.policy.resolve import PolicyFlags

if TYPE_CHECKING:
    from locret import RetainingHeads, RetentionPolicy
    from locret.infer.verify import Report
    from locret.scorers import Scorer

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


OPTION_CLASSES = (ModelOptions, ScorerOptions, PolicyFlags, VerifyOptions, VerifyOutput)
DESCRIPTION = "Check a backbone on this machine before trusting what is read with it."
RECORD, TABLE = "verify.json", "verify.md"


@dataclass(frozen=True)
class _Plan:
    """What is known before weights are loaded."""

    model: ModelOptions
    config: Any
    device: Any
    dtype: Any
    scorer: RetainingHeads | Scorer
    policy: RetentionPolicy
    tokens: int
    setup: dict[str, Any]


def command(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Raises:
        ValueError: For anything the user must change.
        OSError: If a Hub, a disk or a device's memory fails.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--list" in arguments:
        _list(as_json="--json" in arguments)
        return 0
    instances, chosen = parse_options("locret-verify", DESCRIPTION, OPTION_CLASSES, arguments)
    with _together(instances) as (ranks, output), warnings_as_lines("locret-verify", quiet=output.quiet):
        return _execute(instances, chosen, output, ranks)


def _execute(instances: Sequence[Any], chosen: set[str], output: VerifyOutput, ranks: Ranks) -> int:
    """Plan, verify, print and write; return the exit code."""
    model, scorer, policy, options, _ = instances
    with _held(output.output if ranks.is_main else None) as folder:
        plan = _plan(model, scorer, policy, options, chosen)
        if output.dry_run:
            print_json(_dry(plan, options))
            return 0
        report = _of_all(_verify(plan, options, quiet=output.quiet), ranks)
        if output.json:
            print_json(report.to_dict())
        else:
            print(report.table(), end="")
        if folder is not None:
            _write(folder, report)
    return 0 if report.ok else FAILURE


@contextmanager
def _together(instances: Sequence[Any]) -> Iterator[tuple[Ranks, VerifyOutput]]:
    """Join the processes that share a backbone, of which the first alone speaks.

    Raises:
        ValueError: If there are several processes, and nothing that they share, or they were given other options.
        OSError: If one of them cannot be reached, or has died.
    """
    count, output = launched()[1], instances[-1]
    if count > 1 and instances[0].shard is None:
        raise ValueError(
            f"{count} processes were started, but each would verify the same; share the backbone with --shard fsdp or "
            "--shard tp, or start one process"
        )
    with joined("locret-verify") as ranks:
        ranks.agree({f"--{name.replace('_', '-')}": value for name, value in _given(instances).items()})
        if ranks.is_main:
            yield ranks, output
            return
        with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            yield ranks, replace(output, quiet=True)


def _of_all(report: Report, ranks: Ranks) -> Report:
    """Return the rows of the process that came off worst, where several share the backbone."""
    from locret.infer.verify import Report

    found = ranks.gather(report)
    worst = max(found, key=lambda one: len(one.failures))
    return Report(worst.rows, {**report.facts, "processes": ranks.size})


def _list(*, as_json: bool) -> None:
    """Print the checks there are."""
    from locret.infer.verify.suite import CHECKS

    if as_json:
        print_json({check.name: {"about": check.about, "means": check.means} for check in CHECKS})
    else:
        print("\n".join(f"{check.name:<16} {check.about}" for check in CHECKS))


@contextmanager
def _held(output: str | None) -> Iterator[Path | None]:
    """Hold the folder of the record, if there is one.

    Raises:
        ValueError: If it holds something else than such a record.
    """
    if output is None:
        yield None
        return
    with locked(output, f"--output {output}"):
        folder = Path(output)
        if others := sorted(set(visible(folder)) - {RECORD, TABLE}):
            raise ValueError(
                f"--output {output} holds something else than a record of locret-verify ({others[0]}); choose another "
                "folder"
            )
        yield folder


def _plan(
    model: ModelOptions, scorer: ScorerOptions, flags: PolicyFlags, options: VerifyOptions, chosen: set[str]
) -> _Plan:
    """Resolve everything that the backbone's config shows.

    Raises:
        ValueError: If something is missing, does not match, or would evict nothing.
    """
    from locret import RetentionPolicy, loading
    from locret.infer.verify.subject import fitted
    from locret.infer.verify.suite import check_text, chosen_checks, text_tokens
    from locret.policy.resolve import resolve_options

    chosen_checks(options.checks())
    device = loading.device_of_source(model)
    scorer = replace(scorer, heads=loading.chosen_heads(scorer.heads, model.model))
    rates, recommended = loading.load_scorer(scorer)
    config = loading.load_config(model)
    loading.check_matches(scorer, rates, config)
    tokens = options.tokens or text_tokens(config, options.wanted_tokens)
    policy = resolve_options(flags, chosen, recommended)
    names = set(RetentionPolicy.__dataclass_fields__) & chosen
    policy = fitted(policy, tokens, {name: getattr(policy, name) for name in names})
    check_text(policy, tokens)
    dtype = loading.resolve_dtype(model.dtype, config, device)
    setup = {"model": model.model, "scorer": scorer.label or rates.name, "options": _given((model, options))}
    return _Plan(model, config, device, dtype, rates, policy, tokens, setup)


def _given(instances: Sequence[Any]) -> dict[str, Any]:
    """Return options as plain data."""
    found: dict[str, Any] = {}
    for one in instances:
        found |= json.loads(json.dumps(asdict(one), default=str))
    return found


def _dry(plan: _Plan, options: VerifyOptions) -> dict[str, Any]:
    """Return what would be done, and what it takes."""
    from locret.infer import chunk_size, sizing
    from locret.infer.verify.subject import NEW_TOKENS
    from locret.infer.verify.suite import chosen_checks

    run_of = sizing.PlannedRun(
        config=plan.config,
        scorer=plan.scorer,
        dtype=plan.dtype,
        device=plan.device,
        prompt_tokens=plan.tokens,
        new_tokens=NEW_TOKENS,
        source=plan.model,
    )
    working = chunk_size.working_bytes(plan.config, plan.scorer, plan.dtype, plan.tokens)
    return {
        **plan.setup,
        "policy": plan.policy.to_dict(),
        "tokens": plan.tokens,
        "checks": [check.name for check in chosen_checks(options.checks())],
        "weight_bytes": run_of.weight_bytes,
        **run_of.plan(plan.policy),
        "working_bytes": working,
    }


def _verify(plan: _Plan, options: VerifyOptions, *, quiet: bool) -> Report:
    """Load the backbone, and run the checks."""
    from locret import loading
    from locret.infer.verify import Report
    from locret.infer.verify.suite import verify

    ids = None if options.text_file is None else _text_ids(plan, options)
    model = loading.load_model(plan.model, plan.config, plan.device, plan.dtype)
    report = verify(
        model,
        plan.scorer,
        plan.policy,
        ids=ids,
        tokens=plan.tokens,
        seed=options.seed,
        only=options.checks(),
        progress=not quiet,
    )
    return Report(report.rows, {**report.facts, **plan.setup})


def _text_ids(plan: _Plan, options: VerifyOptions) -> Any:
    """Return the (1, tokens) ids that a text file begins with.

    Raises:
        ValueError: If it cannot be read, or is too short.
    """
    import torch

    from locret import loading
    from locret.conversation.text_stream import read_text

    tokenizer = loading.load_tokenizer(plan.model)
    assert options.text_file is not None
    text, ids = "", []
    for piece in read_text(options.text_file, setting="--text-file "):
        text += piece
        ids = tokenizer(text).input_ids
        if len(ids) >= plan.tokens:
            break
    if len(ids) < plan.tokens:
        raise ValueError(
            f"--text-file {options.text_file} has {len(ids):,} tokens, but --tokens {plan.tokens:,} are read; give a "
            "longer one, or lower --tokens"
        )
    return torch.tensor([ids[: plan.tokens]])


def _write(folder: Path, report: Report) -> None:
    """Write the record, whole or not at all; the table last."""
    write_text(folder / RECORD, json.dumps(report.to_dict(), indent=1) + "\n")
    write_text(folder / TABLE, report.table())


def main() -> None:
    """Entry point of `locret-verify`."""
    run(command, prog="locret-verify")


if __name__ == "__main__":
    main()
