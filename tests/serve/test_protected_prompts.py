"""What requests and uploads protect, and what the server says has stayed of each message."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import FILLER, Running, load, running

from locret import LongContextModel
from locret.infer.serve.index import Entry
from locret.infer.serve.kept import positions_of
from locret.infer.serve.library import Library
from locret.infer.serve.prompts import Prompt, Prompts
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.schemas import ChatRequest
from locret.mergers.kernels import MergingKernels

TEMPLATE = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }}. {% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "calls {{ call.function.name }}{% endfor %} .\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
TURNS = [
    {"role": "system", "content": "The pass key is 71432."},
    {"role": "user", "content": "Remember it. The grass is green."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": FILLER * 9},
    {"role": "user", "content": "What is the pass key?"},
]


def never() -> bool:
    return False


@pytest.fixture
def prompts(serving: LongContextModel, library: Library) -> Prompts:
    tokenizer = copy.deepcopy(serving.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return Prompts(LongContextModel(serving.model, tokenizer, serving.scorer, serving.policy), library)


def drafted(prompts: Prompts, messages: list[dict[str, Any]] = TURNS, **fields: Any) -> Prompt:
    (draft,) = prompts.of_chat(ChatRequest.model_validate({"messages": messages, "tools": [TOOL], **fields}))
    return draft


def text_of(prompts: Prompts, draft: Prompt, nth: int) -> str:
    turn = draft.turns[nth]
    return str(prompts.lm.tokenizer.decode(draft.ids[turn.start : turn.end])).strip()


def test_messages_are_where_the_template_writes_them(prompts: Prompts) -> None:
    draft = drafted(prompts, kept=True)
    assert [turn.role for turn in draft.turns] == ["system", "user", "assistant", "tool", "user", "tools"]
    found = [text_of(prompts, draft, nth) for nth in range(6)]
    assert found[0].startswith("tool weather")
    assert "71432" in found[0]
    assert found[1].startswith("user: Remember it.")
    assert found[2].startswith("assistant:")
    assert found[3].startswith("tool: The grass is green.")
    assert found[4].startswith("user: What is the pass key?")
    assert found[5].startswith("tool weather")
    assert draft.turns[4].end == len(draft.ids)
    assert draft.ids == drafted(prompts).ids


def test_a_tools_output_cannot_push_instructions_out(prompts: Prompts) -> None:
    found = {}
    for protect in (["system", "message:1=0.1", "each=0.05"], None):
        draft = drafted(prompts, protect=protect, kept=True)
        assert draft.long
        settled = prompts.settled(draft, never)
        found[protect is None] = prompts.kept(settled)
        assert prompts.settled(drafted(prompts, protect=protect), never).read == 0
    ours, bare = found[False], found[True]
    assert ours[0]["least"] == ours[0]["tokens"] > bare[0]["least"]
    assert (ours[0]["protected"], ours[1]["protected"], ours[2]["protected"]) == ("all", "0.1", "0.05")
    assert ours[1]["least"] >= 6
    assert ours[2]["least"] >= 3
    assert ours[5]["least"] == ours[5]["tokens"]
    assert sum(one["tokens"] for one in ours[:5]) == sum(one["tokens"] for one in bare[:5])


def test_what_was_read_for_others_is_not_taken_for_protected(prompts: Prompts, library: Library) -> None:
    bare = prompts.settled(drafted(prompts), never)
    other = prompts.settled(drafted(prompts, protect=["system"]), never)
    assert bare.holder is not None
    assert other.holder is not None
    assert bare.holder.path != other.holder.path
    assert (bare.read, other.read) == (other.read, other.read)
    longer = [*TURNS, {"role": "assistant", "content": "71432."}, {"role": "user", "content": FILLER * 3}]
    after = drafted(prompts, longer, protect=["system"])
    assert after.holder is not None
    assert after.holder.path == other.holder.path
    system = after.turns[0]
    settled = prompts.settled(after, never)
    assert settled.holder is not None
    assert after.long
    for layer in positions_of(settled.holder.path):
        for head in layer:
            assert int((head < (system.end or 0)).sum()) == system.end


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"protect": ["sytem"]}, "protect='sytem' names nothing to protect"),
        ({"protect": ["document"]}, "finds no turn of that role here; there are system, tools, user, assistant, tool"),
        ({"protect": ["message:9"]}, "is none of 5 messages"),
        ({"protect": ["tokens:9-99999"]}, "outside of the prompt"),
        ({"protect": ["chars:0-9"]}, "names characters of a document"),
        (
            {"protect": ["tool"]},
            "spans need .* most of them for message 3, tool .* but budget=64 holds 64",
        ),
        ({"protect": ["each=0.5"]}, "raise budget, or protect less"),
    ],
)
def test_what_cannot_be_protected_is_refused(prompts: Prompts, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        drafted(prompts, **fields)
    assert refused.value.status == 400


def test_a_mergers_slots_are_known_before_a_reader_is_waited_for(
    serving: LongContextModel, library: Library, tmp_path: Path
) -> None:
    MergingKernels.for_model(serving.model, slots=24, seed=0).save_pretrained(tmp_path / "kernels")
    request = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": FILLER * 9}], "protect": ["tokens:0-40"]}
    )

    def merging(merge: str) -> Prompts:
        policy = replace(serving.policy, merge=merge, stabilizers=8)
        return Prompts(LongContextModel(serving.model, serving.tokenizer, serving.scorer, policy), library)

    assert merging("none").of_chat(request)[0].long
    with pytest.raises(Refusal, match=r"the units of merge=loco.* \(24\) included") as refused:
        merging(f"loco:kernels={tmp_path / 'kernels'}").of_chat(request)
    assert refused.value.status == 400


def test_short_conversations_need_no_room(prompts: Prompts) -> None:
    draft = drafted(prompts, TURNS[:2], protect=["each=1.0", "user"], kept=True)
    assert not draft.long
    settled = prompts.settled(draft, never)
    report = prompts.kept(settled)
    assert [one["least"] for one in report] == [one["tokens"] for one in report]


def test_uploads_protect(library: Library, read: Callable[..., Entry], serving: LongContextModel) -> None:
    entry = read(library, "book", FILLER * 9, system="Be brief.", protect=["system", "chars:300-340"])
    context = serving.load(entry.path)
    assert context.kept_by_message()[0].least == context.kept_by_message()[0].tokens
    for name in ("tools", "system", "user", "assistant=0.1", "question", "message:1"):
        with pytest.raises(Refusal, match=f"protect={name} (finds no|is none of 1 messages)"):
            library.read("other", library.upload("other"), protect=[name])
    prompts = Prompts(serving, library)
    request = {"messages": [{"role": "user", "content": "What is green?"}], "context": "book"}
    (draft,) = prompts.of_chat(ChatRequest.model_validate({**request, "kept": True}))
    report = prompts.kept(prompts.settled(draft, never))
    assert [one["role"] for one in report] == ["system", "document", "user"]
    assert report[2]["least"] == report[2]["tokens"] > 0
    with pytest.raises(Refusal, match="protect comes too late for context book"):
        prompts.of_chat(ChatRequest.model_validate({**request, "protect": ["system"]}))


def test_uploads_cannot_protect_what_the_template_drops(
    library: Library, serving: LongContextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropping = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    monkeypatch.setattr(serving.tokenizer, "chat_template", dropping)
    with pytest.raises(Refusal, match="protect=system finds no turn of that role here; there are document"):
        library.read("other", library.upload("other"), system="Be brief.", protect=["system"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(load(), tmp_path_factory.mktemp("contexts")) as server:
        yield server


def test_clients_are_told_what_stayed_where_they_ask(server: Running) -> None:
    messages = [TURNS[0], {"role": "user", "content": FILLER * 6 + "What is the pass key?"}]
    body = {"messages": messages, "max_tokens": 3, "protect": ["system"], "kept": True}
    url = f"{server.url}/v1/chat/completions"
    whole = httpx.post(url, json=body, timeout=60).json()
    assert [one["role"] for one in whole["kept"]] == ["system", "user"]
    assert whole["kept"][0]["least"] == whole["kept"][0]["tokens"]
    events = httpx.post(url, json={**body, "stream": True}, timeout=60).text
    last = json.loads(events.split("data: ")[-2])
    assert (last["choices"], last["kept"]) == ([], whole["kept"])
    assert "kept" not in httpx.post(url, json={**body, "kept": False}, timeout=60).json()
    refused = httpx.post(url, json={**body, "protect": ["sytem"]}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "protect")
    query = {"name": "short", "wait": "true", "system": "Be brief.", "protect": ["system", "document=0.25"]}
    made = httpx.post(f"{server.url}/v1/contexts", params=query, content=FILLER * 6, timeout=60)
    assert made.status_code == 201, made.text
    kept = httpx.get(f"{server.url}/v1/contexts/short/messages", timeout=60).json()["data"]
    assert [(one["role"], one["protected"]) for one in kept] == [("system", "all"), ("document", "0.25")]
