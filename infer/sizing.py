"""How much a run may hold: a budget in units, in bytes or as a share of the prompt, and the plan that it comes to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from locret import RetainingHeads, RetentionPolicy
from locret.backbone.adapters import describe
from locret.backbone.attention import ROWS
from locret.backbone.shape import Backbone
from locret.base.fields import Refusal
from locret.cache.limits import Limits, check_named, check_pair, planned_bytes
from locret.distributed.ranks import launched
from locret.distributed.shard import part_of
from locret.infer.infer_options import AUTO, PolicyOptions
from locret.loading.options import WeightOptions
from locret.loading.weights import WeightPlan, plan_weights
from locret.policy.planned_bytes import full_bytes, largest_budget, parse_bytes, units_of_share
from locret.policy.policy import usual_budget
from locret.policy.resolve import resolve_options
from locret.policy.sizes import EVERY_UNIT
from locret.scorers import Scorer
from locret.scorers.retaining_heads import as_scorer

SHARE = 0.9
"""Of what is free; the rest is for what nobody plans, such as an allocator's fragments."""
_ANY = 2**62
_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What a policy is to be found for."""

    config: Any
    """The backbone's."""
    scorer: RetainingHeads | Scorer
    dtype: torch.dtype
    """Of weights, keys and values."""
    device: torch.device
    prompt_tokens: int | None = None
    """Length of the prompt; None if unknown."""
    new_tokens: int = 0
    """Longest answer."""
    source: WeightOptions | None = None
    """How the weights are loaded; None: as they are, on the device."""

    @cached_property
    def _backbone(self) -> Backbone:
        """As this process has it."""
        if getattr(self.source, "shard", None) == "tp":
            return part_of(self.config, launched()[1])
        return describe(self.config)

    def known(self, policy: RetentionPolicy) -> bool:
        """Return whether all that the bytes of the cache depend on is known; else shares of heads are measured."""
        shares = policy.head_shares or as_scorer(self.scorer).head_shares
        return policy.head_budgets != "shares" or shares is not None

    def cache_bytes(self, policy: RetentionPolicy, *, host: bool = False) -> int:
        """Return the planned bytes of the cache without a second tier, or those of that tier (`host`)."""
        sizes = (self.dtype.itemsize, self.prompt_tokens, self.new_tokens)
        return planned_bytes(self._backbone, as_scorer(self.scorer), policy, *sizes, host=host)

    def host_bytes(self, policy: RetentionPolicy) -> int | None:
        """Return the planned bytes of the second tier; None where it grows with an unknown length."""
        unknown = policy.host_grows and self.prompt_tokens is None
        return None if unknown else self.cache_bytes(policy, host=True)

    @property
    def full_bytes(self) -> int | None:
        """The bytes of the units of all tokens; None where their number is unknown."""
        tokens = self.prompt_tokens
        return None if tokens is None else full_bytes(self._backbone, tokens, self.dtype.itemsize)

    def plan(self, policy: RetentionPolicy) -> dict[str, int | None]:
        """Return the planned bytes of each tier, as plain data."""
        beside = {"planned_host_bytes": self.host_bytes(policy)} if policy.has_host else {}
        return {"planned_cache_bytes": self.cache_bytes(policy), **beside}

    def bytes_beside_weights(self, policy: RetentionPolicy) -> int:
        """Return the planned bytes of the cache, of heads, and of what a chunk works with."""
        held = head_bytes(self.scorer, self.dtype) + self.cache_bytes(policy)
        if self.device.type == "cpu":  # where both tiers lie in one memory
            held += self.host_bytes(policy) or 0
        schedule = Limits.of(self._backbone, as_scorer(self.scorer), policy).plan(self.prompt_tokens)
        tokens = max([policy.chunk_size, *(step.tokens for step in schedule.steps)])
        return held + working_bytes(self.config, self.scorer, self.dtype, tokens, policy)

    @cached_property
    def weights(self) -> WeightPlan:
        """Where the backbone's weights will be, and how many bytes they take there."""
        return plan_weights(self.source or WeightOptions(), self.config, self.device, self.dtype)

    @property
    def weight_bytes(self) -> int:
        """The bytes of the backbone's weights on the device, with room for those that are brought there."""
        return self.weights.on(self.device)


