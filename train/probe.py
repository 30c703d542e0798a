"""Whether heads hold on a text and questions that no run has seen: a passage of SQLite's FAQ, which is shipped.

The overlap on held-out rows says how well labels are predicted, not whether answers survive. Here a passage is read at
two shares with its questions unknown, as heads are used, in KV heads of measured sizes, and the answers that stand in
it are scored; scores drawn at random, in the same sizes and with the same protected ends, are what heads must beat.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from locret import LongContextModel
from locret.backbone.adapters import describe
from locret.conversation.evidence import likelihood, policy_of_share
from locret.conversation.head_shares import measurable
from locret.data import real
from locret.heads.heads import RetainingHeads
from locret.scorers.chosen import MEASURED
from locret.scorers.random import RandomScorer

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
