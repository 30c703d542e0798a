"""Whether heads learn anything: what they score on rows that are held out, and what that has to be compared with.

The measure is the overlap of `top_overlap`. Scores at random get the share of tokens that counts as best, and heads as
they were before the first step show what their architecture alone is worth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from locret.data.training.stream import TrainingExample, TrainingStream

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
    """Return the log's numbers for one evaluation."""
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
