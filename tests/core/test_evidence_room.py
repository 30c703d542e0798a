"""What is read again has the room of a turn, marks between passages included."""

from __future__ import annotations

from typing import Any

import pytest

from locret import LongContextModel
from locret.conversation.evidence import Passage, answered

POLICY: dict[str, Any] = {"budget": 32, "stabilizers": 4, "local_len": 8}
TEXT = "The grass is green. " * 60 + "The pass key is 71432. Remember it. " + "The sky is blue. " * 60
QUESTION = "What is the pass key?"


@pytest.fixture(scope="module")
def tiny() -> LongContextModel:
    return LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=POLICY)


def reading(tiny: LongContextModel, **changed: Any) -> LongContextModel:
    lm = LongContextModel(tiny.model, tiny.tokenizer, tiny.scorer, {**POLICY, **changed})
    lm._knows_little = False
    return lm


@pytest.mark.parametrize("more", range(0, 12, 3))
def test_passages_and_the_question_fit_into_a_turn(
    tiny: LongContextModel, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = reading(tiny, chunk_size=64 + more)
    context = lm.read(TEXT, progress=False)
    found = context.ask(QUESTION, evidence=True, max_new_tokens=4)
    assert found.passages
    asked = list[str]()

    def noting(its: Any, question: str, *rest: Any) -> Any:
        if its is context:
            asked.append(question)
        return answered(its, question, *rest)

    monkeypatch.setattr("locret.conversation.evidence.answered", noting)
    again = context.reread(QUESTION, TEXT, found, 4)
    (question,) = asked
    assert question.endswith(f"\n{QUESTION}")
    assert 0 < len(context.question_ids(question)[0]) <= context.cache.turn_room
    assert all(isinstance(one, Passage) and one.start < one.end for one in again.passages)
