"""Several turns: conversations in one cache that stays within its budget, games, and second prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import tiny_tokenizer
from eval_runs import prompts, records, results
from published_cases import FACTS, published
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from locret import RetentionPolicy
from locret.data import tasks
from locret.data.tasks.rows import open_rows
from locret.infer.evaluation import command, methods, sessions
from locret.infer.evaluation.methods import Setup
from locret.infer.evaluation.plan import Run

AMPLE = ("--budget", "2000", "--chunk-size", "64", "--stabilizers", "0", "--local-len", "8")
SMALL = ("--budget", "48", "--chunk-size", "32", "--stabilizers", "8", "--local-len", "8")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return published(tmp_path / "data")


def run(backbone: Path, data: Path, *arguments: str) -> list[dict[str, Any]]:
    output = data.parent / f"out{len(list(data.parent.iterdir()))}"
    line = ["--model", str(backbone), "--data-dir", str(data), "--figures", "none", "--dtype", "float32", "--quiet"]
    assert command.command([*line, "--output", str(output), "--methods", "full,streaming", *arguments]) == 0
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
    found = run(backbone, data, "--tasks", "scbench/kv", *AMPLE, "--max-new-tokens", "6")
    (sample, single) = open_rows(tasks.get("scbench/kv"), [str(data)]).items()
    assert sample.said == tuple(FACTS.values())[:2]
    expected = written(backbone, list(sample.turns), list(sample.said), 6)
    assert any(answer.strip() for answer in expected)
    for record in found:
        turns = expected if record["index"] == 0 else written(backbone, [single.content], None, 6)
        assert json.loads(record["prediction"]) == turns
    full, bounded = (record for record in found if record["index"] == 0)
    assert full["prompt_tokens"] == bounded["prompt_tokens"] < full["peak_units"]


@pytest.mark.parametrize("protocol", ["aware", "agnostic"])
def test_a_chain_of_thought_is_followed_by_the_question_for_its_answer(
    backbone: Path, data: Path, protocol: str
) -> None:
    line = ("--tasks", "longbench_v2/all_cot", "--protocol", protocol)
    full, bounded = run(backbone, data, *line, *AMPLE, "--max-new-tokens", "5")
    (sample,) = open_rows(tasks.get("longbench_v2/all_cot"), [str(data)]).items()
    assert full["thought"] == bounded["thought"] == written(backbone, [sample.content], None, 5)[0]
    second, _ = tasks.get("longbench_v2/all_cot").follow_up(sample, full["thought"])  # type: ignore[misc]
    assert full["prediction"] == bounded["prediction"] == written(backbone, [second.content], None, 5)[0]
    assert 2 <= full["generated_tokens"] <= 10


# --- games ---

TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def setup() -> Setup:
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(TOKENIZER), num_key_value_heads=1, initializer_range=0.5, **size)
    torch.manual_seed(0)
    return Setup(LlamaForCausalLM(config).eval(), TOKENIZER, None, 0)


def played(setup: Setup, turns: int, policy: RetentionPolicy | None = None) -> dict[str, Any]:
    task = tasks.get("sirllm/rock", turns=turns)
    (prompt,) = prompts(setup, task, [task.sample(None)])
    return sessions.answer_turns(prompt, Run(methods.get("random" if policy else "full"), policy))


def test_a_choice_is_what_three_branches_of_the_same_past_would_choose(setup: Setup) -> None:
    sample, past, best = tasks.get("sirllm/rock", turns=6).sample(None), TOKENIZER("")["input_ids"], ""
    for turn in sample.turns:
        branches = {}
        for letter in "ABC":
            before = TOKENIZER(turn.rstrip(), add_special_tokens=False)["input_ids"]
            ids = TOKENIZER(f"{turn.rstrip()} {letter}", add_special_tokens=False)["input_ids"]
            logits = setup.model(input_ids=torch.tensor([past + ids])).logits[0].log_softmax(-1)
            branches[letter] = (logits[len(past) + len(before) - 1, ids[len(before)]].item(), past + ids)
        best += max(branches, key=lambda letter: branches[letter][0])
        past = branches[best[-1]][1]
    roomy = RetentionPolicy(budget=3000, chunk_size=512, stabilizers=8, local_len=8)
    plain, bounded = played(setup, 6), played(setup, 6, roomy)
    assert plain["prediction"] == bounded["prediction"] == best
    assert bounded["peak_units"] == plain["peak_units"] > 200


@pytest.mark.parametrize("local_len", [16, 200])  # shorter and longer than a turn
def test_a_session_stays_within_its_budget_over_all_turns(setup: Setup, local_len: int) -> None:
    policy = RetentionPolicy(budget=96, chunk_size=128, stabilizers=8, local_len=local_len)
    short, long = played(setup, 20, policy), played(setup, 60, policy)
    assert long["prompt_tokens"] > 60 * 30 > policy.prefill_units
    assert long["peak_units"] == short["peak_units"] <= policy.prefill_units
    assert long["cache_bytes"] == short["cache_bytes"]
    assert long["prediction"].startswith(short["prediction"])


def test_a_published_file_is_one_game_scored_turn_by_turn(backbone: Path, data: Path) -> None:
    full, bounded = run(backbone, data, "--tasks", "sirllm/rock", *SMALL)
    assert bounded["targets"] == full["targets"] == ["BCABBCBACBAB"]
    assert bounded["peak_units"] <= 48 + 32 < full["peak_units"]
    won = [mine == best for mine, best in zip(bounded["prediction"], bounded["targets"][0], strict=True)]
    assert bounded["score"] == sum(won) / 12
    cells = results(next(data.parent.glob("out*")))["cells"]
    assert [(cell["task"], cell["score"]) for cell in cells] == [
        ("sirllm/rock", round(100 * record["score"], 4)) for record in (full, bounded)
    ]
