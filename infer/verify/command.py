"""`locret-verify`: check a backbone, and heads for it, on this machine before trusting what is read with them.

Exit codes: 0, all checks passed; 1, one failed; 2, the options are refused; 130, interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from locret.base.nearest import check_retired
from locret.cli.command import FAILURE, parse_options, print_json, run, warnings_as_lines
from locret.infer.evaluation.eval_options import words
from locret.infer.infer_options import ModelOptions, ReportOptions
from locret.infer.verify.report import LEAST_TOKENS
from locret.loading.options import ScorerOptions
from locret.policy.resolve import PolicyFlags, resolve_options

Names = str | list[str]


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What is read, and which checks run."""

    tokens: int | None = None
    """Tokens of the text, such as 256 for a quick look; by default 1,024, and no more than the backbone's positions."""
    seed: int = 0
    """Seed of the token ids, and of rounding noise."""
    only: Names | None = None
    """Checks to run, such as full-budget,eviction; by default all (see --list)."""
    list: bool = False
    """Print the checks, and leave."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < LEAST_TOKENS:
            raise ValueError(f"--tokens {self.tokens} leaves nothing to cut into chunks; give {LEAST_TOKENS} or more")


@dataclass(frozen=True, kw_only=True)
class VerifyOutput(ReportOptions):
    """What comes out."""

    dry_run: bool = False
    """Print the plan: text, policy, memory and work, without the backbone's weights."""


OPTION_CLASSES = (ModelOptions, ScorerOptions, PolicyFlags, VerifyOptions, VerifyOutput)
DESCRIPTION = "Check a backbone on this machine before trusting what is read with it."


def command(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--list" in arguments:
        if "--json" in arguments:
            check_retired("locret-verify", "--list --json")
        from locret.infer.verify.suite import CHECKS, said_of

        print("\n".join(f"{name:<16} {said_of(name)[0]}" for name in CHECKS))
        return 0
    if any(one.partition("=")[0] == "--output" for one in arguments):
        check_retired("locret-verify", "--output")
    options, chosen = parse_options("locret-verify", DESCRIPTION, OPTION_CLASSES, arguments)
    with warnings_as_lines("locret-verify", quiet=options[-1].quiet):
        return _execute(options, chosen)


def _execute(instances: Sequence[Any], chosen: set[str]) -> int:
    from locret import RetentionPolicy, loading
    from locret.infer import sizing
    from locret.infer.reading import ready_without_policy
    from locret.infer.verify import subject, suite

    source, named, flags, options, output = instances
    asked, plan = words(options.only, "--only") if options.only else (), ready_without_policy(source, named)
    names = suite.chosen_checks(asked)
    run, scorer = plan.run, plan.run.scorer
    tokens = options.tokens or suite.text_tokens(run.config)
    policy = resolve_options(flags, chosen, plan.recommended, named=plan.named.changes)
    given = {name: getattr(policy, name) for name in chosen & set(RetentionPolicy.__dataclass_fields__)}
    policy = subject.fitted(policy, tokens, given)
    suite.check_text(policy, tokens)
    as_data = json.loads(json.dumps({**asdict(source), **asdict(options)}, default=str))
    setup = {"model": source.model, "scorer": plan.named.label or scorer.name, "options": as_data}
    if output.dry_run:
        planned = replace(run, prompt_tokens=tokens, new_tokens=subject.NEW_TOKENS)
        working = sizing.working_bytes(run.config, scorer, run.dtype, tokens, policy)
        memory = {"weight_bytes": planned.weight_bytes, **planned.plan(policy), "working_bytes": working}
        print_json({**setup, "policy": policy.to_dict(), "tokens": tokens, "checks": names, **memory})
        return 0
    model, shown = loading.load_model(source, run.config, run.device, run.dtype), not output.quiet
    found = suite.verify(model, scorer, policy, tokens=tokens, seed=options.seed, only=names, progress=shown)
    report = replace(found, facts={**found.facts, **setup})
    if output.json:
        print_json(report.to_dict())
    else:
        print(report.table(), end="")
    return 0 if report.ok else FAILURE


if __name__ == "__main__":
    run(command, prog="locret-verify")
