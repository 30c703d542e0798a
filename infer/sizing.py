"""How much a run may hold: a budget in units, in bytes or as a share of the prompt, chunks to fit, and their plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from locret import RetainingHeads, RetentionPolicy, lookups
from locret.backbone.adapters import Backbone, describe
from locret.cache.limits import Limits, check_named, check_pair, planned_bytes, planned_host_bytes
from locret.distributed import tensor_parallel
from locret.distributed.ranks import launched
from locret.infer import chunk_size
from locret.infer.chunk_size import ChunkChoice
from locret.infer.infer_options import PolicyOptions
from locret.loading.options import WeightOptions
from locret.loading.plan import WeightPlan, plan_weights
from locret.policy.budget import largest_budget, parse_bytes, units_of_share
from locret.policy.resolve import resolve_options
from locret.policy.schedule import Schedule
from locret.scorers import Scorer
from locret.scorers.retaining_heads import as_scorer

_ANY = 2**62
AUTO = "auto"


def draft_policy(flags: PolicyOptions, chosen: Collection[str], recommended: dict[str, Any]) -> RetentionPolicy:
    """Return the policy as far as it is known before the prompt is: a budget in bytes or shares is still open.

    Raises:
        ValueError: If budgets exclude each other, numbers are out of range or contradict each other.
    """
    given = [name for name in ("budget", "kv_memory", "budget_share") if name in chosen]
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')} {getattr(flags, name)}" for name in given[:2])
        raise ValueError(f"{first} and {second} exclude each other; drop one of them")
    if flags.kv_memory not in (None, AUTO):
        _memory(flags)
    if flags.budget_share is not None:
        _share(flags, 1)
    if flags.chunk_size == AUTO:
        if flags.kv_memory is not None:
            raise ValueError(
                f"--kv-memory {flags.kv_memory} holds the budget and the chunk, so --chunk-size {AUTO} leaves open "
                "what either gets; give --chunk-size as a number, or --budget instead of --kv-memory"
            )
        flags = replace(flags, chunk_size=chunk_size.LARGEST)
    policy = resolve_options(flags, chosen, recommended, _ANY if _open(flags) else None)
    if flags.kv_memory is not None and policy.when == "prompt_end":
        raise ValueError(
            f"--kv-memory {flags.kv_memory} bounds the cache, but --when prompt_end lets it grow with the prompt; "
            "use --when chunk, or give --budget or --budget-share"
        )
    return policy


def must_count(flags: PolicyOptions, draft: RetentionPolicy) -> bool:
    """Return whether the prompt must be tokenised as a whole before it is read, because the plan depends on it."""
    by_length = flags.budget_share is not None or flags.kv_memory == AUTO
    return by_length or draft.plans_by_length


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What a policy is to be found for."""

    config: Any
    """The backbone's."""
    scorer: RetainingHeads | Scorer
    dtype: torch.dtype
    """Of weights, keys and values."""
    device: torch.device
    prompt_tokens: int | None
    """Length of the prompt; None if unknown."""
    new_tokens: int
    """Longest answer."""
    num_beams: int = 1
    """Beams, each of which holds the cache once more."""
    source: WeightOptions | None = None
    """How the weights are loaded; None: as they are, on the device."""
    on_disk: bool = False
    """Whether a second tier is in a file, rather than in host memory."""

    @property
    def _rates(self) -> Scorer:
        return as_scorer(self.scorer)

    @cached_property
    def _backbone(self) -> Backbone:
        """As this process has it."""
        if getattr(self.source, "shard", None) == "tp":
            return tensor_parallel.part_of(self.config, launched()[1])
        return describe(self.config)

    @property
    def _copies(self) -> int:
        return 1 if self.num_beams == 1 else 1 + self.num_beams

    def cache_bytes(self, policy: RetentionPolicy) -> int:
        """Return the planned bytes of the cache and its copies, without a second tier."""
        sizes = (self.dtype.itemsize, self.prompt_tokens, self.new_tokens)
        return self._copies * planned_bytes(self._backbone, self._rates, policy, *sizes)

    def host_bytes(self, policy: RetentionPolicy) -> int | None:
        """Return the planned bytes of the second tier and its copies; None where it grows with an unknown length."""
        if policy.host_grows and self.prompt_tokens is None:
            return None
        sizes = (self.dtype.itemsize, self.prompt_tokens, self.new_tokens)
        return self._copies * planned_host_bytes(self._backbone, self._rates, policy, *sizes)

    def plan(self, policy: RetentionPolicy) -> dict[str, int | None]:
        """Return the planned bytes of each tier, as plain data."""
        second = "planned_disk_bytes" if self.on_disk else "planned_host_bytes"
        beside = {second: self.host_bytes(policy)} if policy.has_host else {}
        return {"planned_cache_bytes": self.cache_bytes(policy), **beside}

    def schedule(self, policy: RetentionPolicy) -> Schedule:
        """Return the planned steps."""
        return Limits(policy, self._rates, len(self._backbone.layers)).plan(self.prompt_tokens)

    def bytes_beside_weights(self, policy: RetentionPolicy) -> int:
        """Return the planned bytes of the cache, of heads, and of what a chunk works with."""
        tokens = max([policy.chunk_size, *(step.tokens for step in self.schedule(policy).steps)])
        working = chunk_size.working_bytes(self.config, self.scorer, self.dtype, tokens)
        if self.device.type == "cpu" and not self.on_disk:  # where both tiers lie in one memory
            working += self.host_bytes(policy) or 0
        return chunk_size.head_bytes(self.scorer, self.dtype) + self.cache_bytes(policy) + working

    @property
    def weight_bytes(self) -> int:
        """The bytes of the backbone's weights on the device, with room for those that are brought there."""
        return self.weights.on(self.device)

    @cached_property
    def weights(self) -> WeightPlan:
        """Where the backbone's weights will be, and how many bytes they take there."""
        return plan_weights(self.source or WeightOptions(), self.config, self.device, self.dtype)

    def least_chunk(self, policy: RetentionPolicy) -> int:
        """Return the smallest chunk that the scorer and the policy can work with."""
        least = self._rates.lookback if policy.when == "prompt_end" else 1
        return max(least, policy.min_chunk if policy.decremental else 1)

    def choose_chunk(self, policy_of: Callable[[int], RetentionPolicy]) -> ChunkChoice:
        """Return the chunk size that suits the free memory.

        Raises:
            ValueError: If none does.
        """
        weights = self.weight_bytes
        return chunk_size.choose(
            policy_of,
            lambda policy: weights + self.bytes_beside_weights(policy),
            device=str(self.device),
            free=chunk_size.free_bytes(self.device),
            least=self.least_chunk(policy_of(chunk_size.LARGEST)),
        )


