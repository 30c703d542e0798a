"""Names of what is to be protected: of messages whose words stand elsewhere too, and of nothing."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from locret import LongContextModel, shipped
from locret.conversation.prompt import prompt_of
from locret.infer import command

HEADS = ["--model", "checkpoints/tiny", "--heads", "checkpoints/tiny-heads"]
MODEL = [*HEADS, "--prompt-file", "recipes/infer/pass_key.txt"]
BUDGET = ["--budget", "96", "--quiet"]


@pytest.mark.parametrize("template", ["original", "none", "chat"])
@pytest.mark.parametrize("system", [["a"], []])
def test_messages_are_found_whatever_they_say(template: str, system: list[str]) -> None:
    lm = LongContextModel.from_pretrained(
        "checkpoints/tiny", heads="checkpoints/tiny-heads", template=template, policy={"budget": 64}
    )
    said = [*system, "s", "a", "an", "Human"]
    roles = [*("system" for _ in system), "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
    prompt = lm.prompt([*messages, {"role": "user", "content": "Why?"}])
    parts = [str(lm.tokenizer.decode(prompt.ids[turn.start : turn.end])) for turn in prompt.turns]
    marks = {"original": ("Human:", "Assistant:"), "none": ("", ""), "chat": ("<user>", "<assistant>")}[template]
    for turn, part, text in zip(prompt.turns, parts, said, strict=False):
        mark = {"user": marks[0], "assistant": marks[1], "system": ""}[turn.role]
        assert f"{mark} {text}".strip() in part
        assert all(part.count(other) == (other == mark) for other in marks if other)


def test_a_chat_refuses_to_protect_turns_that_it_never_has() -> None:
    lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy={"budget": 64})
    lm._knows_little = False
    chat = lm.read("The sky is blue. " * 20, progress=False).chat()
    for name in ("system", "tool", "tools"):
        with pytest.raises(ValueError, match=f"protect={name} finds no turn of that role here; name another one"):
            chat.protect(name)
    chat.protect("document=0.5", "question", "assistant")
    prompt = lm.prompt([{"role": "system", "content": "Be brief."}])
    with pytest.raises(ValueError, match="protect=question finds no question of the user here; ask one"):
        prompt.spans("question")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("message:9", "--protect message:9 is none of 1 messages"),
        ("question", "--protect question finds no question of the user here"),
        ("user=0.1", "--protect user=0.1 finds no turn of that role here; there are document"),
        ("assistant", "--protect assistant finds no turn of that role here"),
    ],
)
def test_one_answer_refuses_what_is_not_in_its_prompt(given: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.command([*MODEL, *BUDGET, "--protect", given])


def test_an_answer_that_outgrows_its_room_says_which_number_gives_it_more() -> None:
    policy = {"budget": 192, "chunk_size": 64, "stabilizers": 4, "local_len": 8, "decode_budget": 100}
    lm = LongContextModel.from_pretrained("checkpoints/tiny", heads="checkpoints/tiny-heads", policy=policy)
    lm._knows_little = False
    chat = lm.read("The sky is blue. " * 20, protect="assistant", progress=False).chat()
    with pytest.raises(ValueError, match="assistant .* raise decode_budget, or protect less"):
        chat.say("Why?", max_new_tokens=120, min_new_tokens=120)


@pytest.mark.parametrize("content", [None, "", " ", [{"type": "text", "text": "hi"}], "gone"])
def test_a_message_that_is_not_found_by_its_words_is_refused(content: Any) -> None:
    said = ("user", "hi"), ("assistant", content), ("user", "yo")
    messages = [{"role": role, "content": words} for role, words in said]
    tokenizer = AutoTokenizer.from_pretrained(shipped.find("checkpoints/tiny"))
    with pytest.raises(ValueError, match="rewrites message 1, or it is empty, so its place is not known"):
        prompt_of(tokenizer, "hi there yo", messages, lambda nth: None)
