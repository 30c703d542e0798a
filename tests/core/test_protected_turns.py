"""Turns of a conversation that are protected by name, and the report of what stayed of each."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret import Chat, Context, LongContextModel, RetainingHeads, RetentionPolicy, Span, compose, prefill, shipped
from locret.conversation.rules import Rule, rules_of
from locret.conversation.saved_context import SavedContext
from locret.conversation.templates import encode
from locret.conversation.text_stream import TokenStream
from locret.conversation.turns import Turn, kept_turns, protection_from, spans_of

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


def text_of(read: Context | Chat, turn: Any, ids: list[int]) -> str:
    return str(read.lm.tokenizer.decode(ids[turn.start : turn.start + turn.tokens]))


@pytest.mark.parametrize("scorer", ["random", "streaming", "snapkv", "trained"])
def test_an_instruction_that_would_go_stays_and_can_be_found(parts: Any, scorer: str) -> None:
    lm = model(parts, None if scorer == "trained" else scorer)
    bare = lm.read(FILLER, system=SYSTEM)
    kept = lm.read(FILLER, system=SYSTEM, protect="system")
    system, document = kept.kept_by_message()
    assert (system.role, document.role) == ("system", "document")
    assert fewest(kept, 0, system.tokens) == system.tokens == system.least == system.most == system.units
    assert fewest(bare, 0, system.tokens) < system.tokens
    assert bare.kept_by_message()[0].least < system.tokens
    assert (system.protected, document.protected) == ("all", None)
    assert kept.memory().actual == bare.memory().actual
    said = encode(lm.tokenizer, lm._transcript(SYSTEM).opening())[: system.tokens]
    assert _plain(lm.tokenizer.decode(said)).endswith(_plain(SYSTEM + lm.tokenizer.eos_token))
    held = kept.cache.kept_positions(kept.cache.backbone.layers[0])[0, 0].tolist()
    assert held[: system.tokens] == list(range(system.tokens))


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
    assert bare[1].most == 0
    assert sum(turn.share for turn in report) == pytest.approx(1, abs=0.01)
    assert sum(turn.tokens for turn in report) == chats[True].cache.seen


def test_the_question_is_the_last_one_and_each_gives_every_turn_a_share(parts: Any) -> None:
    lm = model(parts, "random", turns="text")
    chat = lm.read(FILLER, system="Be brief.", protect=["question", "each=0.1", "system"]).chat()
    chat.say("What is green? " * 4, max_new_tokens=4)
    chat.say("What is blue? " * 3, max_new_tokens=4)
    system, document, first, answer, last, _ = chat.kept_by_message()
    assert (system.protected, last.protected) == ("all", "all")
    assert (document.protected, first.protected, answer.protected) == ("0.1", "0.1", "0.1")
    assert min(document.least, first.least) >= 6
    assert answer.least >= min(6, answer.tokens)
    assert last.least == last.tokens


def test_turns_are_where_the_template_writes_them(parts: Any) -> None:
    lm = model(parts, budget=2000, chunk_size=2000, stabilizers=0)
    chat = lm.read("The sky is blue. " * 9, system="Be brief.").chat()
    chat.say("What is blue?", max_new_tokens=3)
    chat.say("And what is not?", max_new_tokens=3)
    ids = [one for block in lm.tokens(_of("The sky is blue. " * 9), system="Be brief.") for one in block]
    report = chat.kept_by_message()
    assert [turn.role for turn in report] == ["system", "document", "user", "assistant", "user", "assistant"]
    assert report[0].start == 0
    assert _plain(text_of(chat, report[0], ids)).endswith(_plain("Be brief." + lm.tokenizer.eos_token))
    starts = [turn.start for turn in report]
    assert starts == sorted(starts)
    assert report[2].start == report[1].start + report[1].tokens


@pytest.mark.parametrize("template", ["chat", "original", "none"])
def test_characters_of_a_document_are_the_tokens_they_are_in(parts: Any, template: str) -> None:
    lm = model(parts, "random", template=template)
    text = "  \n" + FILLER
    at = text.index("The sun is yellow", 900)
    context = lm.read(text, protect=f"chars:{at}-{at + 17}")
    (rule,) = context.protection.rules
    assert rule.what == "tokens"
    assert rule.start is not None
    assert rule.end is not None
    ids = [one for block in lm.tokens(_of(text)) for one in block]
    held = lm.tokenizer.decode(ids[rule.start : rule.end])
    assert "The sun is yellow" in held
    assert len(held) <= len("The sun is yellow") + 8
    assert fewest(context, rule.start, rule.end) == rule.end - rule.start


def _of(text: str) -> Any:
    from locret.conversation.document import open_document

    return open_document(text)


def test_characters_at_the_end_wait_with_the_last_words(parts: Any) -> None:
    lm = model(parts, "random", turns="text")
    context = lm.read(FILLER.strip(), protect=f"chars:{len(FILLER) - 12}-{len(FILLER) - 1}")
    chat = context.chat()
    chat.say("The grass is green. " * 60, max_new_tokens=2)
    (rule,) = chat.protection.rules
    assert fewest(chat, rule.start or 0, rule.end or 0) == (rule.end or 0) - (rule.start or 0)
    with pytest.raises(ValueError, match="protect=chars:5-9999999=0.1 is outside of the document"):
        lm.read(FILLER, protect="chars:5-9999999=0.1")


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_finds_every_character_wherever_it_is_cut(parts: Any, seed: int) -> None:
    lot, tokenizer = random.Random(seed), parts[1]
    text = "".join(lot.choice(["The sky", " is ", "blue.", "\n", "71432", " ", "é", "语"]) for _ in range(400))
    places = sorted(lot.sample(range(len(text)), 20))
    stream = TokenStream(tokenizer, window=256, margin=32)
    for one in places:
        stream.locate(one)
    ids = stream.rest(text)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    if ids == offsets["input_ids"]:
        for one in places:
            pairs = offsets["offset_mapping"]
            assert stream.found[one].first == sum(end <= one for _, end in pairs)
            assert stream.found[one].after == sum(start < one for start, _ in pairs)
    assert set(stream.found) == set(places)


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


def test_a_composed_message_that_is_pinned_and_shared_can_be_saved(parts: Any, tmp_path: Path) -> None:
    lm = model(parts, "random")
    context = lm.read(FILLER, system="Be brief.", protect=["system", "each=0.1"])
    whole = compose([context, lm.read(FILLER, system="Be brief.")], budget=60)
    whole.save(tmp_path / "whole.ctx")
    loaded = lm.load(tmp_path / "whole.ctx")
    assert loaded.protection == whole.protection
    assert SavedContext.open(tmp_path / "whole.ctx").kept_by_message() == whole.kept_by_message()
    assert loaded.kept_by_message()[0].protected == "all"


@pytest.mark.parametrize("saved", [False, True])
def test_what_follows_a_composed_context_has_rules_of_its_own(parts: Any, tmp_path: Path, saved: bool) -> None:
    lm = model(parts, "random", turns="text", stabilizers=0)
    first = lm.read(FILLER, system="Be brief.", protect=["system", "user=0.1", "message:2=0.15"])
    second = lm.read("Here we go. " * 90, system="Be brief.", protect=["document=0.3", "assistant=0.05"])
    whole = compose([first, second], budget=64)
    if saved:
        whole.save(tmp_path / "whole.ctx")
        whole = lm.load(tmp_path / "whole.ctx")
    document = whole.kept_by_message()[2]
    assert document.protected == "0.3"
    chat = whole.chat()
    chat.say("What is green? " * 40, max_new_tokens=4)
    chat.say("What is blue? " * 40, max_new_tokens=4)
    kept = chat.kept_by_message()
    assert [one.role for one in kept] == ["system", "document", "document", *("user", "assistant") * 2]
    assert [one.protected for one in kept] == ["all", None, "0.3", "0.15", "0.05", "0.1", None]
    assert kept[0].least == kept[0].tokens
    assert kept[2].start == document.start
    assert kept[3].start == kept[2].start + kept[2].tokens
    assert min(kept[2].least - 19, kept[3].least - 9, kept[5].least - 6) >= 0


def test_what_follows_merged_chats_is_protected_as_in_each(parts: Any) -> None:
    lm = model(parts, "random", turns="text")
    context = lm.read(FILLER, system="Be brief.", protect=["system", "user=0.1", "assistant=0.02"])
    chats = [context.chat() for _ in range(2)]
    for chat in chats:
        chat.say("What is green? " * 5, max_new_tokens=3)
    whole = context.merge(*chats)
    whole.say("What is blue? " * 30, max_new_tokens=3)
    assert [one.protected for one in whole.kept_by_message()] == ["all", None, *("0.1", "0.02") * 2, "0.1", None]


def test_rules_for_what_follows_have_to_agree(parts: Any) -> None:
    lm = model(parts, "random")
    both = [lm.read(FILLER, protect=rule) for rule in ("user=0.1", "user=0.2")]
    with pytest.raises(ValueError, match="protect=user=0.1 and protect=user=0.2 are both about the turns that follow"):
        compose(both, budget=64)


@pytest.mark.parametrize("made", ["loaded", "shrunk", "composed", "shrunk and loaded", "of an earlier version"])
def test_stabilizers_that_nobody_gave_go_on_making_room(parts: Any, tmp_path: Path, made: str) -> None:
    lm = LongContextModel(*parts[:2], "random", RetentionPolicy(budget=64, chunk_size=128, local_len=8))
    context = lm.read(FILLER, protect="document=0.8")
    if made.startswith("shrunk"):
        context = context.shrink(48)
    elif made == "composed":
        context = compose([context, lm.read("The pass key is 71432.")], budget=64)
    if "load" in made or "earlier" in made:
        context.save(tmp_path / "one.ctx")
        if "earlier" in made:
            rewrite_state(tmp_path / "one.ctx", lambda state: state.pop("following"))
        context = lm.load(tmp_path / "one.ctx")
    assert context.cache.policy.stabilizers == 16
    chat = context.chat()
    chat.say("What is blue?", max_new_tokens=2)
    assert chat.kept_by_message()[0].protected == "0.8"


def test_given_stabilizers_have_what_is_left_where_a_context_is_made_smaller(parts: Any) -> None:
    context = model(parts, "random", stabilizers=12).read(FILLER, protect="document=0.8")
    chat = context.shrink(40).chat()
    chat.say("What is blue?", max_new_tokens=2)
    assert chat.kept_by_message()[0].protected == "0.8"
    pinned = model(parts, "random").read(FILLER, system=SYSTEM, protect="system")
    with pytest.raises(ValueError, match=r"need \d+ units .* for message 0, system .* but 20 units may stay here"):
        pinned.shrink(20)


@pytest.mark.parametrize("budget", [None, 60])
def test_shares_that_add_up_to_more_than_the_whole_are_refused_where_texts_are_joined(
    parts: Any, budget: int | None
) -> None:
    both = [model(parts, "random", stabilizers=0).read(FILLER, protect="document=0.6")]
    both.append(both[0].lm.read(FILLER, protect="document=0.6"))
    with pytest.raises(ValueError, match=r"protected spans need \d+ units .* for .*tokens .*, but .*or protect less"):
        compose(both, budget=budget)


def test_a_file_that_lies_about_what_nobody_gave_is_refused(parts: Any, tmp_path: Path) -> None:
    lm = model(parts, "random")
    lm.read(FILLER).save(tmp_path / "one.ctx")
    rewrite_state(tmp_path / "one.ctx", lambda state: state.update(following=["budget"]))
    with pytest.raises(ValueError, match="policy: the numbers that nobody gave are .*budget.*; they can be"):
        lm.load(tmp_path / "one.ctx")


def rewrite_state(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Write a file anew with other counters and settings, and without the checksum that they would need."""
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    state = json.loads(metadata["state"])
    change(state)
    save_file(tensors, path, metadata={"state": json.dumps(state), "notes": metadata["notes"]})


