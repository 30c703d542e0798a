"""How many units each KV head needs, measured by what the backbone looks at while it repeats a passage.

A few heads of a backbone find what is asked, and need most of a text; the others look at its beginning and its end
(DuoAttention, arXiv 2410.10819). Which these are hardly depends on the text (over twelve passages of manuals, SmolLM2's
shares of one and of all correlate by 0.999), so a share of the budget is measured for each once: over all heads and
layers together, the units that are looked at most are counted, head by head, with a floor for every head (Ada-KV, arXiv
2407.11550).
"""

# L layers, K KV heads, T tokens of the passage

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from locret import shipped
from locret.backbone.adapters import describe, input_device, ranks_of, unwrap
from locret.base.warned import warn_user
from locret.conversation.document import encode
from locret.conversation.turns import Transcript
from locret.heads.fingerprint import computation
from locret.heads.heads import RetainingHeads
from locret.labels.labels import labels_of_answers
from locret.policy.policy import RetentionPolicy
from locret.scorers import Scorer
from locret.scorers.retaining_heads import as_scorer

REQUEST = "Repeat the text above."
TOKENS, _TEXT = 1024, "recipes/infer/sqlite_limits.txt"
"""Of the passage; whose beginning it is."""
_ROOM = 128
KEPT, FLOOR = 0.125, 0.2
"""The share of all units that is counted; the share of the mean that every head gets."""
_MEASURED: WeakKeyDictionary[nn.Module, dict[str, tuple[float, ...]]] = WeakKeyDictionary()
"""By what else they depend on: the template, and what changes what the same weights compute, such as adapters."""


@torch.inference_mode(False)
@torch.no_grad()
def head_shares(model: nn.Module, tokenizer: Any, template: str | None = None) -> tuple[float, ...]:
    """Measure the share of each KV head in a budget; reads 1,024 tokens twice, once for each model and template.

    Args:
        model: The backbone.
        tokenizer: Its tokenizer.
        template: How turns become text, as in `LongContextModel`.

    Returns:
        A share of each KV head of each full-attention layer, layer by layer, 1 on average; for a policy's
        `head_shares`.

    Raises:
        ValueError: If the backbone holds too few tokens, is one of several processes' parts, or the tokenizer cannot
            write English text.
    """
    model, template = unwrap(model), template or ("chat" if tokenizer.chat_template else "none")
    measured, key = _MEASURED.setdefault(model, {}), f"{template}: {computation(model)}"
    if key not in measured:
        if not measurable(model, tokenizer):
            raise ValueError(
                'head_budgets="shares" needs a share of each KV head, which cannot be measured here (the backbone is '
                "in parts, holds too few tokens, or its tokenizer cannot write English text); give head_shares, or "
                "heads that recommend some"
            )
        counts = counted(_labels(model, tokenizer, template, str(_passage(tokenizer))))
        rows = zip(counts, describe(model).full_shapes, strict=True)
        measured[key] = tuple(round(float(count), 4) for row, own in rows for count in row[: own.num_kv_heads])
    return measured[key]


def measurable(model: nn.Module, tokenizer: Any) -> bool:
    """Return whether the tokenizer can write the passage, and the backbone, as a whole, hold it twice."""
    holds = describe(model).max_positions >= 2 * TOKENS + _ROOM and ranks_of(model) is None
    return holds and _passage(tokenizer) is not None


def sharing(
    policy: RetentionPolicy,
    scorer: RetainingHeads | Scorer | str,
    model: nn.Module,
    tokenizer: Any,
    template: str | None,
    *,
    asked: bool = True,
) -> RetentionPolicy:
    """Return a policy whose KV heads, if they are to have shares, have those given, recommended or else measured.

    Where nobody asked for shares and they cannot be measured, all KV heads get as many units.
    """
    recommended = None if isinstance(scorer, str) else as_scorer(scorer).head_shares
    if policy.head_budgets != "shares" or policy.head_shares or recommended:
        return policy
    if not asked and not measurable(model, tokenizer):
        warn_user("all KV heads get as many units, for their shares cannot be measured here")
        return policy.changed(head_budgets="uniform", spacing=1)
    return policy.changed(head_shares=head_shares(model, tokenizer, template))


def _passage(tokenizer: Any) -> str | None:
    """Return the beginning of a text, white space folded; None if the tokenizer cannot write it back as it was."""
    text = " ".join(shipped.text(_TEXT).split())
    found: str = tokenizer.decode(encode(tokenizer, text)[:TOKENS], clean_up_tokenization_spaces=False).strip()
    return found if found and text.startswith(found) else None


def counted(labels_LKT: Tensor) -> Tensor:
    """Return (L, K) shares, 1 on average: how many of the units with the largest labels each head holds."""
    there = labels_LKT[..., 0] > -torch.inf
    heads, tokens = int(there.sum()), labels_LKT.shape[-1]
    least = max(1, int(FLOOR * KEPT * tokens))
    floor = torch.zeros_like(labels_LKT, dtype=torch.bool)
    floor.scatter_(-1, labels_LKT.topk(least, dim=-1).indices, True)
    ranked = labels_LKT.masked_fill(floor, torch.inf).masked_fill(~there[..., None], -torch.inf)
    kept = ranked.flatten().topk(int(KEPT * tokens) * heads).indices
    counts = torch.bincount(kept // tokens, minlength=there.numel()).view_as(there).float()
    return counts * heads / counts.sum()


def _labels(model: nn.Module, tokenizer: Any, template: str, text: str) -> Tensor:
    transcript, device = Transcript(tokenizer, template), input_device(model)
    (before, after), special = transcript.around(REQUEST), transcript.special
    document, request, answer = (
        torch.tensor(ids, device=device)
        for ids in (special + encode(tokenizer, before + text), encode(tokenizer, after), encode(tokenizer, text))
    )
    return labels_of_answers(model, document, [(request, answer)], "log_attention", True).cpu()
