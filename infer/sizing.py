"""How much a run may hold: a budget in units, in bytes or as a share of the prompt, and the plan it leads to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from locret import RetainingHeads, RetentionPolicy
from locret.adapters import describe
from locret.budget import largest_budget, parse_bytes, units_of_share
from locret.infer.loading import resolve_policy
from locret.infer.options import PolicyOptions
from locret.limits import Limits, planned_bytes
from locret.scorers import RetainingHeadScorer, Scorer

_ANY = 2**62


def draft_policy(flags: PolicyOptions, chosen: Collection[str], recommended: dict[str, Any]) -> RetentionPolicy:
    """Return the policy as far as it is known before the prompt is: a budget in bytes or shares is still open.

    Raises:
        ValueError: If budgets exclude each other, numbers are out of range or contradict each other.
    """
    given = [name for name in ("budget", "kv_memory", "budget_share") if name in chosen]
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')} {getattr(flags, name)}" for name in given[:2])
        raise ValueError(f"{first} and {second} exclude each other; drop one of them")
    if flags.kv_memory is not None:
        _memory(flags)
    if flags.budget_share is not None:
        _share(flags, 1)
    policy = resolve_policy(flags, chosen, recommended, _ANY if _open(flags) else None)
    if flags.kv_memory is not None and policy.when == "prompt_end":
        raise ValueError(
            f"--kv-memory {flags.kv_memory} bounds the cache, but --when prompt_end lets it grow with the prompt; "
            "use --when chunk, or give --budget or --budget-share"
        )
    return policy


def must_count(flags: PolicyOptions, draft: RetentionPolicy) -> bool:
    """Return whether the prompt must be tokenised as a whole before it is read, because the plan depends on it."""
    return flags.budget_share is not None or draft.needs_length or draft.when == "prompt_end"


def final_policy(
    flags: PolicyOptions,
    chosen: Collection[str],
    recommended: dict[str, Any],
    *,
    config: Any,
    scorer: RetainingHeads | Scorer,
    dtype: torch.dtype,
    prompt_tokens: int | None,
    new_tokens: int,
    num_beams: int,
) -> RetentionPolicy:
    """Return the policy with its budget in units.

    Args:
        flags: The options.
        chosen: Names that the user set.
        recommended: The heads' policy; may be empty.
        config: The backbone's.
        scorer: What rates units.
        dtype: Of keys and values.
        prompt_tokens: Length of the prompt; None if unknown.
        new_tokens: Longest answer.
        num_beams: Beams, each of which holds the cache once more.

    Raises:
        ValueError: If `--kv-memory` is too small for any budget.
    """
    if flags.budget_share is not None:
        assert prompt_tokens is not None
        return resolve_policy(flags, chosen, recommended, _share(flags, prompt_tokens))
    if flags.kv_memory is None:
        return resolve_policy(flags, chosen, recommended)
    backbone, size = describe(config), torch.empty((), dtype=dtype).element_size()
    if isinstance(scorer, RetainingHeads):
        scorer = RetainingHeadScorer(heads=scorer)

    def planned(budget: int) -> int:
        policy = resolve_policy(flags, chosen, recommended, budget)
        one = planned_bytes(backbone, scorer, policy, size, prompt_tokens, new_tokens)
        return one * (1 if num_beams == 1 else 1 + num_beams)

    memory = _memory(flags)
    least = flags.stabilizers + 1 if "stabilizers" in chosen else 1
    budget = largest_budget(planned, memory, least, memory if prompt_tokens is None else prompt_tokens)
    if budget is None:
        policy = resolve_policy(flags, chosen, recommended, least)
        raise ValueError(
            f"--kv-memory {flags.kv_memory} is too small: with --chunk-size {policy.chunk_size} and --max-new-tokens "
            f"{new_tokens} even a budget of {least} takes {planned(least):,} bytes; give more, or lower those"
        )
    return resolve_policy(flags, chosen, recommended, budget)


def steps(config: Any, scorer: RetainingHeads | Scorer, policy: RetentionPolicy, tokens: int | None) -> list[Any]:
    """Return the planned steps of a prompt as plain data (see `locret.schedule.Schedule.table`)."""
    if isinstance(scorer, RetainingHeads):
        scorer = RetainingHeadScorer(heads=scorer)
    return Limits(policy, scorer, len(describe(config).layers)).plan(tokens).table()


def step_lines(rows: Sequence[dict[str, Any]], *, adaptive: bool = False) -> str:
    """Return the planned steps as a table for people; of layers that differ, the first and the last are shown."""
    table: list[tuple[str, ...]] = [("step", "chunk", "attends to", "keeps", "protects")]
    for row in rows:
        first, last = row["first_step"], row["last_step"]
        step = "local" if row["local"] else f"{first}" if first == last else f"{first}-{last or ''}"
        table.append((step, *(_number(row[name]) for name in ("chunk", "attended", "kept", "protected"))))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in table]
    if adaptive:
        lines.append("layers share what a step keeps by what they retain, which is known only while reading")
    return "\n".join(lines) + "\n"


def _number(value: int | list[int]) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value[0]:,}..{value[-1]:,}"


def _open(flags: PolicyOptions) -> bool:
    return flags.kv_memory is not None or flags.budget_share is not None


def _memory(flags: PolicyOptions) -> int:
    assert flags.kv_memory is not None
    try:
        return parse_bytes(flags.kv_memory)
    except ValueError as error:
        raise ValueError(f"--kv-memory: {error}") from None


def _share(flags: PolicyOptions, tokens: int) -> int:
    assert flags.budget_share is not None
    try:
        return units_of_share(flags.budget_share, tokens)
    except ValueError as error:
        raise ValueError(f"--budget-share: {error}") from None