def drafted(
    flags: PolicyOptions, chosen: Collection[str], recommended: dict[str, Any], named: Collection[str] = ()
) -> RetentionPolicy:
    """Return the policy as far as it is known before the prompt is; `recommended` and `named` as for `resolve`."""
    fitted = flags.keep is not None or flags.kv_memory is not None
    policy = resolve_options(flags, chosen, recommended, _ANY if fitted else None, named=named)
    if flags.kv_memory is not None and policy.when == "prompt_end":
        rule = "bounds the cache, which grows with the prompt where eviction waits for its end; give keep"
        raise Refusal("kv_memory", flags.kv_memory, rule)
    return policy


def settled(flags: PolicyOptions, draft: RetentionPolicy, run: PlannedRun, *, named: bool) -> RetentionPolicy:
    """Return the policy for a run, with its budget in units; `named` says whether somebody gave one."""
    if flags.kv_memory is not None:
        return draft.changed(budget=_fitting(flags, draft, run))
    if flags.keep is not None:
        return draft.changed(budget=units_of_share(flags.keep, run.prompt_tokens or 1))
    return draft if named else draft.changed(budget=usual_budget(describe(run.config).max_positions))


def _fitting(flags: PolicyOptions, draft: RetentionPolicy, run: PlannedRun) -> int:
    """Return the largest budget that fits into `--kv-memory`."""
    given = flags.kv_memory
    if not run.known(draft):
        rule = "bounds bytes that depend on the shares of KV heads, which are measured later; give keep or budget"
        raise Refusal("kv_memory", given, rule)
    free = free_bytes(run.device) if given == AUTO else 0
    if free is None:
        rule = f"cannot tell what is free on {run.device}; give an amount, such as 2GiB"
        raise Refusal("kv_memory", AUTO, rule)
    memory = int(SHARE * free) if given == AUTO else parse_bytes(str(given))

    def planned(budget: int) -> int:
        policy = draft.changed(budget=budget)
        return run.weight_bytes + run.bytes_beside_weights(policy) if given == AUTO else run.cache_bytes(policy)

    most, least = memory if run.prompt_tokens is None else run.prompt_tokens, draft.least_budget
    if (budget := largest_budget(planned, memory, least, most)) is None:
        rule = (
            f"is too small, for even a budget of {least} takes {planned(least):,} of {memory:,} bytes; give more, "
            "or lower chunk_size or max_new_tokens"
        )
        raise Refusal("kv_memory", given, rule)
    return budget


def check_fits(run: PlannedRun, policy: RetentionPolicy) -> None:
    """Refuse a scorer and a policy that do not go together, and what the memory could not hold with nothing else in it.

    Of a prompt of unknown length one token is counted.
    """
    check_named(policy)
    check_pair(as_scorer(run.scorer), policy)
    needed = run.host_bytes(policy) or 0
    if needed > (there := total_bytes(torch.device("cpu"))):
        rule = f"needs {needed:,} bytes of host memory, but this machine has {there:,}; lower it"
        raise Refusal("host_budget", policy.host_budget, rule)
    run = replace(run, prompt_tokens=run.prompt_tokens or 1)
    has, needed = total_bytes(run.device), run.cache_bytes(policy)
    if needed <= has // 2:  # weights that take the other half are refused where they are loaded
        return
    if needed > (room := max(0, has - run.weight_bytes)):
        raise ValueError(
            f"--max-new-tokens {run.new_tokens} and --budget {policy.budget} together need a cache of {needed:,} "
            f"bytes, but {run.device} has room for {room:,} next to the weights; lower them"
        )


