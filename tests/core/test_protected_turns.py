"""Turns of a conversation that are protected by name, and the report of what stayed of each."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret import Chat, Context, LongContextModel, RetainingHeads, RetentionPolicy, Span, compose, shipped
from locret.conversation.document import encode, open_document
from locret.conversation.protect import Rule, Turn, protection_from, rules_of, spans_of
from locret.conversation.saved import SavedContext

SYSTEM = "The pass key is 71432. Keep it. 71432 is the pass key."
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 24
POLICY = RetentionPolicy(budget=64, chunk_size=128, stabilizers=8, local_len=8)


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any, Any]:
    folder = shipped.find("checkpoints/tiny")
    heads = RetainingHeads.from_pretrained("checkpoints/tiny-heads")
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder), heads


def model(parts: tuple[Any, Any, Any], scorer: Any = None, **changes: Any) -> LongContextModel:
    rules = {"budget": 64, "chunk_size": 128, "stabilizers": 8, "local_len": 8, **changes}
    template = rules.pop("template", None)
    return LongContextModel(*parts[:2], scorer or parts[2], RetentionPolicy(**rules), template=template)


def fewest(read: Context | Chat, start: int, end: int) -> int:
    """Return the tokens of a span that the KV head holds that holds the fewest of them."""
    heads = torch.cat([read.cache.kept_positions(layer)[0] for layer in read.cache.backbone.layers])
    return int(((heads >= start) & (heads < end)).sum(-1).min())


def _plain(text: str) -> str:
    return text.replace(" ", "")


@pytest.mark.parametrize("scorer", ["random", "trained"])
def test_an_instruction_that_would_go_stays_and_can_be_found(parts: Any, scorer: str) -> None:
    lm = model(parts, None if scorer == "trained" else scorer)
    bare = lm.read(FILLER, system=SYSTEM)
    kept = lm.read(FILLER, system=SYSTEM, protect="system")
    system, document = kept.kept_by_message()
    assert (system.role, document.role) == ("system", "document")
    assert fewest(kept, 0, system.tokens) == system.tokens == system.least == system.units
    assert fewest(bare, 0, system.tokens) < system.tokens
    assert bare.kept_by_message()[0].least < system.tokens
    assert (system.protected, document.protected) == ("all", None)
    assert kept.memory().actual == bare.memory().actual
    said = encode(lm.tokenizer, lm._transcript(SYSTEM).opening())[: system.tokens]
    assert _plain(lm.tokenizer.decode(said)).endswith(_plain(SYSTEM + lm.tokenizer.eos_token))


def test_a_later_flood_cannot_push_an_early_turn_out(parts: Any) -> None:
    lm = model(parts, "streaming", turns="text")
    chats = {}
    for protect in ((), ("message:1=0.25", "user=0.1")):
        chat = lm.read("The pass key is 71432. " * 3 + "Here we go. " * 20, protect=protect).chat()
        for nth in range(3):
            chat.say(f"Question {nth}. " + "The grass is green. " * 60, max_new_tokens=4)
        chats[bool(protect)] = chat
    report, bare = (chats[which].kept_by_message() for which in (True, False))
    assert [turn.role for turn in report] == ["document", *("user", "assistant") * 3]
    for turn, without in zip(report, bare, strict=True):
        assert (turn.start, turn.tokens) == (without.start, without.tokens)
        if turn.role == "user":
            assert turn.least >= (16 if turn is report[1] else 6)
            assert turn.protected == ("0.25" if turn is report[1] else "0.1")
    assert bare[1].units == 0
    assert sum(turn.tokens for turn in report) == chats[True].cache.seen


def test_saved_forked_shrunk_and_composed_contexts_keep_rules_and_turns(parts: Any, tmp_path: Path) -> None:
    lm = model(parts, "random", turns="text")
    context = lm.read(FILLER, system="Be brief.", protect=["system", "user=0.1"])
    context.save(tmp_path / "one.ctx")
    loaded = lm.load(tmp_path / "one.ctx")
    assert loaded.protection == context.protection
    assert loaded.kept_by_message() == context.kept_by_message() == context.fork().kept_by_message()
    saved = SavedContext.open(tmp_path / "one.ctx")
    assert saved.kept_by_message() == context.kept_by_message()
    assert saved.facts()["protect"] == ["system", "user=0.1"]
    assert json.loads(json.dumps(saved.facts()["messages"]))[0]["protected"] == "all"
    chat = loaded.chat()
    chat.say("What is blue? " * 5, max_new_tokens=3)
    chat.save(tmp_path / "two.ctx")
    again = lm.load_chat(tmp_path / "two.ctx")
    assert again.protection == chat.protection
    again.say("The grass is green. " * 50, max_new_tokens=3)
    assert again.kept_by_message()[0].least == again.kept_by_message()[0].tokens
    assert again.kept_by_message()[2].least >= 6
    small = context.shrink(40)
    assert small.kept_by_message()[0].least == small.kept_by_message()[0].tokens
    whole = compose([context, lm.read(FILLER, system="Be brief.", protect=["document=0.25"])], budget=60)
    assert [turn.role for turn in whole.kept_by_message()] == ["system", "document", "document"]
    assert whole.kept_by_message()[0].protected == "all"
    assert whole.kept_by_message()[2].least >= 15
    other = whole.chat()
    other.say("What is green? " * 40, max_new_tokens=2)
    assert other.kept_by_message()[0].least == other.kept_by_message()[0].tokens


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_turn_begins_where_its_text_does(parts: Any, system: str | None) -> None:
    lm, question = model(parts), "What is the colour of the grass?"
    asked = lm.converse(open_document(FILLER), question, system=system, protect="question")
    told = lm.read(FILLER, system=system, protect="question").chat()
    for _ in range(2):
        told.read_turn(question, 4)
        for chat in (asked, told):
            (*_, document, turn) = chat.protection.known
            before, text = (lm.tokenizer.decode(chat.talk.ids[one.start : one.end]) for one in (document, turn))
            tags, said, _ = _plain(text).partition(_plain(question))
            assert said, text
            assert re.sub(r"<\w+>|\s", "", tags) == "", text
            assert said not in _plain(before)
        told.write_answer(lm.settings(4, {}))
    assert [turn.protected for turn in told.kept_by_message() if turn.role == "user"] == [None, "all"]
    whole = asked.protection.known[-1]
    assert fewest(asked, whole.start, asked.cache.seen) == asked.cache.seen - whole.start


def test_an_answer_that_could_outgrow_its_protection_is_refused_before_it_is_written(parts: Any) -> None:
    lm = model(parts, "random", decode_budget=96, decode_interval=16)
    chat = lm.read(FILLER, system="Be brief.", protect="assistant").chat()
    held, turns = chat.cache.seen, chat.messages
    with pytest.raises(ValueError, match=r"max_new_tokens=120 may find no room: .* 120 units .* or lower max_new_tok"):
        chat.say("What is green?", max_new_tokens=120)
    assert (chat.cache.seen, chat.messages) == (held, turns)
    chat.say("What is green?", max_new_tokens=20, min_new_tokens=20)
    with pytest.raises(ValueError, match=r"max_new_tokens=60 may find no room"):  # beside the first answer
        chat.say("What is blue?", max_new_tokens=60)
    chat.say("What is blue?", max_new_tokens=30, min_new_tokens=30)
    assert chat.kept_by_message()[-1].least == 29  # the newest token has not been read yet


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sytem", "protect='sytem' names nothing to protect; give system, document"),
        ("system=2", "has no share of the budget"),
        ("each", "give a share, as each=0.05"),
        ({"system": 0.01}, "is a mapping; give a list of rules, as"),
        ("system", "give a system message"),
    ],
)
def test_what_names_nothing_is_refused_before_anything_is_read(parts: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(parts, "random").read(FILLER, protect=given)


def test_rules_and_their_texts_are_one() -> None:
    texts = ["system", "question=0.25", "message:-1", "tokens:0-40", "tokens:5-=0.5", "each=0.05"]
    assert [str(rule) for rule in rules_of(texts)] == texts
    with pytest.raises(ValueError, match="protect=system=0.05 adds nothing to system, which keeps all"):
        rules_of(["system", "system=0.05"])
    assert rules_of(Span(0, 4, 1 / 3)) == (Rule.of(str(Rule.of(Span(0, 4, 1 / 3)))),)
    turns = [Turn("system", 0, 5), Turn("user", 5, 30), Turn("assistant", 30, 40), Turn("user", 40, 60)]
    found = spans_of(rules_of(["system", "message:-1=0.5", "each=0.1"]), turns)
    assert [(one.start, one.end, one.share) for one in found] == [
        (40, 60, 0.5), (0, 5, None), (0, 5, 0.1), (5, 30, 0.1), (30, 40, 0.1),
    ]  # fmt: skip


def test_rules_by_role_of_earlier_files_are_not_about_texts_that_were_joined_and_no_file_lies() -> None:
    notes = {"protect": ["tokens:0-4", "document"], "messages": [["system", 0, 4], ["document", 4, None]], "fixed": 2}
    assert protection_from(notes).rules == (Rule.of("tokens:0-4"),)
    for lie in ([["system", 0]], [["system", 0, None], ["user", 3, 5]], [["system", 0, 5], ["user", 3, 9]], 7):
        with pytest.raises(ValueError, match="messages"):
            protection_from({"messages": lie})
    with pytest.raises(ValueError, match="protect"):
        protection_from({"protect": "system"})
