"""An answer that says what it may lack, and what reading passages again does to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import locret
from locret import Context, LongContextModel, RetainingHeads, RetentionPolicy
from locret.cache.watch import Watch
from locret.conversation import evidence
from locret.conversation.document import open_document
from locret.conversation.evidence import LEAST_LOST, PASSAGES, UNSURE, Answered, Passage

POLICY = RetentionPolicy(budget=48, chunk_size=256, stabilizers=8, local_len=16, ledger=64)
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
    assert 0 < found.lost < 1
    assert 0 <= found.margin <= 1
    assert found.before is None
    assert not found.changed
    assert 0 < len(found.passages) <= PASSAGES
    assert sum(one.lost for one in found.passages) <= found.lost + 1e-9
    spans = sorted((one.start, one.end) for one in found.passages)
    assert all(0 <= start < end <= context.cache.seen for start, end in spans)
    assert all(first[1] <= second[0] for first, second in zip(spans, spans[1:], strict=False))
    assert context.memory() == before
    several = context.ask([QUESTION, QUESTION], evidence=True, max_new_tokens=16)
    assert several == [found, found]


def test_passages_are_those_of_the_layers_that_decide(lm: LongContextModel, tmp_path: Path) -> None:
    """As the training of the heads has measured it; the share of all attention that is lost stays what it is."""
    lm.scorer.heads.save_pretrained(tmp_path / "heads")  # type: ignore[attr-defined]
    found = []
    for shares in (None, [0.5, 0.5, 0.5, 0.5, 3.0], [3.0, 0.5, 0.5, 0.5, 0.5]):
        heads = RetainingHeads.from_pretrained(str(tmp_path / "heads"))
        heads.annotate(policy={**POLICY.to_dict(), "layer_shares": shares})
        own = LongContextModel(lm.model, lm.tokenizer, heads, POLICY)
        own._knows_little = False
        found.append(own.read(TEXT, name="text").ask(QUESTION, evidence=True, max_new_tokens=16))
    alike, last, first = found
    assert alike.lost == last.lost == first.lost
    assert len({one.passages for one in found}) == 3
    assert last.passages[0].lost > alike.passages[0].lost > first.passages[0].lost


def test_nothing_is_lost_where_all_was_kept(lm: LongContextModel) -> None:
    whole = LongContextModel(lm.model, lm.tokenizer, lm.scorer, {"budget": 2000, "ledger": 64})
    found = whole.read(TEXT, name="text").ask(QUESTION, evidence=True, max_new_tokens=16, source=TEXT)
    assert found.lost == 0
    assert found.passages == ()
    assert not found.flagged
    assert "71432" in found.text


def test_what_goes_while_the_answer_is_written_is_lost_too(lm: LongContextModel) -> None:
    heads = RetainingHeads.for_model(lm.model, hidden_dim=8, seed=0)
    rooms = {"all stays": {}, "some goes": {"decode_budget": 120, "decode_interval": 4}}
    policy = {"budget": 400, "chunk_size": 256, "stabilizers": 8, "local_len": 16, "ledger": 64}
    lost = {}
    for name, room in rooms.items():
        own = LongContextModel(lm.model, lm.tokenizer, heads, policy | room)
        own._knows_little = False
        context = own.read("The grass is green. " * 120, name="text")
        found, watch = evidence.watched(context, QUESTION, 24, {"min_new_tokens": 24})
        lost[name] = found.lost
        last = Watch(context.cache.governed)
        assert lost[name] > 0
        assert torch.equal(watch._factors[0], last._factors[0]) == (name == "all stays")
    assert lost["some goes"] > 1.2 * lost["all stays"]


def test_a_flag_takes_both_an_unsure_answer_and_something_lost() -> None:
    def flagged(lost: float, margin: float) -> bool:
        return Answered(text="", lost=lost, margin=margin, passages=()).flagged

    assert flagged(LEAST_LOST, UNSURE / 2)
    assert not flagged(LEAST_LOST / 2, UNSURE / 2)
    assert not flagged(LEAST_LOST, UNSURE)


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
    passage = Passage(start=start - 4, end=end + 4, lost=0.1)
    pointed = Answered(text=first.text, lost=first.lost, margin=first.margin, passages=(passage,))
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


def test_long_passages_are_looked_into_first(lm: LongContextModel) -> None:
    text = TEXT * 3
    coarse = LongContextModel(lm.model, lm.tokenizer, lm.scorer, RetentionPolicy(budget=48, chunk_size=128, ledger=4))
    coarse._knows_little = False
    context = coarse.read(text)
    first = context.ask(QUESTION, evidence=True, max_new_tokens=16)
    assert first.passages[0].end - first.passages[0].start > 128
    second = context.reread(QUESTION, text, first, 16)
    assert second.before == first.text
    (passage,) = second.passages
    assert first.passages[0].start <= passage.start < passage.end <= first.passages[0].end
    assert passage.end - passage.start < 128


@pytest.mark.parametrize("text", [TEXT, FACT * 3], ids=["long", "short"])
@pytest.mark.parametrize("chunk_size", [256, 128])
@pytest.mark.parametrize("way", ["counted", "none", "original"])
def test_passages_are_found_however_the_text_was_read(
    lm: LongContextModel, monkeypatch: pytest.MonkeyPatch, way: str, chunk_size: int, text: str
) -> None:
    policy, template = replace(POLICY, chunk_size=chunk_size), None if way == "counted" else way
    own = LongContextModel(lm.model, lm.tokenizer, lm.scorer, policy, template=template)
    other = LongContextModel(lm.model, lm.tokenizer, lm.scorer, policy)  # whose template is that of chats
    own._knows_little = other._knows_little = False
    document = open_document(text)
    if way == "counted":  # as for a budget that is a share of the text
        document.count(lm.tokenizer)
    context = own.read_into(own.new_cache(), document, progress=False)
    context.lm = other
    end = context.cache.text_end - 2
    passage = Passage(start=end - (150 if text is TEXT else 8), end=end, lost=0.1)
    first = replace(context.ask(QUESTION, evidence=True, max_new_tokens=4), passages=(passage,))
    texts = evidence._tokens_of(context, text, [passage])
    assert "".join(lm.tokenizer.decode(texts[0]).removeprefix("##").split()) in "".join(text.split())
    assert len(texts[0]) == passage.end - passage.start
    assert context.reread(QUESTION, text, first, 4).before == first.text
    with pytest.raises(ValueError, match="is not the text that"):
        context.reread(QUESTION, text + "More.", first, 4)


def test_it_is_saved_with_the_context(lm: LongContextModel, context: Context, tmp_path: Path) -> None:
    context.save(tmp_path / "text.ctx")
    loaded = lm.load(tmp_path / "text.ctx")
    ours, theirs = (one.ask(QUESTION, evidence=True, max_new_tokens=8) for one in (context, loaded))
    assert ours == theirs
    assert loaded.reread(QUESTION, TEXT, theirs, 8) == context.fork().reread(QUESTION, TEXT, ours, 8)


def test_what_cannot_be_said_is_refused(lm: LongContextModel, context: Context) -> None:
    plain = LongContextModel(lm.model, lm.tokenizer, lm.scorer, {"budget": 48}).read(TEXT, name="text")
    for without in (plain, locret.compose([context, context])):
        with pytest.raises(ValueError, match="evidence=True needs a ledger of what was read, which .* lacks"):
            without.ask(QUESTION, evidence=True)
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
        return Passage(start=start, end=end, lost=0.1)

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
    as_text = LongContextModel(lm.model, lm.tokenizer, lm.scorer, {"budget": 48, "ledger": 64, "turns": "text"})
    context = as_text.read(TEXT)
    with pytest.raises(ValueError, match="turns='text' .* leave none beside the question"):
        context.reread(QUESTION, TEXT, context.ask(QUESTION, evidence=True, max_new_tokens=8))
    with pytest.raises(ValueError, match="turns='text' .* leave none beside the question"):
        context.ask(QUESTION, evidence=True, source=TEXT, max_new_tokens=8)  # flagged or not
