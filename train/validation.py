"""Whether heads learn anything: what they score on rows that are held out, and what that has to be compared with.

The measure is the overlap of `top_overlap`. Scores at random get the share of tokens that counts as best, and heads as
they were before the first step show what their architecture alone is worth.

The overlap says how well labels are predicted, not whether answers survive. So `probe` reads a passage of SQLite's FAQ,
which is shipped and which no run has seen, at two shares with its questions unknown, as heads are used, in KV heads of
measured sizes, and scores the answers that stand in it; scores drawn at random, in the same sizes and with the same
protected ends, are what heads must beat.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from torch import nn

from locret import LongContextModel
from locret.backbone.adapters import describe
from locret.conversation.evidence import likelihood, policy_of_share
from locret.conversation.head_shares import measurable
from locret.data import real
from locret.data.training.stream import TrainingExample, TrainingStream
from locret.heads.heads import RetainingHeads
from locret.scorers.chosen import MEASURED
from locret.scorers.random import RandomScorer

AUTO_ROWS, AUTO_EVALUATIONS = 8, 10
_LOOKED_AT = 4 * AUTO_ROWS


def hold_out(stream: TrainingStream, asked: int | None, trained: int) -> list[TrainingExample]:
    """Set rows aside; by default a few that training does not reach, or none."""
    if asked is not None:
        return stream.hold_out(asked)
    unread = stream.size - trained
    return stream.hold_out(AUTO_ROWS, min(_LOOKED_AT, unread)) if unread >= AUTO_ROWS else []


def steps_between(asked: int | None, steps: int, rows_per_step: int, held_out: int) -> int:
    """Return the steps from one evaluation to the next; by default they cost a tenth of the training, or less."""
    if asked is not None or not held_out:
        return asked or steps
    affordable = steps * rows_per_step // (10 * held_out)
    return math.ceil(steps / min(AUTO_EVALUATIONS, max(1, affordable)))


def eval_record(values: Sequence[Sequence[float]], objective: str) -> dict[str, Any]:
    total, fit, smoothness, overlap = (list(column) for column in zip(*values, strict=True))
    means = {"total": mean(total), objective: mean(fit), "smoothness": mean(smoothness), "overlap": mean(overlap)}
    return {**{f"eval_{name}": value for name, value in means.items()}, "eval_overlap_per_row": overlap}


def comparison(record: Mapping[str, Any], before: Sequence[float], chance: float, start: str) -> tuple[str, str | None]:
    """Return the end of a run in words, and a warning if nothing was learned."""
    rows = record.get("eval_overlap_per_row")
    overlap = mean(rows) if rows else record["overlap"]
    where = f"on {len(rows)} rows that were not trained on" if rows else "on the last rows that were trained on"
    words = f"overlap {overlap:.3f} {where}; {start} {mean(before):.3f}, chance {chance:.3f}"
    if overlap > chance and _is_above(rows or [overlap], before):
        return words, None
    return words, (f"the heads have learned nothing that shows ({words}); use more --steps, more rows or another --lr")


def _is_above(after: Sequence[float], before: Sequence[float]) -> bool:
    """Return whether scores have risen by more than two standard errors of their differences."""
    if len(after) != len(before):
        return mean(after) > mean(before)
    rises = [new - old for new, old in zip(after, before, strict=True)]
    error = stdev(rises) / math.sqrt(len(rises)) if len(rises) > 1 else 0.0
    return mean(rises) > 2 * error


SHARES = (0.125, 0.0625)
"""Of the passage's tokens, those that stay."""
_TOKENS, _ROOM = 1024, 512
_QUESTIONS = 6
_SINKS = 4


def probe(model: nn.Module, tokenizer: Any, heads: RetainingHeads) -> dict[str, float]:
    """Return the nats per token of the right answers by `SHARES`, of these heads and of scores at random.

    Nothing where the tokenizer cannot write the passage, or the backbone not hold it.
    """
    if not real.readable(tokenizer) or describe(model).max_positions < _TOKENS + _ROOM:
        return {}
    piece, record = real.pieces("sqlite_faq", tokenizer, _TOKENS)[0], dict[str, float]()
    sizes: dict[str, Any] = dict(MEASURED) if measurable(model, tokenizer) else {}
    for share in SHARES:
        for name, scorer in (("nats", heads), ("random", RandomScorer(sinks=_SINKS))):
            lm = LongContextModel(model, tokenizer, scorer, policy_of_share(piece.tokens, share, **sizes))
            context = lm.read(piece.text, progress=False)
            found = [likelihood(context, one.question, one.answer) for one in piece.asked[:_QUESTIONS]]
            record[f"probe_{name}_{share:g}"] = sum(one.nats for one in found) / sum(one.tokens for one in found)
    return record


def verdict(record: dict[str, Any]) -> tuple[str, str | None]:
    """Return what a run's probe says in words, and a warning if random scores do as well; both of `probe`."""
    pairs = [(share, record[f"probe_nats_{share:g}"], record[f"probe_random_{share:g}"]) for share in SHARES]
    words = ", ".join(
        f"{heads:.2f} nats at {share:.3g} of a text (random {other:.2f})" for share, heads, other in pairs
    )
    worse = [share for share, heads, other in pairs if heads >= other]
    if not worse:
        return words, None
    return words, (
        f"on a passage that was not trained on, these heads lose to random scores at {worse[0]:.3g} of the text "
        f"({words}); use more rows, of more kinds, or --objective ranking --label-kind log_attention"
    )
