"""What requests become: what a chat template is handed, what is protected and what has stayed of each message."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from running import FILLER, never

from locret import LongContextModel
from locret.infer.serve.index import Entry
from locret.infer.serve.jobs import positions_of
from locret.infer.serve.library import Library
from locret.infer.serve.prompts import Prompt, Prompts
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.schemas import ChatRequest

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


# -- what is protected ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protect", "message"),
    [
        ("document", "finds no turn of that role here; there are system, user, assistant, tool"),
        ("tokens:9-99999", "outside of the prompt"),
        ("tool", "spans need .* most of them for message 3, tool .* but budget=64 holds 64"),
    ],
)
def test_what_cannot_be_protected_is_refused(prompts: Prompts, protect: str, message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        drafted(prompts, tools=[TOOL], protect=[protect])
    assert (refused.value.status, refused.value.param) == (400, "protect")


def held(prompt: Prompt, end: int) -> list[int]:
    """Return how many of the first tokens each head holds of what has read a prompt."""
    assert prompt.holder is not None
    return [int(((head >= 0) & (head < end)).sum()) for layer in positions_of(prompt.holder.path) for head in layer]


def test_a_tools_output_cannot_push_instructions_out(prompts: Prompts) -> None:
    ours, bare = (
        prompts.settled(drafted(prompts, tools=[TOOL], protect=protect), never) for protect in (["system"], None)
    )
    assert ours.long
    [system] = [span for span in ours.spans if span.share is None]
    assert system.end is not None
    assert min(held(ours, system.end)) - min(held(ours, system.start)) == system.end - system.start
    assert min(held(bare, system.end)) < system.end
    assert prompts.settled(drafted(prompts, tools=[TOOL], protect=["system"]), never).read == 0


def test_uploads_protect(library: Library, read: Read, serving: LongContextModel) -> None:
    entry = read(library, "book", FILLER * 9, system="Be brief.", protect=["system", "tokens:60-70"])
    kept = serving.load(entry.path).kept_by_message()
    assert kept[0].least == kept[0].tokens
    for name in ("user", "question", "message:1"):
        with pytest.raises(Refusal, match=f"protect={name} (finds no|is none of 1 messages)"):
            library.read("other", library.upload("other"), protect=[name])
    with pytest.raises(Refusal, match="protect comes too late for context book"):
        drafted(Prompts(serving, library), [user("What is green?")], context="book", protect=["system"])
