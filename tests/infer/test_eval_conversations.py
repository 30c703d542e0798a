"""Published sets with several questions of one text: conversations in one cache, requests on forks, second prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_runs import records
from transformers import AutoModelForCausalLM, AutoTokenizer

from locret.data import tasks
from locret.data.tasks.published.loading import open_task
from locret.infer.evaluation import command

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
FACTS = {"Oslo": "4821337", "Rome": "9931205", "Bonn": "1120984"}
AMPLE = ("--budget", "2000", "--chunk-size", "64", "--stabilizers", "0", "--local-len", "8")
SMALL = ("--budget", "48", "--chunk-size", "32", "--stabilizers", "8", "--local-len", "8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with a text of each set; the first question of the second text of SCBench is its only one."""
    text = NOISE * 4 + " ".join(f"The number of {key} is {value}." for key, value in FACTS.items()) + " " + NOISE * 4
    turns = [{"input": f"What is the number of {key}?", "answer": value} for key, value in FACTS.items()]
    rows = [{"id": row, "context": text, "multi_turns": turns[: 3 - 2 * row]} for row in range(2)]
    asked = [{"context": text, "question": turn["input"], "answer": turn["answer"]} for turn in turns]
    choices = {f"choice_{letter}": letter.lower() for letter in "ABCD"}
    choice = {"context": text, "question": "Which?", **choices, "answer": "B", "difficulty": "easy", "length": "short"}
    sets = {"scbench/data/scbench_kv": rows, "loogle/data/longdep_qa": asked, "longbench_v2/data": [choice]}
    for name, written in sets.items():
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in written))
    return tmp_path / "data"


def run(backbone: Path, data: Path, *arguments: str) -> list[dict[str, Any]]:
    output = data.parent / f"out{len(list(data.parent.iterdir()))}"
    line = ["--model", str(backbone), "--data-dir", str(data), "--figures", "none", "--dtype", "float32"]
    assert command.command([*line, "--output", str(output), *arguments]) == 0
    return records(output)


def written(backbone: Path, turns: list[str], said: list[str] | None, tokens: int) -> list[str]:
    """Return the plain model's answers, each from all that came before, read at once."""
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32).eval()
    answers: list[str] = []
    for number in range(len(turns)):
        messages = []
        for earlier, turn in enumerate(turns[: number + 1]):
            messages.append({"role": "user", "content": turn})
            if earlier < number:
                messages.append({"role": "assistant", "content": said[earlier] if said else answers[earlier]})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False, temperature=1.0, top_p=1.0)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def test_a_conversation_is_answered_as_by_the_plain_model_that_reads_it_anew(backbone: Path, data: Path) -> None:
    found = run(backbone, data, "--tasks", "scbench/kv", "--methods", "full,streaming", *AMPLE, "--max-new-tokens", "6")
    (sample, single) = open_task(tasks.get("scbench/kv"), data_dir=data).items()
    assert sample.said == tuple(FACTS.values())[:2]
    expected = written(backbone, list(sample.turns), list(sample.said), 6)
    assert any(answer.strip() for answer in expected)
    for record in found:
        turns = expected if record["index"] == 0 else written(backbone, [single.content], None, 6)
        assert json.loads(record["prediction"]) == turns
    full, bounded = (record for record in found if record["index"] == 0)
    assert full["prompt_tokens"] == bounded["prompt_tokens"]
    assert full["peak_units"] > bounded["prompt_tokens"]


def test_a_conversation_stays_within_the_budget(backbone: Path, data: Path) -> None:
    rows = run(backbone, data, "--tasks", "scbench/kv", "--methods", "full,streaming", *SMALL, "--max-new-tokens", "4")
    full, bounded = (record for record in rows if record["index"] == 0)
    assert full["kept_units"] > 200
    # What the turns add is kept: they are taken as the policy says, and the first prompt is evicted to the budget.
    assert bounded["kept_units"] <= 48 + 8
    assert bounded["peak_units"] < 200
    assert len(json.loads(bounded["prediction"])) == 3


