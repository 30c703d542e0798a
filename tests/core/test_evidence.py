"""An answer that says what it may lack."""

from __future__ import annotations

from typing import Any

import pytest

import locret
from locret import Context, LongContextModel, RetentionPolicy
from locret.conversation.evidence import UNSURE

POLICY = RetentionPolicy(budget=48, chunk_size=256, stabilizers=8, local_len=16)
FACT = "The pass key is 71432. Remember it. 71432 is the pass key. "
TEXT = "The grass is green. " * 60 + FACT + "The sky is blue. " * 60
QUESTION = "What is the pass key?"


@pytest.fixture(scope="module")
def lm() -> LongContextModel:
    return LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=POLICY)


@pytest.fixture(scope="module")
def context(lm: LongContextModel) -> Context:
    return lm.read(TEXT, name="text")


def test_the_answer_is_the_same_and_the_context_stays_as_it_was(context: Context) -> None:
    before = context.memory()
    found = context.ask(QUESTION, evidence=True, max_new_tokens=16)
    assert str(found) == found.text == context.ask(QUESTION, max_new_tokens=16)
    assert 0 <= found.margin <= 1
    assert found.evicted
    assert found.flagged == (found.margin < UNSURE)
    assert context.memory() == before
    several = context.ask([QUESTION, QUESTION], evidence=True, max_new_tokens=16)
    assert several == [found, found]


def test_what_is_held_whole_lacks_nothing(lm: LongContextModel) -> None:
    found = (
        LongContextModel(lm.model, lm.tokenizer, lm.scorer, {"budget": 2000}).read(TEXT).ask(QUESTION, evidence=True)
    )
    assert "71432" in found.text
    assert not found.evicted
    assert not found.flagged


def test_what_cannot_be_said_is_refused(context: Context) -> None:
    assert 0 <= locret.compose([context, context]).ask(QUESTION, evidence=True, max_new_tokens=4).margin <= 1
    refused: dict[str, dict[str, Any]] = {
        "measured and evidence each return something else": {"measured": True, "evidence": True},
        "2 beams are searched": {"num_beams": 2, "evidence": True},
        "passages are not read again; read the text with a larger budget": {"source": TEXT},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            context.ask(QUESTION, **options)
