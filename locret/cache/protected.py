"""The protected spans of a cache in units: how many of a layer are spoken for, and whether there is room for them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from locret.policy.policy import RetentionPolicy
from locret.policy.protection import Guarantee, Rows, Span
from locret.policy.schedule import Schedule
from locret.policy.selectors import Stay
from locret.policy.sizes import EVERY_UNIT
from locret.scorers import Scorer

if TYPE_CHECKING:
    from locret.cache.cache import RetentionCache


def promised(rows: Rows, budget: int) -> int:
    """Return the units that spans take of every KV head, as far as that is known before a text is read."""
    return max((Guarantee.of(_known(spans), budget).needed(EVERY_UNIT) for spans in rows), default=0)


def _known(spans: Iterable[Span]) -> list[Span]:
    return [one for one in spans if one.end is not None or one.share is not None]


class Protected:
    """What is protected in every layer."""

    def __init__(self, rows: Rows, policy: RetentionPolicy, layers: Sequence[int]) -> None:
        """Take what layers hold per KV head."""
        self.rows, self._layers, self.shares = rows, layers, policy.head_shares or ()
        # Where layers have shares, each has been promised room for what it comes to of the whole budget.
        shared = policy.head_budgets == "shares"
        budgets = [policy.budget if shared else min(policy.budget, units) for units in layers]
        self._guarantees = [tuple(Guarantee.of(spans, units) for spans in rows) for units in budgets]
        self._known = [[Guarantee.of(_known(spans), units) for spans in rows] for units in budgets]

    def stay(
        self, nth: int, read: int, scorer: Scorer, budget: int, recent: int, way_out: str = "raise budget"
    ) -> Stay:
        """Return what stays of the `nth` layer's `budget` units per KV head after so many tokens of the text.

        What is protected comes first. The newest units, and what the method itself keeps, have what it leaves.
        """
        recent = max(recent, min(budget, scorer.recent(budget)))
        if not self.rows:
            return Stay(budget, recent, scorer.sink_tokens(budget, recent), shares=self.shares)
        needed = max(one.needed(read) for one in self._guarantees[nth])
        if (left := budget - needed) < 0:
            raise self._too_many(needed, f"{budget} units may stay here", way_out)
        recent = min(recent, left)
        sinks = min(scorer.sink_tokens(budget, recent), left - recent)
        return Stay(budget, recent, sinks, self._guarantees[nth], needed, self.shares)

    def check(self, policy: RetentionPolicy, answering: Sequence[int] | None, slots: int) -> None:
        """Refuse spans that a policy cannot hold once all of them have been read."""
        if not self.rows:
            return
        _check_rules(policy, [span for spans in self.rows for span in spans])
        # KV heads that have shares let their newest units yield.
        given = policy.when == "chunk" and "stabilizers" not in policy.wanted and policy.head_budgets != "shares"
        beside = {"stabilizers": policy.stabilizers if given else 0, f"the units of merge={policy.merge}": slots}
        for nth, units in enumerate(self._layers):
            needed = max(one.needed(EVERY_UNIT) for one in self._known[nth])
            whole, raised, lowered = f"budget={policy.budget} holds {units}", "raise budget", "lower those"
            if units != policy.budget:  # a layer that holds less than the mean holds even less without stabilizers
                whole += f" in full-attention layer {nth}"
                raised = lowered = 'raise budget, use layer_budgets="uniform"'
            if needed > units:
                raise self._too_many(needed, whole, raised)
            if needed + sum(beside.values()) > units:
                others = " and ".join(f"{name} ({count})" for name, count in beside.items() if count)
                raise self._too_many(needed, f"{whole}, {others} included", lowered)
            if answering is not None:
                left = answering[nth] - policy.decode_interval - policy.local_len
                if needed > left:
                    why = f"decode_budget={policy.decode_budget} holds {max(0, left)} beside local_len and an interval"
                    raise self._too_many(needed, why, "raise decode_budget")

    def check_steps(self, policy: RetentionPolicy, schedule: Schedule, seen: int) -> None:
        """Refuse spans that some step of a policy's plan cannot hold, before the first, after so many tokens seen."""
        if not self.rows or schedule.endless or policy.when != "chunk":
            return
        way_out = "raise budget" if policy.memory == "fixed" else 'use memory="fixed"'
        for number, step in enumerate(schedule.steps, start=1):
            seen += step.tokens
            for nth, units in enumerate(step.budgets):
                if (needed := max(one.needed(seen) for one in self._guarantees[nth])) > units:
                    raise self._too_many(needed, f"after chunk {number} memory holds {units}", way_out)

    def _too_many(self, needed: int, room: str, way_out: str = "raise budget") -> ValueError:
        def units(span: Span) -> int:
            return len(span.within(EVERY_UNIT)) if span.share is None else span.units(max(self._layers))

        largest = max((span for spans in self.rows for span in spans), key=units)
        return ValueError(
            f"the protected spans need {needed:,} units per KV head, most of them for {largest.label}, but {room}; "
            f"{way_out}, or protect less"
        )


