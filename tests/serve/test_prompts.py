"""What a chat template is handed: tools and calls as templates expect them, and only where they have an effect."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from locret import LongContextModel
from locret.infer.serve.library import Library
from locret.infer.serve.prompts import Prompts
from locret.infer.serve.refusal import Refusal
from locret.infer.serve.schemas import ChatRequest

WITH_TOOLS = (
    "{% for tool in tools or [] %}tool {{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% for call in m.tool_calls or [] %}"
    "calls {{ call.function.name }} {{ call.function.arguments.items() | list if call.function.arguments is mapping "
    "else call.function.arguments }} {% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def prompts(serving: LongContextModel, library: Library) -> Prompts:
    """Return what makes prompts with a template that writes tools."""
    tokenizer = copy.deepcopy(serving.tokenizer)
    tokenizer.chat_template = WITH_TOOLS
    return Prompts(LongContextModel(serving.model, tokenizer, serving.scorer, serving.policy), library)


def rendered(prompts: Prompts, messages: list[dict[str, Any]], **fields: Any) -> str:
    """Return what the template writes of a conversation."""
    texts, tokenizer = list[str](), prompts.lm.tokenizer
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *given, **more: texts.append(render(*given, **more)) or texts[-1]
    assert prompts.of_chat(ChatRequest.model_validate({"messages": messages, **fields}))[0].ids
    return texts[0]


def test_tools_are_handed_to_the_template(prompts: Prompts) -> None:
    hi = [{"role": "user", "content": "hi"}]
    assert rendered(prompts, hi, tools=[TOOL]).startswith("tool weather user hi")
    assert rendered(prompts, hi, tools=[TOOL], tool_choice="none").startswith("user hi")


@pytest.mark.parametrize(
    ("arguments", "written"), [('{"city": "Oslo"}', "[('city', 'Oslo')]"), ("no json", "no json"), ("[" * 9999, "[[[")]
)
def test_arguments_of_calls_are_objects_where_they_are_json(prompts: Prompts, arguments: str, written: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "is it"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    text = rendered(prompts, turns)
    assert f"calls weather {written}" in text
    assert text.startswith("user how is it")
    assert "tool rain" in text


def test_developers_are_the_system(prompts: Prompts) -> None:
    turns = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert rendered(prompts, turns).startswith("system be kind user hi")


def test_a_template_without_tools_refuses_them(serving: LongContextModel, library: Library) -> None:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]})
    for template in ("chat", "none", "original"):
        lm = LongContextModel(serving.model, serving.tokenizer, serving.scorer, serving.policy, template=template)
        with pytest.raises(Refusal, match="tools have no effect"):
            Prompts(lm, library).of_chat(request)


@pytest.mark.parametrize("template", ["none", "original"])
def test_other_templates_are_those_of_the_toolkit(serving: LongContextModel, library: Library, template: str) -> None:
    from locret.conversation.templates import Message, encode, leading_special_ids, render

    lm = LongContextModel(serving.model, serving.tokenizer, serving.scorer, serving.policy, template=template)
    turns = [("system", "be kind"), ("user", "hi"), ("assistant", "ho"), ("user", "hi hi")]
    request = ChatRequest.model_validate({"messages": [{"role": role, "content": text} for role, text in turns]})
    expected = encode(lm.tokenizer, render(lm.tokenizer, [Message(*turn) for turn in turns], template))
    assert Prompts(lm, library).of_chat(request)[0].ids == [*leading_special_ids(lm.tokenizer), *expected]
