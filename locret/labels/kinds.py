"""The kinds of label: how the attention logits of answer tokens become numbers that heads learn to predict.

logit:          the label of the paper (Locret, arXiv 2410.01805, Eq. 2): the logit after rotary embedding and scaling,
                before softmax. Costs one product of the answer's queries with the labelled keys.
log_attention:  the logarithm of the attention weight, the logit minus the log-sum-exp of all logits of its query: on a
                scale that makes queries and heads comparable. Costs the product of the answer's queries with all keys
                that they see.
"""

# K KV heads, Q queries of a block, of all query heads of a group, S tokens, T labelled tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from locret.base.nearest import refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LabelKind:
    """One kind of label. To add one: such an object, and its name in `KINDS`."""

    name: str
    """What `--label-kind` and config.json call it."""
    meaning: str
    """The same for the model card, to follow "A token's label is"."""
    block: Callable[..., Tensor]
    """Given (K, Q, S) float32 logits after scaling and softcap, which it may overwrite, and T, the number of labelled
    tokens, which come first: returns (K, T), the largest label that any of the queries gives each token."""
    whole_rows: bool
    """Whether `block` needs the logits of all tokens that a query sees, with -inf for those it does not, because they
    weigh against each other; else it is given those of the labelled tokens alone."""
    comparable: bool
    """Whether equal labels mean equal importance in all KV heads, so that heads which learn the values can compete."""


LOGIT = LabelKind(
    name="logit",
    meaning="the scaled attention logit after rotary embedding, before the softmax",
    block=lambda logits_KQS, labelled: logits_KQS.amax(dim=1),
    whole_rows=False,
    comparable=False,  # a query's logits say nothing but their differences
)


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


KINDS: dict[str, LabelKind] = {kind.name: kind for kind in (LOGIT, LOG_ATTENTION)}


def names() -> list[str]:
    """Return the names that `get` knows."""
    return list(KINDS)


def get(kind: str | LabelKind) -> LabelKind:
    """Return the kind of label with this name; one that is given as such comes back."""
    if isinstance(kind, LabelKind):
        return kind
    if kind not in KINDS:
        refuse_unknown("label kind", kind, KINDS)
    return KINDS[kind]