def test_a_models_own_answers_can_stand_in_its_history(backbone: Path, data: Path) -> None:
    options = json.dumps({"scbench/kv": {"golden": False, "max_turns": 2}})
    line = ("--tasks", "scbench/kv", "--task_options", options, "--methods", "full,streaming", "--max-new-tokens", "3")
    full, bounded, *_ = run(backbone, data, *line, *AMPLE)
    assert json.loads(full["prediction"]) == json.loads(bounded["prediction"])
    assert len(json.loads(full["prediction"])) == 2
    assert full["prompt_tokens"] == bounded["prompt_tokens"]


@pytest.mark.parametrize("name", ["scbench/kv_requests", "loogle/longdep_qa"])
def test_all_questions_of_a_text_are_asked_and_share_one_read(backbone: Path, data: Path, name: str) -> None:
    line = ("--tasks", name, "--methods", "full,streaming", "--protocol", "aware,agnostic", "--max-new-tokens", "4")
    found = run(backbone, data, *line, *SMALL)
    known = {(row["method"], row["protocol"], row["item"], row["question"]): row for row in found}
    aware, forks = ([known["streaming", how, "0", number] for number in range(3)] for how in ("aware", "agnostic"))
    assert [row["targets"] for row in aware] == [row["targets"] for row in forks] == [[one] for one in FACTS.values()]
    assert len({row["document_tokens"] for row in forks}) == 1
    # The full cache answers a fork as it answers the whole prompt.
    for method, how, item, number in known:
        said = known[method, how, item, number]["prediction"]
        assert method != "full" or said == known["full", "aware", item, number]["prediction"]
    assert {number for *_, item, number in known if item == "1"} <= {0}


@pytest.mark.parametrize("protocol", ["aware", "agnostic"])
def test_a_chain_of_thought_is_followed_by_the_question_for_its_answer(
    backbone: Path, data: Path, protocol: str
) -> None:
    line = ("--tasks", "longbench_v2/all_cot", "--methods", "full,streaming", "--protocol", protocol)
    full, bounded = run(backbone, data, *line, *AMPLE, "--max-new-tokens", "5")
    (sample,) = open_task(tasks.get("longbench_v2/all_cot"), data_dir=data).items()
    assert full["thought"] == bounded["thought"] == written(backbone, [sample.content], None, 5)[0]
    second, _ = tasks.get("longbench_v2/all_cot").follow_up(sample, full["thought"])
    assert full["prediction"] == bounded["prediction"] == written(backbone, [second.content], None, 5)[0]
    assert 2 <= full["generated_tokens"] <= 10
    assert math.isclose(full["score"], tasks.get("longbench_v2/all").score(full["prediction"], sample))


@pytest.mark.parametrize("rule", ["question", "tokens:0-80"])
def test_a_second_prompt_has_nothing_of_what_is_protected(
    backbone: Path, data: Path, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # The share of the second prompt, which is shorter than the first, holds less than what is protected of that.
    line = ["--tasks", "longbench_v2/all_cot", "--methods", "full,streaming", "--protect", rule]
    line += ["--max-new-tokens", "5", "--budget-share", "0.3", "--chunk-size", "64"]
    line += ["--stabilizers", "0", "--local-len", "8"]
    full, bounded = run(backbone, data, *line)
    assert "--protect keeps nothing of the second prompts of longbench_v2/all_cot" in capsys.readouterr().err
    assert bounded["thought"]
    assert "protected" not in full
    assert bounded["protected"] > 60


def test_a_suite_says_which_split_has_no_rows(backbone: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(backbone, data, "--suite", "longbench-v2-splits", "--methods", "full", "--max-new-tokens", "1")
    assert {row["task"] for row in rows} == {"longbench_v2/easy", "longbench_v2/short"}
    shown = capsys.readouterr().out
    assert "missing" in shown
    assert "no rows to ask in its file" in shown
