"""What a kind of label is: how the attention logits of answer tokens become numbers that heads learn to predict."""

# K KV heads, Q queries of a block, of all query heads of a group, S tokens, T labelled tokens

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LabelKind:
    """One kind of label. To add one: a file with such an object next to these, and its name in `KINDS`."""

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