def plan_lines(run: PlannedRun, policy: RetentionPolicy) -> str:
    """Return the numbers that nobody gave, and how much of a text of known length stays, in how many bytes."""
    lines = list[str]()
    follows = policy.following() if policy.budget < EVERY_UNIT else ()
    if given := ", ".join(f"{name} {getattr(policy, name):,}" for name in follows):
        lines.append(f"not given, so from a budget of {policy.budget:,}: {given}\n")
    if run.prompt_tokens is not None and run.full_bytes is not None:
        kept = min(1, (policy.budget + policy.local_len) / run.prompt_tokens)
        parts = (
            f"{kept:.0%} of their units stay, a budget of {policy.budget:,} and the {policy.local_len:,} last tokens"
        )
        share = parts if kept < 1 else "all units stay, for the budget is not less"
        cache, full = (f"{size / 2**20:,.1f} MiB" for size in (run.cache_bytes(policy), run.full_bytes))
        about = "" if run.known(policy) else "about "  # the workspace is as large as the largest layer
        lines.append(f"{run.prompt_tokens:,} tokens: {share}; {about}{cache} with workspace (everything: {full})\n")
    return "".join(lines)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that a device can still give; None where it does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return max(0, torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    available = psutil.virtual_memory().available
    most, held = _group_bytes("memory.max"), _group_bytes("memory.current")
    return available if most is None or held is None else min(available, max(0, most - held))


def total_bytes(device: torch.device) -> int:
    """Return the bytes that a device has, used or not."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    limit = _group_bytes("memory.max")
    return psutil.virtual_memory().total if limit is None else min(psutil.virtual_memory().total, limit)


def _group_bytes(name: str) -> int | None:
    """Return a limit of the container that this runs in."""
    try:
        return int((_GROUP / name).read_text())
    except (OSError, ValueError):  # "max" is neither a number nor a limit
        return None


def head_bytes(scorer: RetainingHeads | Scorer, dtype: torch.dtype) -> int:
    """Return the bytes of retaining heads, with the copies of their weights that a shorter dtype works with."""
    if not isinstance(scorer, RetainingHeads):
        return 0
    copies = 0 if dtype == torch.float32 else dtype.itemsize
    return sum(parameter.numel() * (4 + copies) for parameter in scorer.parameters())


def working_bytes(
    config: Any, scorer: RetainingHeads | Scorer, dtype: torch.dtype, tokens: int, policy: RetentionPolicy
) -> int:
    """Return the bytes, at most, that a chunk works with in the layer that needs most, cache and workspace aside.

    A norm holds hidden states in float32, besides those it was given and those of the residual. Attention holds queries
    and keys before and after rotation, values, what it attends to and the scorer's features; the MLP holds two products
    and their combination. Cosines and sines of new and of cached positions are there all along, and a mask as wide as
    the largest KV head.
    """
    backbone, text = describe(config), config.get_text_config()
    hidden = text.hidden_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, list) else inner
    shapes = [backbone.shape(index) for index in range(backbone.num_layers)]
    attention = max(
        4 * shape.num_heads * shape.query_dim
        + 5 * shape.num_kv_heads * max(shape.head_dim, shape.value_dim)
        + shape.feature_dim
        for shape in shapes
    )
    head = scorer.config.hidden_dim * (dtype.itemsize + 2 * 4) if isinstance(scorer, RetainingHeads) else 0
    layer = max(dtype.itemsize * max(attention, 3 * inner), dtype.itemsize * attention + head)
    angles = 2 * 2 * max(shape.head_dim for shape in shapes) * dtype.itemsize
    limits = Limits.of(backbone, as_scorer(scorer), policy)
    shares = limits.steep(limits.policy, None).head_shares or (1.0,)
    largest = max(shares) * len(shares) / sum(shares)
    mask = min(tokens, ROWS) * (tokens + int(largest * policy.budget)) * dtype.itemsize
    return mask + tokens * (3 * hidden * dtype.itemsize + 2 * hidden * 4 + angles + layer)
