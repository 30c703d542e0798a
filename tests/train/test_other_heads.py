"""Heads of other kinds: what they compute and learn, a record that can be made twice, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from checkpoints.build.other_heads import (
    KINDS,
    ORACLE,
    Kind,
    OtherHeadsOptions,
    RecurrentHead,
    ToldHead,
    _learnt_from,
    command,
    held_attention,
    own_budgets,
)
from locret import RetentionPolicy
from locret.train import retention_loss

SMALL = ["--model", "checkpoints/tiny", "--hidden-dim", "16", "--steps", "3", "--tokens", "300", "--samples", "1"]
SMALL += ["--train-tasks", "multikey,number", "--train-tokens", "300,300", "--tasks", "multikey", "--questions", "2"]


def test_a_recurrent_head_knows_what_came_before_and_nothing_of_what_comes() -> None:
    torch.manual_seed(0)
    head = RecurrentHead(12, 8, 2, initializer_range=0.5, states=4)
    features_DF = torch.randn(9, 12)
    scores_DK = head(features_DF)
    hidden_DR = head.fc1(features_DF)
    state, expected = torch.zeros(1, 1, 4), []
    for hidden_R in hidden_DR:  # token by token, as an engine that holds the state would
        out, state = head.state(hidden_R[None, None], state)
        expected.append(head.fc2(head.activation(hidden_R + head.added(out[0, 0]))))
    torch.testing.assert_close(scores_DK, torch.stack(expected))
    for changed in (0, 5):
        other_DF = features_DF.clone()
        other_DF[changed] += 1
        same = (head(other_DF) == scores_DK).all(dim=-1)
        assert same[:changed].all()
        assert not same[changed:].any()


def test_a_head_that_is_told_the_budget_ranks_otherwise_once_it_has_learnt_to() -> None:
    torch.manual_seed(0)
    told, plain = (
        ToldHead(12, 8, 2, initializer_range=0.5, neighbours=3),
        KINDS["neighbours"].head(12, 8, 2, neighbours=3),
    )
    plain.load_state_dict({name: value for name, value in told.state_dict().items() if name in plain.state_dict()})
    features_DF = torch.randn(9, 12)
    for told.budget in (16, 64, 512):
        assert told(features_DF).equal(plain(features_DF)), "fresh weights ask nothing of it"
    with torch.no_grad():
        told.scaled.normal_()
        told.moved.normal_()
    told.budget = 64
    assert told(features_DF).equal(plain(features_DF))
    orders = []
    for told.budget in (16, 256):
        orders.append(told(features_DF)[:, 0].argsort())
    assert not orders[0].equal(orders[1])


def test_the_boundary_asks_for_the_best_units_and_for_no_order_among_them() -> None:
    labels_KD = torch.tensor([[5.0, 1.0, 4.0, 0.0]])
    kind = Kind(KINDS["token"].head, ranking=False, boundary=True)
    scores_KD = torch.tensor([[2.0, -1.0, 1.0, -2.0]])
    expected = -scores_KD.log_softmax(-1)[0, [0, 2]].mean()
    assert kind.loss(scores_KD, labels_KD, 2) == expected
    assert kind.loss(scores_KD[:, [2, 1, 0, 3]], labels_KD, 2) == expected, "the two best changed places"
    assert kind.loss(scores_KD[:, [1, 0, 2, 3]], labels_KD, 2) > expected
    assert kind.loss(scores_KD, labels_KD, 9) == -scores_KD.log_softmax(-1).mean(), "all of a text with fewer units"
    both = Kind(KINDS["token"].head, boundary=True)
    ranking = KINDS["token"].loss(scores_KD, labels_KD, 2)
    torch.testing.assert_close(both.loss(scores_KD, labels_KD, 2), ranking + expected)


def test_our_own_heads_are_trained_as_the_trainer_trains_them() -> None:
    torch.manual_seed(0)
    scores_LKD, labels_LKD = torch.randn(3, 2, 40), torch.randn(3, 2, 40)
    parts = [KINDS["neighbours"].loss(*layer, 32, 3) for layer in zip(scores_LKD, labels_LKD, strict=True)]
    total, _, _ = retention_loss(scores_LKD, labels_LKD, objective="ranking")
    torch.testing.assert_close(torch.stack(parts).mean(), total)


def test_attention_is_held_against_the_best_that_as_many_units_hold() -> None:
    labels_KD = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]]).log()
    assert held_attention(labels_KD, labels_KD, 2) == pytest.approx(1)
    scores_KD = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    assert held_attention(scores_KD, labels_KD, 2) == pytest.approx((0.4 / 0.9 + 1) / 2)
    assert held_attention(scores_KD, labels_KD, 5) == pytest.approx(1), "all of them"


def test_a_trial_can_be_made_twice_and_holds_kinds_against_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*SMALL, "--kinds", "neighbours,recurrent,boundary+told", "--budget", "24,48"]
    line += ["--layer-shares", "0.5", "0.5", "1", "2.5", "0.5", "--output"]
    records = []
    for name in ("one", "other"):
        assert command([*line, str(tmp_path / name)]) == 0
        records.append(json.loads((tmp_path / name / "other_heads.json").read_text()))
    assert records[0] == records[1]
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("| heads | right @ 24 (%) | more than neighbours | right @ 24+shares (%) |")
    kinds = records[0]["kinds"]
    assert list(kinds) == ["neighbours", "recurrent", "boundary+told", ORACLE]
    for found in kinds.values():
        assert list(found) == ["24", "24+shares", "48", "48+shares"]
    assert all(share == pytest.approx(1) for found in kinds[ORACLE].values() for share in found["held"])
    assert all(0 < share < 1 for share in kinds["neighbours"]["24"]["held"])
    for found in kinds.values():
        assert [(one["task"], one["index"]) for one in found["48"]["right"]] == [("multikey", 0)]
        assert found["24"]["right"][0]["share"] in (0, 0.5, 1)
    assert command([*SMALL, "--seed", "1", "--kinds", "neighbours", "--budget", "24", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"]["neighbours"] != kinds["neighbours"], "other texts and weights"


def test_layers_with_shares_are_told_their_own_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    policy = RetentionPolicy(budget=32)
    assert own_budgets(policy, 3) == [32, 32, 32]
    assert own_budgets(replace(policy, layer_budgets="shares", layer_shares=(0.5, 2, 0.5)), 3) == [17, 63, 16]
    assert own_budgets(replace(policy, budget=2, layer_budgets="shares", layer_shares=(0.1, 8)), 2) == [1, 3]
    with pytest.raises(ValueError, match="layer_shares has 2 numbers for 5 layers"):
        command([*SMALL, "--layer-shares", "0.5", "1.5", "--budget", "24"])


def test_a_loss_that_is_no_number_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--lr 1e\+30: the loss of neighbours is no number any more; lower it"):
        command([*SMALL, "--kinds", "neighbours", "--budget", "24", "--lr", "1e30", "--output", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_written_or_made_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checkpoints.build.other_heads.made", Mock(side_effect=AssertionError))
    (tmp_path / "file").touch()
    with pytest.raises((ValueError, OSError), match="--output .*/file/sub cannot be"):
        command([*SMALL, "--budget", "24", "--output", str(tmp_path / "file/sub")])
    with pytest.raises(ValueError, match="of 2 of multikey does not fit --train-tokens 64"):
        command([*SMALL, "--budget", "24", "--train-tokens", "64"])


def test_texts_that_are_learnt_from_are_others_than_those_that_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def fake(_: Any, task: Any, options: Any) -> Any:
        asked.append((task.name, options.tokens, options.samples, options.seed))
        return iter([(task.name, options.seed, n) for n in range(options.samples)])

    monkeypatch.setattr("checkpoints.build.other_heads.made", fake)
    options = OtherHeadsOptions(train_tasks="multikey,number", train_tokens="256,256,512", steps=10)
    texts = list(_learnt_from(None, options))  # type: ignore[arg-type]
    assert asked == [
        (name, n, 2, seed) for n, seed in ((256, -1), (256, -2), (512, -3)) for name in ("multikey", "number")
    ]
    assert len(texts) == len(set(texts)) == 10
    assert [name for name, _, _ in texts[:4]] == ["multikey", "number"] * 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kinds": "neighbours,transformer"}, "--kinds transformer is unknown; choose of token, neighbours"),
        ({"kinds": " ,"}, "--kinds is empty; choose of token, neighbours"),
        ({"steps": 1}, "--steps 1 leaves no step after the warm-up; give 2 or more"),
        ({"hidden_dim": 0}, "--hidden-dim 0 is no width of a head"),
        ({"hidden_dim": 10**12}, "--hidden-dim 1000000000000 is no width of a head"),
        ({"budget": 0}, "--budget 0, --chunk-size 512, --local-len 32: budget=0 is too small"),
        ({"local_len": -1}, "--local-len -1: local_len=-1"),
        ({"lr": -1.0}, "--lr -1.0 trains nothing"),
        ({"layer_shares": [0.0, 1.0]}, "are no shares; give a number above 0 for every"),
        ({"seed": -1}, "--seed -1 is of texts that are learnt from"),
        ({"tokens": 64}, "hold all of --tokens 64, so nothing is lost"),
        ({"train_tasks": "longbench/qasper"}, "--train-tasks longbench/qasper does not say which questions there are"),
        ({"train_tokens": 0}, "--train-tokens 0 leaves nothing to ask"),
        ({"train_tokens": "some"}, "--train-tokens some is not a list of whole numbers"),
        ({"output": "setup.cfg"}, "--output setup.cfg is a file; name a folder"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        OtherHeadsOptions(**given)
