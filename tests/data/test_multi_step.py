"""OmniKV's multi-step protocol: the words before and after a question, and an answer that contains the reference."""

from __future__ import annotations

from typing import Any

import pytest
from bench_cases import entries, made, word_tokenizer

from locret.data import tasks
from locret.data.tasks.prompts import build_prompt

ROW = {"context": "w1 w2", "input": "w3", "answers": ["Blue", "navy"]}
STEPS = "MUST first output the result of the addition"


def question(**options: Any) -> Any:
    (found,) = tasks.get("multistep/hotpotqa", **options).items(entries([ROW]))
    return found


def two_stage(**options: Any) -> tuple[Any, Any]:
    task = tasks.get("multistep/2stage", **options)
    return task, task.sampler(None, None, samples=1, seed=0)(0)


def test_a_question_is_put_as_the_official_script_puts_it() -> None:
    asked = (
        "Answer the question based on the given passages. \n\nThe following are given passages.\nw1 w2\n\n"
        "Answer the question based on the given passages. \n\nQuestion: w3\n"
    )
    steps, at_once = question(), question(cot=False)
    assert (steps.content, steps.document, steps.lead) == (asked, "w1 w2", "Evidence (step by step) then answer: 1.")
    assert (steps.system, at_once.system, at_once.lead) == (
        *("You are a helpful assistant. ", "You are a helpful assistant.", ""),
    )
    yi = question(style="yi")
    assert yi.content == (
        "You are helpful assistant who thinks step by step.\nYou will give your final answer in less than 80 words.\n"
        + asked
    )
    assert (yi.document, yi.system) == ("w1 w2", "")
    assert yi.lead == "\nEvidence (less than 5 steps) then final answer: Step 1:"


def test_two_stages_lead_to_the_sum_or_straight_to_the_colour() -> None:
    task, sample = two_stage()
    assert STEPS in sample.content
    assert sample.lead.startswith("First, for a precise answer, we can break down")
    assert (task.max_new_tokens, task.chat) == (200, True)
    task, sample = two_stage(style="yi")
    assert sample.lead == "\n\nFirst, addition result is"
    assert sample.content.startswith("You are helpful assistant who thinks step by step.\nLet's play a game.")
    assert (task.max_new_tokens, task.chat) == (50, False)
    _, direct = two_stage(cot=False)
    assert STEPS not in direct.content
    assert "Directly answer the corresponding color based on the equation result." in direct.content
    assert direct.lead.endswith("The corresponding color is")


@pytest.mark.parametrize("style", ["chat", "yi"])
def test_a_prompt_ends_with_what_is_put_into_the_models_mouth(style: str) -> None:
    built = build_prompt(tasks.get("multistep/hotpotqa", style=style), question(style=style), word_tokenizer())
    assert built.text.endswith(question(style=style).lead)
    assert ("<|im_start|> system" in built.text) == (style == "chat")


def test_an_answer_counts_if_it_contains_a_reference_in_any_case() -> None:
    task = tasks.get("multistep/hotpotqa")
    assert [task.score(text, question()) for text in ("1. it is BLUE", "the navy one", "green", "")] == [1, 1, 0, 0]


def test_rows_of_2stageretr_are_made_to_a_length_that_counts_the_lead() -> None:
    tokenizer = word_tokenizer()
    for style in ("chat", "yi"):
        task = tasks.get("multistep/2stage", style=style)
        (row,) = made(task, tokenizer, 900, 1)
        (sample,) = task.items(entries([row]))
        assert 850 < len(build_prompt(task, sample, tokenizer).ids) + task.max_new_tokens <= 900


def test_an_unknown_style_is_refused() -> None:
    with pytest.raises(ValueError, match="task multistep/2wikimqa: style='llama' is unknown; use one of chat, yi"):
        tasks.get("multistep/2wikimqa", style="llama")
    with pytest.raises(ValueError, match="task multistep/2stage: cot='yes' must be true or false"):
        tasks.get("multistep/2stage", cot="yes")
