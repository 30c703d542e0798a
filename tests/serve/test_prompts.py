"""What requests become: what a chat template is handed, what is protected and what has stayed of each message."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import FILLER, Running, never, running

from locret import LongContextModel
from locret.cache.cache_file import read_saved
from locret.conversation.text import encode, leading_special_ids
from locret.conversation.turns import Message, render
from locret.infer.serve.index import Entry
from locret.infer.serve.kept import positions_of
from locret.infer.serve.library import Library
from locret.infer.serve.prompts import Prompt, Prompts
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.schemas import ChatRequest
from locret.mergers.kernels import MergingKernels

Read = Callable[..., Entry]
TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}. {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "calls {{ call.function.name }} {{ call.function.arguments.items() | list if call.function.arguments is mapping "
    "else call.function.arguments }}{% endfor %} .\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


TURNS = [
    {"role": "system", "content": "The pass key is 71432."},
    user("Remember it. The grass is green."),
    {"role": "assistant", "content": None, "tool_calls": [call("{}")]},
    {"role": "tool", "tool_call_id": "1", "content": FILLER * 9},
    user("What is the pass key?"),
]


@pytest.fixture
def prompts(serving: LongContextModel, library: Library) -> Prompts:
    """Return what makes prompts with a template that writes tools."""
    tokenizer = copy.deepcopy(serving.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return Prompts(LongContextModel(serving.model, tokenizer, serving.scorer, serving.policy), library)


def drafted(prompts: Prompts, messages: list[dict[str, Any]] = TURNS, **fields: Any) -> Prompt:
    (draft,) = prompts.of_chat(ChatRequest.model_validate({"messages": messages, **fields}))
    return draft


def rendered(prompts: Prompts, messages: list[dict[str, Any]], **fields: Any) -> str:
    """Return what the template writes of a conversation."""
    texts, tokenizer = list[str](), prompts.lm.tokenizer
    write = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *given, **more: texts.append(write(*given, **more)) or texts[-1]
    assert drafted(prompts, messages, **fields).ids
    return texts[0]


# -- what a template is handed ----------------------------------------------------------------------------------------


def test_tools_are_handed_to_the_template_and_developers_are_the_system(prompts: Prompts) -> None:
    turns = [{"role": "developer", "content": "be kind"}, user("hi")]
    assert rendered(prompts, turns, tools=[TOOL]).startswith("tool weather. system: be kind .\nuser: hi")
    assert rendered(prompts, turns, tools=[TOOL], tool_choice="none").startswith("system: be kind")


@pytest.mark.parametrize(
    ("arguments", "written"), [('{"city": "Oslo"}', "[('city', 'Oslo')]"), ("no json", "no json"), ("[" * 9999, "[[[")]
)
def test_arguments_of_calls_are_objects_where_they_are_json(prompts: Prompts, arguments: str, written: str) -> None:
    asked = user([{"type": "text", "text": "how "}, {"type": "text", "text": "is it"}])
    called = {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}
    text = rendered(prompts, [asked, called, {"role": "tool", "tool_call_id": "1", "content": "rain"}])
    assert text.startswith("user: how is it")
    assert f"calls weather {written}" in text
    assert "tool: rain" in text


@pytest.mark.parametrize("template", ["chat", "none", "original"])
def test_other_templates_are_those_of_the_toolkit_and_write_no_tools(
    serving: LongContextModel, library: Library, template: str
) -> None:
    lm = LongContextModel(serving.model, serving.tokenizer, serving.scorer, serving.policy, template=template)
    with pytest.raises(Refusal, match="tools have no effect"):
        drafted(Prompts(lm, library), [user("hi")], tools=[TOOL])
    turns = [("system", "be kind"), ("user", "hi"), ("assistant", "ho"), ("user", "hi hi")]
    given = [{"role": role, "content": text} for role, text in turns]
    expected = encode(lm.tokenizer, render(lm.tokenizer, [Message(*turn) for turn in turns], template))
    special = [] if template == "chat" else leading_special_ids(lm.tokenizer)
    assert drafted(Prompts(lm, library), given).ids == [*special, *expected]


# -- what is protected ------------------------------------------------------------------------------------------------


def test_messages_are_where_the_template_writes_them(prompts: Prompts) -> None:
    draft, texts = drafted(prompts, tools=[TOOL], kept=True), ["tool weather", "user: Remember it.", "assistant:"]
    assert [turn.role for turn in draft.turns] == ["system", "user", "assistant", "tool", "user"]
    texts += ["tool: The grass is green.", "user: What is the pass key?"]
    found = [prompts.lm.tokenizer.decode(draft.ids[turn.start : turn.end]).strip() for turn in draft.turns]
    assert [one[: len(text)] for one, text in zip(found, texts, strict=True)] == texts
    assert "71432" in found[0]
    assert draft.turns[4].end == len(draft.ids)
    assert draft.ids == drafted(prompts, tools=[TOOL]).ids


def test_a_tools_output_cannot_push_instructions_out(prompts: Prompts) -> None:
    found = {}
    for protect in (["system", "message:1=0.1", "each=0.05"], None):
        draft = drafted(prompts, tools=[TOOL], protect=protect, kept=True)
        assert draft.long
        found[protect is None] = prompts.kept(prompts.settled(draft, never))
        assert prompts.settled(drafted(prompts, tools=[TOOL], protect=protect), never).read == 0
    ours, bare = found[False], found[True]
    assert ours[0]["least"] == ours[0]["tokens"] > bare[0]["least"]
    assert [one["protected"] for one in ours[:3]] == ["all", "0.1", "0.05"]
    assert ours[1]["least"] >= 6
    assert ours[2]["least"] >= 3
    assert ours[4]["least"] == ours[4]["tokens"]
    assert sum(one["tokens"] for one in ours[:5]) == sum(one["tokens"] for one in bare[:5])


def test_what_was_read_for_others_is_not_taken_for_protected(prompts: Prompts) -> None:
    bare = prompts.settled(drafted(prompts), never)
    other = prompts.settled(drafted(prompts, protect=["system"]), never)
    assert bare.holder is not None
    assert other.holder is not None
    assert bare.holder.path != other.holder.path
    assert bare.read == other.read
    longer = [*TURNS, {"role": "assistant", "content": "71432."}, user(FILLER * 3)]
    after = drafted(prompts, longer, protect=["system"])
    assert (after.holder, after.long) == (other.holder, True)
    settled = prompts.settled(after, never)
    assert settled.holder is not None
    for head in (head for layer in positions_of(settled.holder.path) for head in layer):
        assert int((head < (after.turns[0].end or 0)).sum()) == after.turns[0].end


@pytest.mark.parametrize(
    ("protect", "message"),
    [
        ("sytem", "protect='sytem' names nothing to protect"),
        ("document", "finds no turn of that role here; there are system, user, assistant, tool"),
        ("message:9", "is none of 5 messages"),
        ("tokens:9-99999", "outside of the prompt"),
        ("tool", "spans need .* most of them for message 3, tool .* but budget=64 holds 64"),
        ("each=0.5", "raise budget, or protect less"),
    ],
)
def test_what_cannot_be_protected_is_refused(prompts: Prompts, protect: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        drafted(prompts, tools=[TOOL], protect=[protect])
    assert (refused.value.status, refused.value.param) == (400, "protect")


def test_a_mergers_slots_are_known_before_a_reader_is_waited_for(
    serving: LongContextModel, library: Library, tmp_path: Path
) -> None:
    MergingKernels.for_model(serving.model, slots=24, seed=0).save_pretrained(tmp_path / "kernels")

    def merging(merge: str) -> Prompt:
        policy = replace(serving.policy, merge=merge, stabilizers=8)
        lm = LongContextModel(serving.model, serving.tokenizer, serving.scorer, policy)
        return drafted(Prompts(lm, library), [user(FILLER * 9)], protect=["tokens:0-40"])

    assert merging("none").long
    with pytest.raises(Refusal, match=r"the units of merge=loco.* \(24\) included"):
        merging(f"loco:kernels={tmp_path / 'kernels'}")


def test_short_conversations_need_no_room(prompts: Prompts) -> None:
    draft = drafted(prompts, TURNS[:2], protect=["each=1.0", "user"], kept=True)
    assert not draft.long
    assert all(one["least"] == one["tokens"] for one in prompts.kept(prompts.settled(draft, never)))


def test_uploads_protect(
    library: Library, read: Read, serving: LongContextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = read(library, "book", FILLER * 9, system="Be brief.", protect=["system", "tokens:60-70"])
    kept = serving.load(entry.path).kept_by_message()
    assert kept[0].least == kept[0].tokens
    for name in ("system", "user", "assistant=0.1", "question", "message:1"):
        with pytest.raises(Refusal, match=f"protect={name} (finds no|is none of 1 messages)"):
            library.read("other", library.upload("other"), protect=[name])
    prompts = Prompts(serving, library)
    report = prompts.kept(drafted(prompts, [user("What is green?")], context="book", kept=True))
    assert [one["role"] for one in report] == ["system", "document", "user"]
    assert report[2]["least"] == report[2]["tokens"] > 0
    with pytest.raises(Refusal, match="protect comes too late for context book"):
        drafted(prompts, [user("What is green?")], context="book", protect=["system"])
    dropping = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(serving.tokenizer, "chat_template", dropping)
    with pytest.raises(Refusal, match="protect=system finds no turn of that role here; there are document"):
        library.read("other", library.upload("other"), system="Be brief.", protect=["system"])


@pytest.mark.parametrize(
    ("protect", "budget", "said"),
    [
        (["document"], None, "all"),
        (["document=0.5"], None, "0.5"),
        (["document=0.5"], 40, "0.5"),
        ([], 40, None),
    ],
)
def test_what_follows_a_protected_document_is_no_part_of_it(
    library: Library, read: Read, serving: LongContextModel, protect: list[str], budget: int | None, said: str | None
) -> None:
    read(library, "book", "The pass key is 71432. " + FILLER * (9 if budget else 0), protect=protect)
    prompts = Prompts(serving, library)
    draft = drafted(prompts, [user(FILLER * 9)], context="book", budget=budget, kept=True)
    assert draft.long
    settled = prompts.settled(draft, never)
    assert settled.holder is not None
    spans = read_saved(settled.holder.path).state.get("protected")
    assert [end is not None for _, end, *_ in (spans[0] if spans else ())] == [True] * len(protect)
    document = prompts.kept(settled)[0]
    assert document["protected"] == said
    assert budget or document["least"] == document["tokens"] > 0


@pytest.fixture(scope="module")
def server(serving: LongContextModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running((serving, tmp_path_factory.mktemp("contexts"))) as server:
        yield server


def test_clients_are_told_what_stayed_where_they_ask(server: Running) -> None:
    messages = [TURNS[0], user(FILLER * 6 + "What is the pass key?")]
    body = {"messages": messages, "max_tokens": 3, "protect": ["system"], "kept": True}
    url = f"{server.url}/v1/chat/completions"
    whole = httpx.post(url, json=body, timeout=60).json()
    assert [one["role"] for one in whole["kept"]] == ["system", "user"]
    assert whole["kept"][0]["least"] == whole["kept"][0]["tokens"]
    last = json.loads(httpx.post(url, json={**body, "stream": True}, timeout=60).text.split("data: ")[-2])
    assert (last["choices"], last["kept"]) == ([], whole["kept"])
    assert "kept" not in httpx.post(url, json={**body, "kept": False}, timeout=60).json()
    query = {"name": "short", "wait": "true", "system": "Be brief.", "protect": ["system", "document=0.25"]}
    made = httpx.post(f"{server.url}/v1/contexts", params=query, content=FILLER * 6, timeout=60)
    assert made.status_code == 201, made.text
    kept = httpx.get(f"{server.url}/v1/contexts/short/messages", timeout=60).json()["data"]
    assert [(one["role"], one["protected"]) for one in kept] == [("system", "all"), ("document", "0.25")]