def test_a_chat_can_change_its_mind(parts: Any) -> None:
    chat = model(parts, "random", turns="text").read(FILLER, system="Be brief.").chat()
    with pytest.raises(ValueError, match="message 0, system .* cannot be protected any more"):
        chat.protect("system")
    for unread in ("tokens:1000-1005", "tokens:900-99999=0.1", Span(5000, None)):
        with pytest.raises(ValueError, match="have not been read, for the conversation has [0-9,]+; name some of"):
            chat.protect(unread)
    chat.protect("tokens:0-4=0.05", "question")
    chat.say("What is green? " * 5, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"need \d+ units per KV head, most of them for message 4, user"):
        chat.say("What is green? " * 60, max_new_tokens=2)
    assert len(chat.messages) == 3
    chat.protect()
    chat.say("What is green? " * 60, max_new_tokens=2)
    assert chat.cache.protected == ()


def test_an_answer_that_could_outgrow_its_protection_is_refused_before_it_is_written(parts: Any) -> None:
    lm = model(parts, "random", decode_budget=96, decode_interval=16)
    chat = lm.read(FILLER, system="Be brief.").chat()
    chat.protect("assistant")
    held, turns = chat.cache.seen, chat.messages
    with pytest.raises(ValueError, match=r"max_new_tokens=120 may find no room: .* 120 units .* or lower max_new_tok"):
        chat.say("What is green?", max_new_tokens=120)
    assert (chat.cache.seen, chat.messages) == (held, turns)
    chat.say("What is green?", max_new_tokens=20, min_new_tokens=20)
    with pytest.raises(ValueError, match=r"max_new_tokens=60 may find no room"):  # beside the first answer
        chat.say("What is blue?", max_new_tokens=60)
    chat.say("What is blue?", max_new_tokens=30, min_new_tokens=30)
    assert fewest(chat, *_last(chat)) == 29  # the newest token has not been read yet


