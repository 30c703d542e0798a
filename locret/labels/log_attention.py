"""The logarithm of the attention weight: the logit minus the log-sum-exp of all logits of its query.

Paper:    None; Locret's logits (arXiv 2410.01805, Eq. 2), on a scale that makes queries and heads comparable.
Cost:     The product of the answer's queries with all keys that they see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from locret.labels.base import LabelKind

if TYPE_CHECKING:
    from torch import Tensor


def _block(logits_KQS: Tensor, labelled: int) -> Tensor:
    totals_KQ1 = logits_KQS.logsumexp(dim=-1, keepdim=True)
    return logits_KQS[:, :, :labelled].sub_(totals_KQ1).amax(dim=1)


LOG_ATTENTION = LabelKind(
    name="log_attention",
    meaning="the attention logit minus its row's log-sum-exp, that is the log of the attention",
    block=_block,
    whole_rows=True,
    comparable=True,
)
