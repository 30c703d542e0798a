"""An answer that says what it may lack."""

from __future__ import annotations

from typing import Any

import pytest

import locret
from locret import Context, LongContextModel, RetentionPolicy
from locret.conversation.evidence import PASSAGES, UNSURE

POLICY = RetentionPolicy(budget=48, chunk_size=256, stabilizers=8, local_len=16)
FACT = "The pass key is 71432. Remember it. 71432 is the pass key. "
TEXT = "The grass is green. " * 60 + FACT + "The sky is blue. " * 60
QUESTION = "What is the pass key?"


def test_the_answer_is_the_same_and_the_context_stays_as_it_was(context: Context) -> None:
    before = context.memory()
    found = context.ask(QUESTION, evidence=True, max_new_tokens=16)
    assert str(found) == found.text == context.ask(QUESTION, max_new_tokens=16)
    assert 0 <= found.margin <= 1
    assert found.evicted
    assert found.flagged == (found.margin < UNSURE)
    assert 0 < len(found.passages) <= PASSAGES
    assert 0 < sum(one.attention for one in found.passages) <= 1 + 1e-5
    spans = sorted((one.start, one.end) for one in found.passages)
    assert all(0 <= start < end <= context.cache.seen for start, end in spans)
    assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))
    assert context.memory() == before
    several = context.ask([QUESTION, QUESTION], evidence=True, max_new_tokens=16)
    assert several == [found, found]


def test_passages_are_where_the_answer_looks(lm: LongContextModel) -> None:
    """With everything held, the first passage holds the sentence that the question is about."""
    whole = LongContextModel(lm.model, lm.tokenizer, lm.scorer, {"budget": 2000})
    found = whole.read(TEXT, name="text").ask(QUESTION, evidence=True, max_new_tokens=16)
    assert "71432" in found.text
    assert "71432" in str(found.passages[0].text)
    assert not found.evicted
    assert not found.flagged


def test_what_cannot_be_said_is_refused(lm: LongContextModel, context: Context) -> None:
    assert locret.compose([context, context]).ask(QUESTION, evidence=True, max_new_tokens=4).passages
    blocks = LongContextModel(lm.model, lm.tokenizer, "streaming", {"budget": 256, "recall_by": "infllm"})
    with pytest.raises(ValueError, match="evidence=True looks at the units that are held, but infllm recalls blocks"):
        blocks.read(TEXT).ask(QUESTION, evidence=True)
    refused: dict[str, dict[str, Any]] = {
        "measured and evidence each return something else": {"measured": True, "evidence": True},
        "2 beams are searched": {"num_beams": 2, "evidence": True},
        "passages are not read again; read the text with a larger budget": {"source": TEXT},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            context.ask(QUESTION, **options)
