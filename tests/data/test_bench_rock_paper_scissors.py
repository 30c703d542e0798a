"""Rock-Paper-Scissors: published prompts and rates, reports no constant answer can hide in, a bounded session."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from locret import RetentionCache, RetentionPolicy
from locret.data.tasks.published import rock_paper_scissors as game
from locret.data.tasks.published.base import BadRow
from locret.data.tasks.published.game_session import ModelPlayer
from locret.data.tasks.published.records import read_records
from locret.data.text.embedded_tokenizer import build_tokenizer

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "sirllm"
ROCK, PAPER, SCISSORS = range(3)


class Always:
    def __init__(self, move: int):
        self.move, self.heard = move, []

    def choose(self, prompt: str) -> Sequence[float]:
        self.heard.append(prompt)
        return [-1.0 if move == self.move else -2.0 for move in range(3)]


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=len(build_tokenizer()),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def test_prompts_are_the_published_ones_and_tell_only_the_past() -> None:
    player = Always(ROCK)
    game.play([PAPER, SCISSORS, ROCK], player)
    assert player.heard == [
        "USER: Let's play a game of Rock-Paper-Scissors. Choose one option from: (A) rock (B) paper (C) scissors. "
        "\n\nASSISTANT: ",
        "USER: I chose [paper]. Analyze my preferences to maximize your winning rate and proceed to the next round. "
        "Choices: (A) rock (B) paper (C) scissors. You choose:\n\nASSISTANT: ",
        "USER: I chose [scissors]. Analyze my preferences to maximize your winning rate and proceed to the next round. "
        "Choices: (A) rock (B) paper (C) scissors. You choose:\n\nASSISTANT: ",
    ]
    assert list(game.prompts([ROCK], "none")) == [game.FIRST]


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (PAPER, ROCK, (1, 0, 0)),
        (SCISSORS, PAPER, (1, 0, 0)),
        (ROCK, SCISSORS, (1, 0, 0)),
        (ROCK, ROCK, (0, 1, 0)),
        (ROCK, PAPER, (0, 0, 1)),
        (PAPER, SCISSORS, (0, 0, 1)),
        (SCISSORS, ROCK, (0, 0, 1)),
    ],
)
def test_each_move_beats_one_other(mine: int, theirs: int, expected: tuple[int, ...]) -> None:
    assert tuple(vars(game.rates([theirs], [mine])).values()) == expected


def test_constant_policies_score_what_the_table_says() -> None:
    # The rock file's first 2,000 turns: 1000 rock, 621 paper, 379 scissors.
    turns = [ROCK] * 1000 + [PAPER] * 621 + [SCISSORS] * 379
    found = {
        name: [round(100 * share, 2) for share in vars(rate).values()]
        for name, rate in game.constant_policies(turns).items()
    }
    assert found == {
        "always rock": [18.95, 50.0, 31.05],
        "always paper": [50.0, 31.05, 18.95],
        "always scissors": [31.05, 18.95, 50.0],
    }


def test_a_constant_answer_is_flagged_and_never_beats_the_best_constant() -> None:
    turns = game.drawn_turns("paper")
    result = game.report(turns, game.play(turns, Always(SCISSORS)))
    assert result["turns"] == 2000
    assert result["win"] == result["best_constant"] == pytest.approx(0.502, abs=0.04)
    assert (result["constant"], result["beats_constant"]) == (True, False)
    assert result["answers"] == {"A": 0, "B": 0, "C": 1}
    assert game.sentence(result).endswith("the answer never changed, so this says nothing about memory")


def test_an_answer_that_follows_the_player_is_told_from_a_constant_one() -> None:
    turns = [ROCK] * 6 + [PAPER] * 6
    result = game.report(turns, [PAPER] * 6 + [SCISSORS] * 6)
    assert (result["win"], result["best_constant"], result["beats_constant"]) == (1, 0.5, True)
    assert not result["constant"]
    assert game.sentence(result).startswith("12 turns: win 100.00%, tie 0.00%, lose 0.00% (answers A 0%, B 50%, C 50%;")


def test_published_turns_read_and_prefer_their_move() -> None:
    if not SHARED.is_dir():
        pytest.skip("needs the published turns in ../shared/data")
    for move, name in enumerate(game.MOVES):
        path = SHARED / game.FILES[name]
        turns = game.read_turns(read_records(path))
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [game.LETTERS[turn] for turn in turns] == [row["user_choice"] for row in rows]
        assert turns.count(move) / len(turns) == pytest.approx(0.5, abs=0.06)
        assert rows[0]["question"]["stem"] in game.FIRST.replace("Let's play", "Please play")
        assert [option["text"] for option in rows[0]["question"]["choices"]] == [*game.MOVES]
        assert game.read_turns(read_records(path), limit=7) == turns[:7]


def test_bad_turns_name_their_place() -> None:
    good = {"user_choice": "A", "answerKey": "B"}
    rows = [("f:1", good), ("f:2", {"user_choice": "D", "answerKey": "B"}), ("f:3", {**good, "answerKey": "C"})]
    with pytest.raises(BadRow, match="f:2: field 'user_choice' is 'D' where A, B or C is needed"):
        game.read_turns(rows)
    with pytest.raises(BadRow, match="f:3: field 'answerKey' is 'C', which does not beat 'A'"):
        game.read_turns([rows[2]])
    bad: list[BadRow] = []
    assert game.read_turns(rows, on_bad=bad.append) == [ROCK]
    assert [each.reason for each in bad] == ["unknown user_choice", "wrong answerKey"]


def test_impossible_games_are_refused() -> None:
    with pytest.raises(ValueError, match="1 moves for 2 turns"):
        game.rates([ROCK, ROCK], [ROCK])
    with pytest.raises(ValueError, match='dominant="lizard" is no move; choose one of rock, paper, scissors'):
        game.drawn_turns("lizard")
    with pytest.raises(ValueError, match='template="chatml" is unknown; choose one of vicuna, none'):
        list(game.prompts([ROCK], "chatml"))


# --- a model plays ---


def test_a_choice_is_what_three_branches_of_the_same_past_would_choose(model: Any) -> None:
    tokenizer = build_tokenizer()
    turns = [random.Random(3).randrange(3) for _ in range(6)]
    player = ModelPlayer(model, tokenizer, DynamicCache())
    past: list[int] = tokenizer("")["input_ids"]
    for prompt in game.prompts(turns):
        scores = player.choose(prompt)
        branches = []
        for letter in game.LETTERS:
            before = tokenizer(prompt.rstrip(), add_special_tokens=False)["input_ids"]
            ids = tokenizer(f"{prompt.rstrip()} {letter}", add_special_tokens=False)["input_ids"]
            logits = model(input_ids=torch.tensor([past + ids])).logits[0].log_softmax(-1)
            branches.append((logits[len(past) + len(before) - 1, ids[len(before)]].item(), past + ids))
        assert scores == pytest.approx([score for score, _ in branches], abs=1e-4)
        past = max(branches)[1]


def test_a_roomy_bounded_cache_plays_as_the_plain_one(model: Any) -> None:
    tokenizer, turns = build_tokenizer(), game.drawn_turns("rock", 12, seed=1)
    roomy = RetentionPolicy(budget=3000, chunk_size=512, stabilizers=8, local_len=8)
    plain = ModelPlayer(model, tokenizer, DynamicCache())
    bounded = ModelPlayer(model, tokenizer, RetentionCache(model, "random", roomy))
    for prompt in game.prompts(turns):
        assert bounded.choose(prompt) == pytest.approx(plain.choose(prompt), abs=1e-4)
    assert bounded.most_units == plain.most_units > 400


@pytest.mark.parametrize("local_len", [16, 200])  # shorter and longer than a turn
def test_a_session_stays_within_its_budget_over_all_turns(model: Any, local_len: int) -> None:
    policy = RetentionPolicy(budget=96, chunk_size=128, stabilizers=8, local_len=local_len)
    cache = RetentionCache(model, "random", policy)
    player = ModelPlayer(model, build_tokenizer(), cache)
    held = []
    for prompt in game.prompts(game.drawn_turns("scissors", 60)):
        player.choose(prompt)
        held.append((cache.memory().units, cache.memory().actual, cache.next_position))
    assert cache.seen > 60 * 60 > policy.prefill_units
    assert player.most_units <= policy.prefill_units
    assert max(units for units, _, _ in held[30:]) == max(units for units, _, _ in held[5:30])
    assert len({actual for _, actual, _ in held[5:]}) == 1
    assert max(position for _, _, position in held) <= policy.prefill_units


def test_letters_that_share_their_first_token_are_refused(model: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "choose": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    with pytest.raises(ValueError, match="begins two of the letters A, B and C with the same token"):
        ModelPlayer(model, fast, DynamicCache())
