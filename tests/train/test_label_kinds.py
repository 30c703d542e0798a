"""A kind of label is one object: what computes it, trains with it, ranks by it and describes it asks the object."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from training_cases import backbone, loss_of, token_ids, train

from locret import RetainingHeads, labels
from locret.labels.kinds import KINDS
from locret.scorers import RetainingHeadScorer
from locret.train.step import train_step

ATTENTION = labels.LabelKind(
    name="attention",
    meaning="the attention",
    block=lambda logits_KQS, labelled: logits_KQS.softmax(dim=-1)[:, :, :labelled].amax(dim=1),
    whole_rows=True,
    comparable=True,
)
"""What a file of one's own would hold: no kernel, so it is computed from blocks of logits."""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the line that names it."""
    monkeypatch.setitem(KINDS, ATTENTION.name, ATTENTION)


def test_a_kind_of_ones_own_labels_a_prompt() -> None:
    model, row = backbone(), (token_ids(21), token_ids(9, seed=1))
    own, logs = (labels.answer_labels(model, *row, kind) for kind in (ATTENTION, "log_attention"))
    torch.testing.assert_close(own, logs.exp(), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("registered")
def test_a_registered_kind_trains_a_step() -> None:
    assert labels.names() == ["logit", "log_attention", "kvzip_plus", "attention"]
    model, row = backbone(), (token_ids(21), token_ids(9, seed=1))
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=3)
    result = train_step(model, heads, *row, loss_of("attention"))
    logits = train_step(model, heads, *row)
    assert result.total.item() != pytest.approx(logits.total.item())
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in heads.parameters())


@pytest.mark.usefixtures("registered")
def test_the_command_trains_with_a_registered_kind_and_records_it(paths: tuple[Path, Path], tmp_path: Path) -> None:
    assert train(paths, tmp_path / "run", "--steps=1", "--warmup-steps=0", "--label-kind=attention") == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["label"]["kind"] == "attention"
    assert "A token's label is the attention, maximum over" in (tmp_path / "run" / "README.md").read_text()
    heads = RetainingHeads.from_pretrained(tmp_path / "run")
    assert not RetainingHeadScorer(heads=heads).relative(heads)


@pytest.mark.parametrize(
    ("kind", "objective", "relative"),
    [
        ("logit", "regression", True),
        ("log_attention", "regression", False),
        ("log_attention", "ranking, temperature 1.0", True),
        ("from elsewhere", "regression", True),
        (None, "regression", True),
    ],
)
def test_only_a_regression_on_comparable_labels_lets_heads_compete(
    kind: str | None, objective: str, relative: bool
) -> None:
    heads = RetainingHeads.for_model(backbone(), hidden_dim=4, seed=0)
    heads.annotate(label={"kind": kind}, training={"objective": objective})
    assert RetainingHeadScorer(heads=heads).relative(heads) == relative


def test_blocks_see_whole_rows_only_if_they_ask_for_them() -> None:
    seen: list[Tensor] = []

    def block(logits_KQS: Tensor, labelled: int) -> Tensor:
        seen.append(logits_KQS)
        return logits_KQS[:, :, :labelled].amax(dim=1)

    kinds = [labels.LabelKind(name="x", meaning="", block=block, whole_rows=w, comparable=False) for w in (False, True)]
    for kind in kinds:
        labels.answer_labels(backbone(num_hidden_layers=1), token_ids(7), token_ids(3, seed=1), kind)
    assert [logits.shape[-1] for logits in seen] == [7, 10]
    assert seen[1][0, :, 7:].isinf().any()  # the future
