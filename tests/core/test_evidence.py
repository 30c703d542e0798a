"""An answer that says what it may lack, and what reading passages again does to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import locret
from locret import Context, LongContextModel, RetainingHeads, RetentionPolicy, scorers
from locret.conversation import evidence
from locret.conversation.evidence import PASSAGES, UNSURE, Answered, Passage

POLICY = RetentionPolicy(budget=48, chunk_size=256, stabilizers=8, local_len=16)
FACT = "The pass key is 71432. Remember it. 71432 is the pass key. "
TEXT = "The grass is green. " * 60 + FACT + "The sky is blue. " * 60
QUESTION = "What is the pass key?"


@pytest.fixture(scope="module")
def lm() -> LongContextModel:
    loaded = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=POLICY)
    loaded._knows_little = False
    return loaded


@pytest.fixture(scope="module")
def context(lm: LongContextModel) -> Context:
    return lm.read(TEXT, name="text")


@pytest.fixture(scope="module")
def forgetful(lm: LongContextModel) -> LongContextModel:
    """A model whose heads know nothing, so that they evict what matters."""
    heads = RetainingHeads.for_model(lm.model, hidden_dim=8, seed=0)
    other = LongContextModel(lm.model, lm.tokenizer, heads, POLICY)
    other._knows_little = False
    return other


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


@pytest.mark.parametrize("policy", [{"budget": 2000}, {"budget": 48, "host_budget": "all", "recall": 8}])
def test_nothing_is_gone_where_all_is_held(
    lm: LongContextModel, policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "UNSURE", 1.1)
    whole = LongContextModel(lm.model, lm.tokenizer, lm.scorer, policy)
    found = whole.read(TEXT, name="text").ask(QUESTION, evidence=True, max_new_tokens=16, source=TEXT)
    assert not found.evicted
    assert not found.flagged
    assert found.before is None


@pytest.mark.parametrize("scorer", ["snapkv", "streaming", "random"])
def test_any_scorer_has_evidence(lm: LongContextModel, scorer: str) -> None:
    own = LongContextModel(lm.model, lm.tokenizer, scorers.get(scorer), POLICY)
    own._knows_little = False
    context = own.read(TEXT, name="text")
    found = context.ask(QUESTION, evidence=True, max_new_tokens=8, source=TEXT)
    assert found.text == context.ask(QUESTION, max_new_tokens=8) or found.before is not None
    assert found.passages


def test_passages_are_where_the_answer_looks(lm: LongContextModel) -> None:
    """With everything held, the first passage holds the sentence that the question is about."""
    whole = LongContextModel(lm.model, lm.tokenizer, lm.scorer, {"budget": 2000})
    found = whole.read(TEXT, name="text").ask(QUESTION, evidence=True, max_new_tokens=16)
    start, end = place_of(lm, TEXT, FACT)
    assert "71432" in found.text
    assert found.passages[0].start < end
    assert start < found.passages[0].end


def test_a_flag_takes_both_an_unsure_answer_and_something_evicted() -> None:
    def flagged(evicted: bool, margin: float) -> bool:
        return Answered(text="", margin=margin, passages=(), evicted=evicted).flagged

    assert flagged(True, UNSURE / 2)
    assert not flagged(False, UNSURE / 2)
    assert not flagged(True, UNSURE)


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


def test_only_a_flagged_answer_is_given_once_more(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    import locret.conversation.evidence as evidence

    monkeypatch.setattr(evidence, "UNSURE", 0.0)
    assert context.ask(QUESTION, evidence=True, source=TEXT, max_new_tokens=8).before is None
    monkeypatch.setattr(evidence, "UNSURE", 1.1)
    found = context.ask(QUESTION, evidence=True, source=TEXT, max_new_tokens=8)
    assert found.before == context.ask(QUESTION, max_new_tokens=8)


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


def test_it_is_saved_with_the_context(lm: LongContextModel, context: Context, tmp_path: Path) -> None:
    context.save(tmp_path / "text.ctx")
    loaded = lm.load(tmp_path / "text.ctx")
    ours, theirs = (one.ask(QUESTION, evidence=True, max_new_tokens=8) for one in (context, loaded))
    assert ours == theirs
    assert loaded.reread(QUESTION, TEXT, theirs, 8) == context.fork().reread(QUESTION, TEXT, ours, 8)


def test_what_cannot_be_said_is_refused(lm: LongContextModel, context: Context) -> None:
    both = locret.compose([context, context])
    assert both.ask(QUESTION, evidence=True, max_new_tokens=4).passages
    with pytest.raises(ValueError, match="is not the one text that"):
        both.ask(QUESTION, evidence=True, source=TEXT)
    blocks = LongContextModel(lm.model, lm.tokenizer, "streaming", {"budget": 256, "recall_by": "infllm"})
    with pytest.raises(ValueError, match="evidence=True looks at the units that are held, but infllm recalls blocks"):
        blocks.read(TEXT).ask(QUESTION, evidence=True)
    refused: dict[str, dict[str, Any]] = {
        "stream=True yields words": {"stream": True, "evidence": True},
        "num_beams=2 are searched": {"num_beams": 2, "evidence": True},
        "source is read again only with evidence=True": {"source": TEXT},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            context.ask(QUESTION, **options)
    for source in (iter([TEXT]), 5, b"text", object()):
        for question in (QUESTION, [QUESTION]):
            with pytest.raises(ValueError, match="which cannot be read twice, .*; give a text, a path, or token ids"):
                context.ask(question, evidence=True, source=source)
    first = context.ask(QUESTION, evidence=True, max_new_tokens=8)

    def at(start: Any, end: Any) -> Passage:
        return Passage(start=start, end=end, attention=0.1)

    odd: dict[str, Any] = {
        "are no passage of 'text', which has": [at(10**6, 10**6 + 5), at(90, 20), at(-9, 5)],
        "is no passage of a text; give what ask": [at(1.5, 9), (1, 9), at(1, float("inf"))],
    }
    for message, passages in odd.items():
        for passage in passages:
            with pytest.raises(ValueError, match=message):
                context.reread(QUESTION, TEXT, replace(first, passages=(passage,)))
    for other in ("text", None):
        with pytest.raises(ValueError, match="first is a .*; give what ask"):
            context.reread(QUESTION, TEXT, other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not the text that 'text' was read from"):
        context.reread(QUESTION, TEXT + " And more.", first)
    for question in (QUESTION, [QUESTION]):
        with pytest.raises(ValueError, match="is not the text that 'text' was read from"):
            context.ask(question, evidence=True, source=TEXT + " And more.", max_new_tokens=8)
    as_text = LongContextModel(lm.model, lm.tokenizer, lm.scorer, {"budget": 48, "turns": "text"})
    context = as_text.read(TEXT)
    with pytest.raises(ValueError, match="turns='text' .* leave none beside the question"):
        context.reread(QUESTION, TEXT, context.ask(QUESTION, evidence=True, max_new_tokens=8))
    with pytest.raises(ValueError, match="turns='text' .* leave none beside the question"):
        context.ask(QUESTION, evidence=True, source=TEXT, max_new_tokens=8)  # flagged or not
