"""What is read again has the room of a turn, marks between passages included; what is lost counts when all was read."""

from __future__ import annotations

from typing import Any

import pytest

from locret import LongContextModel
from locret.conversation.evidence import Passage, watched

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
    lm = reading(tiny, chunk_size=64 + more, ledger=64)
    context = lm.read(TEXT, progress=False)
    found = context.ask(QUESTION, evidence=True, max_new_tokens=4)
    assert found.passages
    asked = list[str]()

    def noting(its: Any, question: str, *rest: Any) -> Any:
        if its is context:
            asked.append(question)
        return watched(its, question, *rest)

    monkeypatch.setattr("locret.conversation.evidence.watched", noting)
    again = context.reread(QUESTION, TEXT, found, 4)
    (question,) = asked
    assert question.endswith(f"\n{QUESTION}")
    assert 0 < len(context.question_ids(question)[0]) <= context.cache.turn_room
    assert all(isinstance(one, Passage) and one.start < one.end for one in again.passages)


def test_a_question_that_is_read_as_text_does_not_move_what_was_lost(tiny: LongContextModel) -> None:
    tokens = reading(tiny, chunk_size=64, ledger=64).read(TEXT, progress=False).cache.seen
    full = -(-tokens // 32)  # segments that the text fills and the question outgrows; with one less the text does
    lost, widths = list[float](), list[int]()
    for segments in (full, full - 1):
        context = reading(tiny, chunk_size=64, turns="text", ledger=segments).read(TEXT, progress=False)
        ledger = context.cache.governed[0].ledger
        assert ledger is not None
        found, watch = watched(context, QUESTION, 4, {})
        widths += [ledger.width, watch.width]
        lost.append(found.lost)
    assert widths == [32, 64, 64, 64]
    assert lost[0] == pytest.approx(lost[1], abs=1e-4)
