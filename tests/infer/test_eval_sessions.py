"""Sessions: all turns in one cache that stays within its budget, and Rock-Paper-Scissors through `locret-eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded import tiny_tokenizer
from eval_runs import records
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from locret import RetentionCache, RetentionPolicy
from locret.data import tasks
from locret.data.tasks.published import sirllm
from locret.infer.evaluation import command
from locret.infer.evaluation.sessions import Session, likeliest

MODEL = Path(__file__).parents[2] / "checkpoints"
ARGUMENTS = ["--model", str(MODEL / "tiny"), "--heads", str(MODEL / "tiny-heads"), "--quiet", "--figures", "none"]
ARGUMENTS += ["--budget", "64", "--chunk-size", "64", "--stabilizers", "8", "--local-len", "16", "--threads", "1"]
TOKENIZER = tiny_tokenizer()


def run(output: Path, *arguments: str) -> list[dict[str, Any]]:
    assert command.command([*ARGUMENTS, "--output", str(output), *arguments]) == 0
    return records(output)


def published(folder: Path, moves: str) -> Path:
    """Write turns as SirLLM publishes them."""
    path = folder / "rock_paper_scissors" / "rock_paper_scissors_dominant_rock.jsonl"
    path.parent.mkdir(parents=True)
    rows = []
    for number, letter in enumerate(moves):
        best = sirllm.LETTERS[sirllm.beating(sirllm.LETTERS.index(letter))]
        rows.append({"id": number, "question": {"stem": "Play."}, "user_choice": letter, "answerKey": best})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_game_is_one_bounded_session_scored_turn_by_turn(tmp_path: Path) -> None:
    options = json.dumps({"sirllm/rock": {"turns": 12}})
    line = ("--tasks", "sirllm/rock", "--methods", "full,locret", "--task_options", options)
    full, bounded = run(tmp_path / "out", *line)
    assert full["peak_units"] > 12 * 30
    assert bounded["peak_units"] <= 64 + 64
    assert bounded["prompt_tokens"] == full["prompt_tokens"] > 12 * 30
    assert len(bounded["prediction"]) == 12
    assert set(bounded["prediction"]) <= set("ABC")
    won = [mine == best for mine, best in zip(bounded["prediction"], bounded["targets"][0], strict=True)]
    assert bounded["score"] == sum(won) / 12
    cells = json.loads((tmp_path / "out" / "results.json").read_text())["cells"]
    assert [cell["score"] for cell in cells] == [round(100 * r["score"], 4) for r in (full, bounded)]


def test_a_published_file_is_one_game_of_its_turns(tmp_path: Path) -> None:
    published(tmp_path / "data", "ABCAABAC")
    line = ("--tasks", "sirllm/rock", "--methods", "locret", "--data-dir", str(tmp_path / "data"))
    (record,) = run(tmp_path / "out", *line)
    assert record["targets"] == ["BCABBCBA"]
    assert json.loads((tmp_path / "out" / "results.json").read_text())["cells"][0]["task"] == "sirllm/rock"


def test_a_bad_turn_is_named_and_left_out_on_request_only(tmp_path: Path) -> None:
    path = published(tmp_path / "data", "ABC")
    path.write_text(path.read_text().replace('"user_choice": "B"', '"user_choice": "D"'))
    arguments = ["--tasks", "sirllm/rock", "--methods", "locret", "--data-dir", str(tmp_path / "data")]
    with pytest.raises(ValueError, match=r"dominant_rock.jsonl: row 1 .* holds 'D' in field 'user_choice'"):
        run(tmp_path / "out", *arguments)
    (record,) = run(tmp_path / "out", *arguments, "--skip-bad-rows", "true")
    assert record["targets"] == ["BA"]


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def turns(name: str, count: int) -> tuple[str, ...]:
    return tasks.get(f"sirllm/{name}", turns=count).sampler(None, None, samples=1, seed=0)(0).turns


def session(model: Any, cache: Any, tokenizer: Any = TOKENIZER) -> Session:
    return Session(model, tokenizer, cache, turns("rock", 2)[-1], tuple("ABC"))


def test_a_choice_is_what_three_branches_of_the_same_past_would_choose(model: Any) -> None:
    own = session(model, DynamicCache())
    past: list[int] = TOKENIZER("")["input_ids"]
    for prompt in turns("rock", 6):
        rated = own.rate(prompt)
        branches = {}
        for letter in "ABC":
            before = TOKENIZER(prompt.rstrip(), add_special_tokens=False)["input_ids"]
            ids = TOKENIZER(f"{prompt.rstrip()} {letter}", add_special_tokens=False)["input_ids"]
            logits = model(input_ids=torch.tensor([past + ids])).logits[0].log_softmax(-1)
            branches[letter] = (logits[len(past) + len(before) - 1, ids[len(before)]].item(), past + ids)
        assert rated == pytest.approx({letter: score for letter, (score, _) in branches.items()}, abs=1e-4)
        past = branches[likeliest(rated)][1]


def test_a_roomy_bounded_cache_answers_as_the_plain_one(model: Any) -> None:
    roomy = RetentionPolicy(budget=3000, chunk_size=512, stabilizers=8, local_len=8)
    plain = session(model, DynamicCache())
    bounded = session(model, RetentionCache(model, "random", roomy))
    for prompt in turns("rock", 12):
        # Log-probabilities of up to 13, of sums in another order.
        assert bounded.rate(prompt) == pytest.approx(plain.rate(prompt), rel=2e-5)
    assert bounded.most_units == plain.most_units > 400


@pytest.mark.parametrize("local_len", [16, 200])  # shorter and longer than a turn
def test_a_session_stays_within_its_budget_over_all_turns(model: Any, local_len: int) -> None:
    policy = RetentionPolicy(budget=96, chunk_size=128, stabilizers=8, local_len=local_len)
    cache = RetentionCache(model, "random", policy)
    own = session(model, cache)
    held = []
    for prompt in turns("scissors", 60):
        own.rate(prompt)
        held.append((cache.memory().units, cache.memory().actual, cache.next_position))
    assert cache.seen > 60 * 60 > policy.prefill_units
    assert own.most_units <= policy.prefill_units
    assert max(units for units, _, _ in held[30:]) == max(units for units, _, _ in held[5:30])
    assert len({actual for _, actual, _ in held[5:]}) == 1
    assert max(position for _, _, position in held) <= policy.prefill_units


def test_choices_that_share_their_first_token_are_refused(model: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "choose": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    with pytest.raises(ValueError, match="begins two of the choices A, B, C with the same token"):
        session(model, DynamicCache(), fast)
