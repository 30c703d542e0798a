"""The plan of a read: how a text is cut into chunks, and how many units every layer keeps after each. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import accumulate
from math import ceil

from locret.base.fields import Refusal
from locret.policy.policy import RetentionPolicy
from locret.policy.sizes import decremental_chunks, lifted, memory_sizes, pyramid_budgets, shared_budgets


@dataclass(frozen=True)
class Step:
    """One chunk, and what stays once it has been read; one number per full-attention layer."""

    tokens: int
    budgets: tuple[int, ...]
    """Units per KV head that may stay after the step."""
    kept: tuple[int, ...]
    """Units per KV head that do, which are fewer while there are no more."""


@dataclass(frozen=True)
class Schedule:
    """All steps of a read."""

    steps: tuple[Step, ...]
    """One per chunk; for a text of unknown length the one that repeats."""
    last: Step
    """The local tokens, read after the last chunk."""
    held: tuple[int, ...]
    """Units per layer before the first chunk, from earlier texts."""
    budgets: tuple[int, ...]
    """Most units per layer that stay after any step."""
    peak: tuple[int, ...]
    """Most units per layer at any moment of the read."""
    endless: bool = False
    """Whether the length of the text is unknown."""
    shared: bool = False
    """Whether layers share each step's memory by what they retain, known only while reading: `kept` is the mean."""
    head_shares: tuple[float, ...] = ()
    """Of each KV head of each layer in the budgets; empty where all heads of a layer have as many units."""

    def step(self, index: int) -> Step:
        """Return the plan of the chunk with this number, from 0."""
        return self.steps[0 if self.endless else index]

    def capacity(self, new_tokens: int, decode_budgets: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the slots each layer needs for the read and for `new_tokens` generated ones."""
        answered = [units + new_tokens for units in self.last.kept]
        if decode_budgets is not None:
            answered = [min(units, most) for units, most in zip(answered, decode_budgets, strict=True)]
        return tuple(map(max, self.peak, answered))


def plan(
    policy: RetentionPolicy,
    heads: Sequence[int],
    prompt_tokens: int | None,
    *,
    held: Sequence[int] | None = None,
    recent: int = 0,
    sinks: int = 0,
    tail: int | None = None,
    promised: int = 0,
) -> Schedule:
    """Plan a read.

    A text read after another one starts from what is held: memory grows from there.

    Args:
        policy: The rules.
        heads: KV heads of each full-attention layer.
        prompt_tokens: Length of the text; None if unknown.
        held: Units each layer holds already.
        recent: Newest units that the scorer keeps by right; like stabilizers they are not part of a pyramid.
        sinks: First tokens that the scorer keeps by right, for which growing memory has room from its first step.
        tail: Tokens read after the last chunk; `local_len` if None.
        promised: Units that protected spans take of every KV head.
    """
    tail = policy.local_len if tail is None else tail
    start = tuple(held) if held is not None else (0,) * len(heads)
    if prompt_tokens is None:
        if policy.needs_length:
            rule = "grows over all chunks of a prompt, whose length is unknown here; give it as a whole, or use memory="
            raise Refusal("memory", f'"{policy.memory}"', f'{rule}"fixed"', vars(policy))
        budgets = layer_budgets(policy, heads, None, recent, promised)
        return _endless(policy, budgets, start)
    chunked = max(0, prompt_tokens - tail)
    budgets = layer_budgets(policy, heads, [units + chunked for units in start], recent, promised)
    local = prompt_tokens - chunked
    if policy.when == "prompt_end":
        return _at_prompt_end(policy, budgets, start, chunked, local)
    start = tuple(map(min, start, budgets))
    sizes, memory = _growing(policy, budgets, start, chunked, sinks)
    steps: list[Step] = []
    kept = peak = start
    for tokens, most in zip(sizes, memory, strict=True):
        filled = tuple(units + tokens for units in kept)
        peak = tuple(map(max, peak, filled))
        kept = tuple(map(min, filled, most))
        steps.append(Step(tokens, most, kept))
        if policy.memory == "adaptive":  # any layer may keep as much as its budget
            kept = tuple(map(min, filled, budgets))
    shared = policy.memory == "adaptive" and any(u + chunked > b for u, b in zip(start, budgets, strict=True))
    last = _local(local, kept)
    return Schedule(tuple(steps), last, start, budgets, tuple(map(max, peak, last.kept)), shared=shared)


def protected(policy: RetentionPolicy, kept: int) -> int:
    """Return the stabilizers of a memory of `kept` units: all of them, or half of a memory that is still growing."""
    if policy.when == "prompt_end":  # nothing is evicted after any chunk but the last
        return 0
    if policy.head_budgets == "shares":
        return min(policy.stabilizers, kept // 4)
    return policy.stabilizers if policy.memory == "fixed" else min(policy.stabilizers, kept // 2)


def layer_budgets(
    policy: RetentionPolicy, heads: Sequence[int], competing: Sequence[int] | None, recent: int = 0, promised: int = 0
) -> tuple[int, ...]:
    """Return the units that each layer may keep, when so many per KV head of each compete for them (None: many).

    Where KV heads have shares, these are of what every one has beside the units that it was `promised`.
    """
    if policy.head_budgets == "shares":
        assert policy.head_shares is not None
        promised, shares = min(promised, policy.budget - 1), policy.head_shares
        means = [sum(shares[end - own : end]) / own for end, own in zip(accumulate(heads), heads, strict=True)]
        own = shared_budgets(policy.budget - promised, means, heads)
        if competing is not None:
            own = lifted(own, shares, [max(1, units - promised) for units in competing], heads)
        return tuple(promised + units for units in own)
    layers = len(heads)
    if policy.layer_budgets == "uniform":
        return (policy.budget,) * layers
    window = max(recent, policy.stabilizers if policy.when == "chunk" else 0)
    tokens = None if competing is None else max(competing, default=0)
    return pyramid_budgets(policy.budget, layers, tokens, window, policy.pyramid_beta)


def decode_budgets(policy: RetentionPolicy, layers: int, recent: int = 0) -> tuple[int, ...] | None:
    """Return the units that each layer may hold while an answer is written; None: no limit."""
    if policy.decode_budget is None:
        return None
    # What no layer can do without: the local tokens, and the room that an eviction makes.
    window = max(recent, policy.local_len + policy.decode_interval)
    if policy.layer_budgets == "uniform":
        return (policy.decode_budget,) * layers
    return pyramid_budgets(policy.decode_budget, layers, None, window, policy.pyramid_beta)


def lookahead(policy: RetentionPolicy, second: int) -> int:
    """Return how many tokens of a text of unknown length say that its plan is that of a long one.

    A KV head has at most `second` units in a second tier, if that is bounded.
    """
    pyramid = 2 * policy.budget if policy.layer_budgets == "pyramid" else 0
    shares = [Fraction(share) for share in (policy.head_shares or ()) if policy.head_budgets == "shares"]
    # Rounding gives a head of the largest share at most two units for each head of its layer more.
    shared = ceil(policy.budget * max(shares) * len(shares) / sum(shares)) + 2 * len(shares) if shares else 0
    most = max(pyramid, shared, second and policy.budget + second)
    return most and most + policy.local_len + 1


def _local(tokens: int, kept: tuple[int, ...]) -> Step:
    everything = tuple(units + tokens for units in kept)
    return Step(tokens, everything, everything)


def _endless(policy: RetentionPolicy, budgets: tuple[int, ...], held: tuple[int, ...]) -> Schedule:
    size, local = policy.chunk_size, policy.local_len
    step = Step(size, budgets, budgets)
    last = _local(local, budgets)
    peak = tuple(units + max(size, local) for units in budgets)
    if policy.when == "prompt_end":  # it grows: no number can be given beforehand
        peak = held
    return Schedule((step,), last, held, budgets, peak, endless=True)


def _at_prompt_end(
    policy: RetentionPolicy, budgets: tuple[int, ...], held: tuple[int, ...], chunked: int, local: int
) -> Schedule:
    steps, read = [], 0
    while read < chunked:
        tokens = min(policy.chunk_size, chunked - read)
        read += tokens
        everything = tuple(units + read for units in held)
        steps.append(Step(tokens, everything, everything))
    peak = tuple(units + chunked + local for units in held)
    most = tuple(units + policy.local_len for units in budgets)
    last = Step(local, most, tuple(map(min, peak, most)))
    return Schedule(tuple(steps), last, held, budgets, peak)


def _growing(
    policy: RetentionPolicy, budgets: tuple[int, ...], held: tuple[int, ...], chunked: int, sinks: int
) -> tuple[Sequence[int], list[tuple[int, ...]]]:
    """Return the chunk sizes, and for every chunk the most units each layer keeps after it."""
    if not chunked:
        return (), []
    count = -(-chunked // policy.chunk_size)
    if policy.decremental:
        count = max(1, min(count, chunked // policy.min_chunk))

    # Something competes beside the first tokens, and the newest units, half of memory at most, do not push them out.
    least = sinks + max(1, min(policy.stabilizers, sinks))

    @cache
    def grown(growth: str, budget: int, units: int) -> tuple[int, ...]:
        if units + chunked <= budget:  # everything fits, so nothing is ever evicted
            return (budget,) * count
        return memory_sizes(growth, count, budget, max(budget // count, units, min(least, budget)))

    layers = range(len(budgets))
    sizes_by_layer = [grown(_growth(policy, layer, len(budgets)), budgets[layer], held[layer]) for layer in layers]
    memory = list(zip(*sizes_by_layer, strict=True)) or [()] * count
    if policy.decremental and budgets:
        means = [sum(units) // len(units) for units in memory]
        return decremental_chunks(chunked, means, policy.min_chunk, sum(held) // len(held)), memory
    full, rest = divmod(chunked, policy.chunk_size)
    return [policy.chunk_size] * full + [rest] * bool(rest), memory


def _growth(policy: RetentionPolicy, layer: int, layers: int) -> str:
    if policy.memory == "square_sqrt":
        return "square" if layer < layers // 2 else "sqrt"
    return "linear" if policy.memory == "adaptive" else policy.memory
