"""What requests become: what a chat template is handed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from locret import LongContextModel
from locret.infer.serve.library import Library
from locret.infer.serve.prompts import Prompts
from locret.infer.serve.schemas import ChatRequest

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


@pytest.fixture
def prompts(serving: LongContextModel, library: Library) -> Prompts:
    """Return what makes prompts with a template that writes tools."""
    tokenizer = copy.deepcopy(serving.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return Prompts(LongContextModel(serving.model, tokenizer, serving.scorer, serving.policy), library)


def rendered(prompts: Prompts, messages: list[dict[str, Any]], **fields: Any) -> str:
    """Return what the template writes of a conversation."""
    texts, tokenizer = list[str](), prompts.lm.tokenizer
    write = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *given, **more: texts.append(write(*given, **more)) or texts[-1]
    (draft,) = prompts.of_chat(ChatRequest.model_validate({"messages": messages, **fields}))
    assert draft.ids
    return texts[0]


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
