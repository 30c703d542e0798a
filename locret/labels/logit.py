"""The label of the paper: the attention logit.

Paper:    Locret, arXiv 2410.01805, Eq. 2: after rotary embedding and scaling, before softmax.
Cost:     One product of the answer's queries with the labelled keys.
"""

from __future__ import annotations

from locret.labels.base import LabelKind

LOGIT = LabelKind(
    name="logit",
    meaning="the scaled attention logit after rotary embedding, before the softmax",
    block=lambda logits_KQS, labelled: logits_KQS.amax(dim=1),
    whole_rows=False,
    comparable=False,  # a query's logits say nothing but their differences
)
