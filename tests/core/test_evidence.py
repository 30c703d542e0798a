"""An answer that says what it may lack, and what reading passages again does to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import locret
from locret import Context, LongContextModel, RetainingHeads, RetentionPolicy
from locret.conversation.evidence import PASSAGES, Passage

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


@pytest.fixture(scope="module")
def forgetful(lm: LongContextModel) -> LongContextModel:
    """A model whose heads know nothing, so that they evict what matters."""
    heads = RetainingHeads.for_model(lm.model, hidden_dim=8, seed=0)
    return LongContextModel(lm.model, lm.tokenizer, heads, POLICY)


def place_of(lm: LongContextModel, text: str, words: str) -> tuple[int, int]:
    """Return the tokens of some words of a text, as they are read."""
    opening = len(lm.tokenizer(lm._transcript().opening(), add_special_tokens=False).input_ids)
    before = text[: text.index(words)]
    start = opening + len(lm.tokenizer(before, add_special_tokens=False).input_ids)
    return start, start + len(lm.tokenizer(words, add_special_tokens=False).input_ids)


def test_the_answer_is_the_same_and_the_context_stays_as_it_was(context: Context) -> None:
    before = context.memory()
    found = context.ask(QUESTION, evidence=True, max_new_tokens=16)
    assert str(found) == found.text == context.ask(QUESTION, max_new_tokens=16)
    assert 0 <= found.margin <= 1
    assert found.evicted
    assert found.before is None
    assert not found.changed
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
    start, end = place_of(lm, TEXT, FACT)
    assert "71432" in found.text
    assert found.passages[0].start < end
    assert start < found.passages[0].end


@pytest.mark.parametrize("as_file", [False, True])
def test_reading_the_right_passage_again_mends_the_answer(
    forgetful: LongContextModel, tmp_path: Path, as_file: bool
) -> None:
    source: Any = TEXT
    if as_file:
        source = tmp_path / "text.txt"
        source.write_text(TEXT)
    context = forgetful.read(source)
    first = context.ask(QUESTION, evidence=True, max_new_tokens=16)
    assert "71432" not in first.text
    start, end = place_of(forgetful, TEXT, FACT)
    passage = Passage(start=start - 4, end=end + 4, attention=0.1)
    pointed = replace(first, passages=(passage,))
    second = context.reread(QUESTION, source, pointed, 16)
    assert "71432" in second.text
    assert second.changed
    assert second.before == first.text
    assert second.to_dict()["changed"] is True


@pytest.mark.parametrize("repeats", [1, 6])
def test_reading_again_takes_the_room_of_a_turn(
    forgetful: LongContextModel, monkeypatch: pytest.MonkeyPatch, repeats: int
) -> None:
    text, caches = TEXT * repeats, []
    context, made = forgetful.read(text), Context.chat

    def noted(self: Context, cache: Any = None) -> Any:
        chat = made(self, cache)
        caches.append(chat.cache)
        return chat

    monkeypatch.setattr(Context, "chat", noted)
    context.reread(QUESTION, text, context.ask(QUESTION, evidence=True, max_new_tokens=8), 8)
    most = POLICY.budget + POLICY.local_len + POLICY.chunk_size + 8 + 1
    assert len(caches) >= 2
    for cache in caches:
        assert cache.memory().units <= most
        assert cache.memory().actual <= cache.memory().planned


def test_what_cannot_be_said_is_refused(lm: LongContextModel, context: Context) -> None:
    both = locret.compose([context, context])
    assert both.ask(QUESTION, evidence=True, max_new_tokens=4).passages
    with pytest.raises(ValueError, match="is not the one text that"):
        both.ask(QUESTION, evidence=True, source=TEXT)
    blocks = LongContextModel(lm.model, lm.tokenizer, "streaming", {"budget": 256, "recall_by": "infllm"})
    with pytest.raises(ValueError, match="evidence=True looks at the units that are held, but infllm recalls blocks"):
        blocks.read(TEXT).ask(QUESTION, evidence=True)
    refused: dict[str, dict[str, Any]] = {
        "stream, measured and evidence each return something else": {"stream": True, "evidence": True},
        "2 beams are searched": {"num_beams": 2, "evidence": True},
        "source is read again only with evidence=True": {"source": TEXT},
        "source is a list_iterator, which is read once": {"evidence": True, "source": iter([TEXT])},
        "is not the one text that 'text' was read from": {"evidence": True, "source": TEXT + " And more."},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            context.ask(QUESTION, **options)
    with pytest.raises(ValueError, match="first is a .*; give what ask"):
        context.reread(QUESTION, TEXT, "text")  # type: ignore[arg-type]
    as_text = LongContextModel(lm.model, lm.tokenizer, lm.scorer, {"budget": 48, "turns": "text"})
    with pytest.raises(ValueError, match="turns='text' .* leave none beside the question"):
        as_text.read(TEXT).ask(QUESTION, evidence=True, source=TEXT, max_new_tokens=8)  # flagged or not