def final_policy(
    flags: PolicyOptions, chosen: Collection[str], recommended: dict[str, Any], run: PlannedRun
) -> tuple[RetentionPolicy, ChunkChoice | None]:
    """Return the policy with its budget in units; and its chunk size with the reason, where that was left open.

    Args:
        flags: The options.
        chosen: Names that the user set.
        recommended: The heads' policy; may be empty.
        run: What the policy is for.

    Raises:
        ValueError: If `--kv-memory` is too small for any budget, or nothing is free for the smallest budget or chunk.
    """
    if flags.kv_memory == AUTO:
        return _within_free_memory(flags, chosen, recommended, run), None
    if flags.kv_memory is not None:
        return _within_memory(flags, chosen, recommended, run), None
    budget = None
    if flags.budget_share is not None:
        assert run.prompt_tokens is not None
        budget = _share(flags, run.prompt_tokens)
    if flags.chunk_size != AUTO:
        return resolve_options(flags, chosen, recommended, budget), None

    def policy_of(size: int) -> RetentionPolicy:
        return resolve_options(replace(flags, chunk_size=size), chosen, recommended, budget)

    choice = run.choose_chunk(policy_of)
    return policy_of(choice.chunk_size), choice


def _within_memory(
    flags: PolicyOptions, chosen: Collection[str], recommended: dict[str, Any], run: PlannedRun
) -> RetentionPolicy:
    def planned(budget: int) -> int:
        return run.cache_bytes(resolve_options(flags, chosen, recommended, budget))

    memory = _memory(flags)
    least = _least_budget(flags, chosen)
    budget = largest_budget(planned, memory, least, memory if run.prompt_tokens is None else run.prompt_tokens)
    if budget is None:
        policy = resolve_options(flags, chosen, recommended, least)
        raise ValueError(
            f"--kv-memory {flags.kv_memory} is too small: with --chunk-size {policy.chunk_size} and --max-new-tokens "
            f"{run.new_tokens} even a budget of {least} takes {planned(least):,} bytes; give more, or lower those"
        )
    return resolve_options(flags, chosen, recommended, budget)