def _last(chat: Chat) -> tuple[int, int]:
    (*_, turn) = chat.kept_by_message()
    return turn.start, turn.start + turn.tokens


def test_spans_given_to_the_cache_itself_stay_through_a_chat(parts: Any) -> None:
    context = model(parts, "random", turns="text").read(FILLER)
    last = context.cache.seen
    context.cache.protect([Span(last - 6, last)])
    chat = context.chat()
    chat.say("What is green? " * 60, max_new_tokens=2)
    assert fewest(chat, last - 6, last) == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sytem", "protect='sytem' names nothing to protect; give system, tools"),
        ("system=", "names nothing"),
        ("system=2", "has no share of the budget"),
        ("each", "give a share, as each=0.05"),
        ("tokens:9-3", "is empty"),
        ("message:x", "names nothing"),
        (3, "protect=3 names nothing"),
        ("tools", "finds no turn of that role here; name another one"),
        ({"system": 0.01}, "is a mapping; give a list of rules, such as"),
        ("system", "give a system message as system"),
    ],
)
def test_what_names_nothing_is_refused_before_anything_is_read(parts: Any, given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(parts, "random").read(FILLER, protect=given)


@pytest.mark.parametrize(("template", "system"), [("none", "  "), ("original", " "), ("chat", "Be brief.")])
def test_a_system_message_of_which_nothing_is_written_cannot_be_protected(
    parts: Any, monkeypatch: pytest.MonkeyPatch, template: str, system: str
) -> None:
    lm = model(parts, "random", template=template)
    dropping = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(lm.tokenizer, "chat_template", dropping)
    with pytest.raises(ValueError, match="protect=system finds no turn .* system message as system of which the templ"):
        lm.read(FILLER, system=system, protect="system")
    assert [turn.role for turn in lm.read(FILLER, system=system).kept_by_message()] == ["document"]
    prompt = lm.prompt([{"role": "system", "content": ""}, {"role": "user", "content": FILLER}])
    if template != "original":  # which writes its own then
        for rule in ("system", "message:0=0.1"):
            with pytest.raises(
                ValueError, match=f"protect={rule} names a message of which the template writes nothing"
            ):
                prompt.spans("message:1=0.5", rule)
        assert len(prompt.spans("user=0.5", "each=0.1")) == 1


@pytest.mark.parametrize("last", [[], [("user", "And what is green?")]])
def test_messages_that_a_template_moves_are_refused(parts: Any, last: list[tuple[str, str]]) -> None:
    lm = model(parts, "random", template="original")
    said = [("user", FILLER), ("system", "Be brief."), *last]
    with pytest.raises(ValueError, match="the template moves message 1, system, to another place"):
        lm.prompt([{"role": role, "content": text} for role, text in said])


def test_ids_have_no_characters_but_tokens(parts: Any) -> None:
    lm = model(parts, "random")
    ids = encode(lm.tokenizer, FILLER)
    with pytest.raises(ValueError, match="protect=chars:0-4 names characters, but token ids are read"):
        lm.read(ids, protect="chars:0-4")
    context = lm.read(ids, protect=Span(30, 41), system="Be brief.")
    assert fewest(context, 30, 41) == 11
    assert [turn.role for turn in context.kept_by_message()] == ["system", "document"]


def test_rules_and_their_texts_are_one() -> None:
    texts = ["system", "question=0.25", "message:-1", "tokens:0-40", "tokens:5-=0.5", "chars:3-9", "each=0.05"]
    assert [str(rule) for rule in rules_of(texts)] == texts
    assert rules_of(Span(0, 4, 1 / 3)) == (Rule.of(str(Rule.of(Span(0, 4, 1 / 3)))),)
    turns = [Turn("system", 0, 5), Turn("user", 5, 30), Turn("assistant", 30, 40), Turn("user", 40, 60)]
    found = spans_of(rules_of(["system", "message:-1=0.5", "each=0.1"]), turns)
    assert [(one.start, one.end, one.share) for one in found] == [
        (40, 60, 0.5), (0, 5, None), (0, 5, 0.1), (5, 30, 0.1), (30, 40, 0.1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "notes",
    [
        {"protect": "system"},
        {"protect": ["sytem"]},
        {"messages": [["system", 0]]},
        {"messages": [["king", 0, 5]]},
        {"messages": [["system", 5, 2]]},
        {"messages": [["system", 0, None], ["user", 3, 5]]},
        {"messages": [["system", 0, 5], ["user", 3, 9]]},
        {"messages": [["system", 0, True]]},
        {"messages": 7},
        {"messages": [["system", 0, None]], "fixed": 2},
        {"messages": [["system", 0, None]], "fixed": True},
    ],
)
def test_a_file_that_lies_about_turns_is_refused(notes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="protect|messages"):
        protection_from(notes)


def test_an_old_file_says_that_it_does_not_know() -> None:
    assert protection_from({}).turns is None
    assert kept_turns([torch.arange(4)], [Turn("user", 0, None)], 4)[0].units == 4


def test_the_page_of_the_documentation_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/budgets.md").read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "kept_by_message" in block]
    exec(compile(block, "docs/budgets.md", "exec"), {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "system",
        "document",
        "user",
        "assistant",
    ]


def test_whole_conversations_are_read_with_their_messages(parts: Any) -> None:
    lm = model(parts, "random")
    said = [("system", SYSTEM), ("user", "Here we go. " * 9), ("assistant", "There."), ("user", FILLER)]
    for template in ("chat", "original", "none"):
        lm.template = template
        prompt = lm.prompt([{"role": role, "content": text} for role, text in said])
        assert [turn.role for turn in prompt.turns] == ["system", "user", "assistant", "user"]
        for turn, (_, text) in zip(prompt.turns, said, strict=True):
            assert _plain(text.strip()) in _plain(lm.tokenizer.decode(prompt.ids[turn.start : turn.end]))
        cache = lm.new_cache()
        cache.protect(prompt.spans("system", "message:2", "message:1=0.1"))
        prefill(lm.model, [prompt.ids], cache)
        kept = prompt.kept(cache)
        assert [one.protected for one in kept] == ["all", "0.1", "all", None]
        assert (kept[0].least, kept[2].least) == (kept[0].tokens, kept[2].tokens)
        assert kept[1].least >= 6
    with pytest.raises(ValueError, match="tools have no effect with template=none"):
        lm.prompt([{"role": "user", "content": "hi"}], tools=[{}])
    with pytest.raises(ValueError, match="no conversation"):
        lm.prompt([])


def test_spans_that_several_rules_came_to_are_no_contradiction() -> None:
    spans = [Span(0, 22), Span(0, 22, 0.05)]
    assert [(rule.start, rule.end, rule.share) for rule in rules_of(spans)] == [(0, 22, None), (0, 22, 0.05)]
    with pytest.raises(ValueError, match="protect=system=0.05 adds nothing to protect=system"):
        rules_of(["system", "system=0.05"])