def check_rows(protected: Rows, rows: int) -> None:
    """Refuse spans of another number of rows than there are, where that is known."""
    if rows and len(protected) not in (0, 1, rows):
        raise ValueError(
            f"spans of {len(protected)} rows are protected, but there are {rows}; give spans once for all rows, or "
            "for each of them"
        )


def check_room(cache: RetentionCache, protected: Rows) -> None:
    """Refuse spans that the budget cannot hold once all of them have been read."""
    limits = copy.copy(cache.limits)
    limits.protect(protected)
    limits.check_protected(0 if cache.merger is None else cache.merger.slots(cache.merging))


def check_inside(cache: RetentionCache, coming: Sequence[int]) -> None:
    """Refuse protected spans of what the text does not have, with so many tokens to come in each row."""
    pad = [0] * len(coming) if cache.pad is None else cache.pad.tolist()
    for row, tokens in enumerate(coming if cache.protected else ()):
        total = cache.seen - pad[row] + tokens
        for span in cache.protected[row if len(cache.protected) > 1 else 0]:
            if (span.start if span.end is None else span.end - 1) >= total:
                raise ValueError(
                    f"{span.label} cannot be protected, for the text has {total:,} tokens; give positions within it"
                )


def check_held(cache: RetentionCache, protected: Rows) -> None:
    """Refuse to pin tokens that have been evicted."""
    known = {one for spans in cache.protected for one in spans}
    for row, spans in enumerate(protected if cache.seen else ()):
        for own in range(cache.rows) if len(protected) == 1 else (row,):
            read = cache.seen - (0 if cache.pad is None else int(cache.pad[own]))
            for span in spans:
                tokens = span.within(read) if span.share is None and span not in known else range(0)
                for layer in cache.backbone.layers if tokens else ():
                    positions = cache.kept_positions(layer)[own]
                    held = int(((positions >= tokens.start) & (positions < tokens.stop)).sum(-1).min())
                    if held < len(tokens):
                        raise ValueError(
                            f"{span.label} cannot be protected any more: {len(tokens)} of its tokens have been read, "
                            f"and of those layer {layer} holds {held} in one of its heads; protect it before it is read"
                        )


def _check_rules(policy: RetentionPolicy, spans: Sequence[Span]) -> None:
    """Refuse what cannot be promised by a policy, whatever its numbers."""
    if policy.recalls_blocks:
        raise ValueError(
            f"recall_by={policy.recall_by} keeps tokens by a rule of its own, so {spans[0].label} cannot be protected; "
            "set init in recall_by for first tokens, or take another recall_by"
        )
    if policy.memory == "adaptive":
        raise ValueError(
            'memory="adaptive" lets layers share their units by what they retain, so none is sure to hold '
            f'{spans[0].label}; use memory="fixed", or protect nothing'
        )
    for span in spans:
        if span.share is not None and not span.units(policy.budget):
            places = 1 - math.floor(math.log10(1 / policy.budget))
            least = math.ceil(10**places / policy.budget) / 10**places  # two digits, rounded up
            raise ValueError(
                f"{span.label} has share={span.share:g}, and that of budget={policy.budget} is less than one unit; "
                f"give {least:g} or more, or raise budget"
            )