def _within_free_memory(
    flags: PolicyOptions, chosen: Collection[str], recommended: dict[str, Any], run: PlannedRun
) -> RetentionPolicy:
    weights, free = run.weight_bytes, chunk_size.free_bytes(run.device)
    if free is None:
        raise ValueError(f"--kv-memory {AUTO}: {run.device} does not tell what is free; give an amount, such as 2GiB")

    def planned(budget: int) -> int:
        return weights + run.bytes_beside_weights(resolve_options(flags, chosen, recommended, budget))

    least = _least_budget(flags, chosen)
    within = int(chunk_size.SHARE * free)
    budget = largest_budget(planned, within, least, within if run.prompt_tokens is None else run.prompt_tokens)
    if budget is None:
        raise ValueError(
            f"--kv-memory {AUTO} finds nothing free: weights, a chunk and a budget of {least} take {planned(least):,} "
            f"bytes, but only {free:,} are free on {run.device}; take a smaller --dtype or --chunk-size, or free memory"
        )
    return resolve_options(flags, chosen, recommended, budget)


def _least_budget(flags: PolicyOptions, chosen: Collection[str]) -> int:
    if "recall_by" in chosen and flags.recalls_blocks:
        return lookups.least_budget(flags.recall_by)
    return flags.stabilizers + 1 if "stabilizers" in chosen and flags.stabilizers is not None else 1


def check_fits(run: PlannedRun, policy: RetentionPolicy) -> None:
    """Refuse a scorer and a policy that do not go together, and what the memory could not hold with nothing else in it.

    Of a prompt of unknown length one token is counted.

    Raises:
        ValueError: Naming the option that asks for too much, and what would fit.
    """
    check_named(policy)
    check_pair(run._rates, policy)
    needed = 0 if run.on_disk else run.host_bytes(policy) or 0
    if needed > (there := chunk_size.total_bytes(torch.device("cpu"))):
        raise ValueError(
            f"--host-budget {policy.host_budget} needs {needed:,} bytes of host memory, but this machine has "
            f"{there:,}; lower it, or give --disk FILE"
        )
    run = replace(run, prompt_tokens=run.prompt_tokens or 1)
    has = chunk_size.total_bytes(run.device)
    if run.cache_bytes(policy) <= has // 2:  # weights that take the other half are refused where they are loaded
        return
    has -= run.weight_bytes
    if (needed := run.cache_bytes(policy)) <= has:
        return
    options: dict[str, tuple[int, Callable[[int], PlannedRun]]] = {
        "--num-beams": (run.num_beams, lambda count: replace(run, num_beams=count)),
        "--max-new-tokens": (run.new_tokens, lambda count: replace(run, new_tokens=count)),
    }
    for flag, (given, changed) in options.items():
        most = largest_budget(lambda count, of=changed: of(count).cache_bytes(policy), has, 1, given)  # type: ignore[misc]
        if most is not None and most < given:
            raise ValueError(
                f"{flag} {given} needs a cache of {needed:,} bytes, but {run.device} has room for {max(0, has):,} next "
                f"to the weights; give at most {most}"
            )
    raise ValueError(
        f"--max-new-tokens {run.new_tokens}, --num-beams {run.num_beams} and --budget {policy.budget} together need a "
        f"cache of {needed:,} bytes, but {run.device} has room for {max(0, has):,} next to the weights; lower them"
    )


def follow_line(policy: RetentionPolicy) -> str:
    """Return a line with the numbers that nobody gave, and what they are with more budget; empty if all were given."""
    parts = []
    for name in policy.following():
        number, wanted = getattr(policy, name), policy.wanted[name][0]
        parts.append(f"{name} {number:,}" + (f" (else {wanted:,})" if number < wanted else ""))
    return f"not given, so from a budget of {policy.budget:,}: {', '.join(parts)}\n" if parts else ""


def step_lines(rows: Sequence[dict[str, Any]], *, adaptive: bool = False) -> str:
    """Return the planned steps as a table for people; of layers that differ, the least and the most are shown."""
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
    return f"{value:,}" if isinstance(value, int) else f"{min(value):,}..{max(value):,}"


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
