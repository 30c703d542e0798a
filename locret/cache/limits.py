"""How many units of which layer stay, at every moment of a cache's life, and the bytes that this comes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice

import torch

from locret import lookups, mergers, prefill_attention, scorers
from locret.backbone.shape import Backbone
from locret.cache.protected import Protected, promised
from locret.cache.rounding import forms_of
from locret.policy.planned_bytes import units_bytes, workspace_bytes
from locret.policy.policy import EVERYTHING, NO_MERGER, RetentionPolicy
from locret.policy.protection import Rows
from locret.policy.schedule import Schedule, decode_budgets, layer_budgets, lookahead, plan, protected
from locret.policy.selectors import Stay
from locret.policy.sizes import EVERY_UNIT, adaptive_sizes, divided, steepened
from locret.scorers import FeatureScorer, Scorer

BLOCK_SCORER = "streaming"
"""What goes with blocks: units stay by their place in the text."""


def check_pair(scorer: Scorer, policy: RetentionPolicy) -> None:
    """Refuse a scorer and a policy that cannot work together."""
    name = scorer.name
    scorer.check_budget(policy.budget)
    if policy.decode_budget is not None and not scorer.rates_answers:
        raise ValueError(
            f"decode_budget={policy.decode_budget} evicts while an answer is written, but scorer {name} is not defined "
            "for generated tokens; leave decode_budget out or choose another scorer"
        )
    if policy.recalls_blocks and scorer != scorers.get(BLOCK_SCORER):
        raise ValueError(
            f"recall_by={policy.recall_by} keeps the first and the most recent tokens by a rule of its own, but the "
            f"scorer is {name}; take scorer {BLOCK_SCORER} without options, and set init and local in recall_by"
        )
    if policy.head_budgets != "uniform" and not (scorer.causal or scorer.by_head):
        raise ValueError(
            f'head_budgets="{policy.head_budgets}" gives the heads of a layer different numbers of units, but scorer '
            f'{name} selects equally many units for every head itself; use head_budgets="uniform" or another scorer'
        )
    if policy.recall:
        try:
            lookups.get(policy.recall_by)
        except ValueError as error:
            raise ValueError(f'recall_by="{policy.recall_by}": {error}') from None
    if policy.when == "prompt_end" and scorer.lookback > policy.chunk_size:
        raise ValueError(
            f"scorer {name} looks back {scorer.lookback} tokens at the prompt's end, but chunk_size="
            f"{policy.chunk_size}; raise chunk_size to at least {scorer.lookback}"
        )


def with_shares(
    policy: RetentionPolicy, scorer: Scorer, heads: Sequence[int], *, planned: bool = False
) -> RetentionPolicy:
    """Return a policy that says the share of every KV head, where those have shares.

    A plan that is `planned` before they are measured takes equal ones: as many units in all, and a smaller workspace.
    """
    if policy.head_budgets != "shares":
        return policy
    shares = policy.head_shares or scorer.head_shares or ((1.0,) * sum(heads) if planned else None)
    if shares is None:
        raise ValueError(
            f'head_budgets="shares" needs a share of each KV head, and scorer {scorer.name} recommends none; give '
            "head_shares, as locret.head_shares(model, tokenizer) measures them"
        )
    if len(shares) != sum(heads):
        raise ValueError(
            f"head_shares has {len(shares)} numbers for {sum(heads)} KV heads in {len(heads)} layers with full "
            "attention; give one for each"
        )
    return policy.changed(head_shares=tuple(shares))


def check_named(policy: RetentionPolicy) -> None:
    """Refuse files that a policy names and that are not there, or no good, before a backbone is loaded."""
    if (strategy := prefill_attention.get(policy.prefill_attention)) is not None:
        strategy.check_file()
    if policy.merge != NO_MERGER:
        mergers.get(policy.merge).check_file()


def check_slots(policy: RetentionPolicy, slots: int) -> None:
    """Refuse a policy that leaves no room for the units that a merger makes anew."""
    protects = policy.stabilizers if policy.when == "chunk" else 0
    if slots > policy.budget - protects:
        raise ValueError(
            f'merge="{policy.merge}" makes {slots} units per KV head, more than budget={policy.budget} holds beside '
            f"stabilizers={protects}; raise budget, lower stabilizers, or take kernels with fewer"
        )


def planned_bytes(
    backbone: Backbone,
    scorer: Scorer,
    policy: RetentionPolicy,
    size: int,
    prompt_tokens: int | None,
    new_tokens: int = 0,
    *,
    host: bool = False,
) -> int:
    """Return the bytes of a fresh cache that reads a prompt (None: a long one) and answers, before any is made.

    Numbers of keys and values have `size` bytes. With `host` those of the second tier, where that lies elsewhere.
    """
    if host and prompt_tokens is None and policy.host_grows:
        raise ValueError(
            "a second tier of everything has no plan where the length of a prompt is unknown; give the length, or "
            "host_budget as a number of units"
        )
    limits = Limits.of(backbone, scorer, policy)
    schedule = limits.plan(prompt_tokens)
    second = limits.host_capacity(schedule, [0] * limits.layers, new_tokens)
    if host:
        return limits.far_bytes(backbone, second, size)
    return limits.fast_bytes(backbone, limits.capacity(schedule, new_tokens), second, size)


def column_bytes(scorer: Scorer) -> int:
    """Return the bytes per unit of the columns that a scorer declares."""
    return sum(dtype.itemsize for dtype in scorer.columns.values())


def _tiers(policy: RetentionPolicy, heads: Sequence[int], positions: int) -> list[tuple[int, ...]]:
    """Return how many units KV heads hold in second tiers: in all as many as if each held `host_budget`.

    Heads with shares hold theirs, `recall` at least, and no more than there are positions beside the fast tier.
    """
    most, shares = policy.host_budget or 0, policy.head_shares or ()
    if not isinstance(most, int) or policy.head_budgets != "shares":
        return [(most if isinstance(most, int) else EVERY_UNIT,) * own for own in heads]
    fast = (int(policy.budget * len(shares) * share / sum(shares)) for share in shares)
    room = [max(most, positions - policy.chunk_size - units) for units in fast]
    units = iter(divided(most * len(shares), shares, room, least=policy.recall))
    return [tuple(islice(units, own)) for own in heads]


def _tokens(schedule: Schedule) -> int:
    return sum(step.tokens for step in (*schedule.steps, schedule.last))


class Limits:
    """Says what stays in the `nth` full-attention layer."""

    schedule: Schedule
    """The plan of the read that has begun."""

    def __init__(self, policy: RetentionPolicy, scorer: Scorer, backbone: Backbone) -> None:
        layers = len(backbone.layers)
        self.policy, self.scorer, self.layers = policy, scorer, layers
        self.heads = [shape.num_kv_heads for shape in backbone.full_shapes]
        """KV heads of each layer."""
        self._positions = backbone.max_positions
        self.tiers = _tiers(policy, self.heads, backbone.max_positions)
        """Most units of each KV head in the second tier of each layer."""
        answering = self._recent(policy.decode_budget or 1)
        self._answering = decode_budgets(policy, layers, answering)
        self._promised = 0
        self.lookahead = lookahead(self.steep(policy, None), 0 if policy.host_grows else max(map(max, self.tiers)))
        """Tokens of a text of unknown length that must be seen to know that it is a long one."""
        found, self._blocks = policy.lookup(), policy.blocks() if policy.recalls_blocks else None
        if found is not None:
            found.check(policy.recall)
        if not policy.exact_bits and policy.exact_layers > (most := (layers - 1) // 2):
            raise ValueError(
                f"exact_layers={policy.exact_layers} leaves none of {layers} layers for key_bits={policy.key_bits} and "
                f"value_bits={policy.value_bits}; give at most {most}, or 16 bits"
            )
        every = range(layers)
        self.resident = tuple(found is not None and found.resident(nth, layers) for nth in every)
        """Whether the second tier of each layer lies in the fast tier's memory."""
        self.windows = tuple(0 if found is None else found.remembers(nth, layers) for nth in every)
        """Newest queries that each layer remembers for its lookup."""
        self._step = -1
        self._final = False
        self._budgets: tuple[int, ...] = ()
        self.read = 0
        """Tokens of the text so far, those of the forward pass under way included."""
        self.protect(())

    @classmethod
    def of(cls, backbone: Backbone, scorer: Scorer, policy: RetentionPolicy) -> Limits:
        """Return the limits of a backbone's layers."""
        heads = [shape.num_kv_heads for shape in backbone.full_shapes]
        return cls(with_shares(policy, scorer, heads, planned=True), scorer, backbone)

    def protect(self, rows: Rows) -> None:
        """Keep the spans of each row, or of all rows alike, whatever the scores."""
        self._promised = promised(rows, self.policy.budget)
        policy = self.steep(self.policy, None)
        own = layer_budgets(policy, self.heads, None, self._recent(policy.budget), self._promised)
        self._protected = Protected(rows, policy, own)

    def check_protected(self, slots: int) -> None:
        """Refuse protected spans that the policy cannot hold; see `Protected.check`."""
        self._protected.check(self.policy, self._answering, slots)

    @property
    def tail(self) -> int:
        """Tokens that are read after the last chunk."""
        at_end = self.policy.when == "prompt_end"
        return max(self.policy.local_len, self.scorer.lookback) if at_end else self.policy.local_len

    def plan(self, prompt_tokens: int | None, held: Sequence[int] | None = None) -> Schedule:
        """Return the plan of a text after what is `held`."""
        recent = self._recent(self.policy.budget)
        sinks = self.scorer.sink_tokens(1, 0)  # of the least memory: shares of a budget are none of it
        how = {"recent": recent, "sinks": sinks, "tail": self.tail, "promised": self._promised}
        tokens = None if prompt_tokens is None else self.read + max(0, prompt_tokens - self.tail)
        policy = self.steep(self.policy, tokens)
        found = plan(policy, self.heads, prompt_tokens, held=held, **how)
        return replace(found, head_shares=policy.head_shares or ())

    def steep(self, policy: RetentionPolicy, tokens: int | None, taken: int | None = None) -> RetentionPolicy:
        """Return the policy by which so many tokens of a text are read (None: many); see `steepened`.

        What is `taken` is promised to spans in every KV head: by what this cache protects, unless it is given. Beside a
        second tier shares stay as they are: what small KV heads drop, large ones do not recall.
        """
        if policy.head_budgets != "shares" or policy.has_host:
            return policy
        most = self._positions - policy.chunk_size
        room = most if tokens is None else min(most, tokens)
        taken = min(self._promised if taken is None else taken, policy.budget - 1)
        assert policy.head_shares is not None
        shares = steepened(policy.head_shares, policy.budget - taken, room - taken)
        return policy.changed(head_shares=shares)

    def capacity(self, schedule: Schedule, new_tokens: int) -> tuple[int, ...]:
        """Return the slots per layer for a read and an answer; of a read that grows without end, for what is known."""
        if self._blocks is not None:
            most = self._blocks.near + self.policy.chunk_size
            tokens = most if schedule.endless else _tokens(schedule) + new_tokens
            return tuple(min(most, units + tokens) for units in schedule.held)
        if self.policy.when == "prompt_end":
            return tuple(units + (new_tokens if schedule.endless else 0) for units in schedule.peak)
        return schedule.capacity(new_tokens, self._answering)

    def host_capacity(self, schedule: Schedule, held: Sequence[int], new_tokens: int) -> tuple[int, ...]:
        """Return the slots of each second tier for a read and an answer, where both tiers hold so many units."""
        most = self.policy.host_budget
        if self._blocks is not None:
            return self.host_answering(held, new_tokens + (0 if schedule.endless else _tokens(schedule)))
        if schedule.endless:
            evicted = [0 if most == EVERYTHING else EVERY_UNIT] * self.layers
        else:
            evicted = [self._most_evicted(schedule, nth, units, new_tokens) for nth, units in enumerate(held)]
        most_units = zip(evicted, self.tiers, strict=True)
        return tuple(-(-sum(min(units, one) for one in own) // len(own)) for units, own in most_units)

    def host_answering(self, held: Sequence[int], new_tokens: int) -> tuple[int, ...]:
        """Return the slots of each layer's second tier for so many more tokens, where each of them goes there."""
        if self._blocks is None:
            return ()
        return tuple(self._blocks.formed(units + new_tokens) * self._blocks.numbers[1] for units in held)

    def _most_evicted(self, schedule: Schedule, nth: int, held: int, new_tokens: int) -> int:
        """Return the most units outside of the first tier at any moment."""
        evicted, seen = held - schedule.held[nth], held
        for step in (*schedule.steps, schedule.last):
            seen += step.tokens
            evicted = max(evicted, seen - step.kept[nth])
        if schedule.shared:  # a layer may keep less than the mean
            evicted = seen
        if self._answering is not None:
            seen += new_tokens
            evicted = max(evicted, seen - self.answering(nth, 1).budget)
        return seen if evicted > 0 and self.policy.head_budgets != "uniform" else evicted  # a head may keep a few

    def answer_capacity(self, nth: int, units: int) -> int:
        """Return the slots a layer needs to grow to `units` while an answer is written."""
        if self._blocks is not None:
            return min(units, self._blocks.near + self.policy.chunk_size)
        return units if self._answering is None else min(units, self._answering[nth])

    def still(self, slots: Sequence[int]) -> bool:
        """Return whether no unit ever leaves its slot, or is turned there, where layers have at most so many slots."""
        policy = self.policy
        uniform = policy.layer_budgets == policy.head_budgets == "uniform" and policy.memory == "fixed"
        moves = policy.decode_budget is not None or policy.recalls_blocks or isinstance(self.scorer, FeatureScorer)
        return policy.positions == "original" and uniform and not moves and max(slots, default=0) <= policy.budget

    def fast_bytes(
        self, backbone: Backbone, slots: Sequence[int], second: Sequence[int], size: int, rows: int = 1
    ) -> int:
        """Return the bytes in the backbone's memory: of layers, and second tiers, of so many slots per KV head.

        Besides units these are the queries that lookups look from, and copies of blocks.
        """
        columns, copies, shapes = column_bytes(self.scorer), 0, backbone.full_shapes
        if self._blocks is not None:
            shape = backbone.check_alike(f"recall_by={self.policy.recall_by}")
            columns += shape.num_heads // shape.num_kv_heads * torch.float32.itemsize
            copies = len(slots) * self._blocks.copies_bytes(shape.num_kv_heads, shape.head_dim, size)
        numbers = sum(window * one.num_heads * one.head_dim for window, one in zip(self.windows, shapes, strict=True))
        forms = forms_of(self.policy, self.layers)
        held = units_bytes(backbone, slots, size, columns, forms)
        beside = workspace_bytes(backbone, slots, size, forms, still=self.still(slots))
        near = self._tier_bytes(backbone, second, size, resident=True)
        return rows * (held + beside + numbers * size + copies + near)

    def far_bytes(self, backbone: Backbone, second: Sequence[int], size: int, rows: int = 1) -> int:
        """Return the bytes of second tiers of so many slots per KV head, or blocks, that lie elsewhere."""
        if self._blocks is not None:
            shape = backbone.check_alike(f"recall_by={self.policy.recall_by}")
            numbers = shape.num_kv_heads, shape.num_heads, shape.head_dim, size
            return rows * sum(self._blocks.host_bytes(units, *numbers) for units in second)
        return rows * self._tier_bytes(backbone, second, size, resident=False)

    def _tier_bytes(self, backbone: Backbone, second: Iterable[int], size: int, *, resident: bool) -> int:
        slots = [units if near == resident else 0 for units, near in zip(second, self.resident, strict=True)]
        forms = forms_of(self.policy, self.layers, host=True)
        return units_bytes(backbone, slots, size, column_bytes(self.scorer), forms)

    def begin(self, schedule: Schedule) -> None:
        """Follow a plan from its start."""
        self.schedule, self._step, self._final = schedule, -1, False
        self._protected.shares = schedule.head_shares
        self._protected.check_steps(self.policy, schedule, self.read)

    @property
    def unbounded(self) -> bool:
        """Whether nobody knows how large the cache will be before this read ends."""
        return self.policy.when == "prompt_end" and self.schedule.endless

    @property
    def chunk_size(self) -> int:
        """Tokens of the chunk to come."""
        steps = self.schedule.steps
        return steps[min(self._step + 1, len(steps) - 1)].tokens if steps else self.policy.chunk_size

    @property
    def wants_ratios(self) -> bool:
        """Whether the chunk to come needs to know what each layer retained at the one before."""
        return self.schedule.shared and self._step >= 1

    def next_chunk(self, final: bool, ratios: Sequence[float] | None = None) -> None:
        """Move on to the next chunk; `ratios` are what each layer retained of its memory at the last one."""
        self._step += 1
        self._final = final
        self._budgets = self.schedule.step(self._step).budgets
        if ratios is not None:
            self._budgets = adaptive_sizes(self._budgets, ratios, self.schedule.budgets)

    def before_reading(self, nth: int) -> Stay:
        """Return what of an earlier text and its answer stays when another text comes."""
        units = self.schedule.budgets[nth]
        return self._with_own(nth, units, protected(self.policy, units))

    def after_chunk(self, nth: int) -> Stay:
        """Return what stays after the chunk; after the final one no stabilizers are protected."""
        units = self._budgets[nth]
        return self._with_own(nth, units, 0 if self._final else protected(self.policy, units))

    def at_prompt_end(self, nth: int) -> Stay:
        """Return what stays when everything is selected at the prompt's end, the local tokens included."""
        local = self.policy.local_len
        return self._with_own(nth, self.schedule.budgets[nth] + local, local)

    def answering(self, nth: int, new: int) -> Stay:
        """Return what stays when `new` generated tokens find no room."""
        assert self._answering is not None
        budget = max(1, self._answering[nth] - max(self.policy.decode_interval, new))
        return self._with_own(nth, budget, self.policy.local_len, "raise decode_budget")

    def most_answering(self, nth: int) -> int | None:
        """Return the units that a layer may hold while an answer is written; None: no limit."""
        return None if self._answering is None else self._answering[nth]

    def _recent(self, budget: int) -> int:
        return min(budget, self.scorer.recent(budget))

    def _with_own(self, nth: int, budget: int, recent: int, way_out: str = "raise budget") -> Stay:
        """Add what the scorer keeps whatever its score, and what is protected."""
        return self._protected.stay(nth, self.read, self.scorer, budget, recent, way_out)


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a cache. What is planned follows from the policy alone; all else is counted from the tensors."""

    planned: int = 0
    actual: int = 0
    peak: int = 0
    units: int = 0
    """Units held per KV head, on average: in the fullest layer, or over all layers where each head has its share."""
    host_planned: int = 0
    """Of the second tier, in host memory; without what `recall_by` makes of its keys to find units faster."""
    host: int = 0
    host_units: int = 0
    """Units of the second tier per KV head, in the fullest layer."""
    moved: int = 0
    """Fetched from the second tier so far."""

    def to_dict(self) -> dict[str, int]:
        """Return the numbers as plain data."""
        return asdict(self)
