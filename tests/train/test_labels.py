"""Labels equal the original implementation's, the dense oracle's, and the logarithm of plain attention."""

from __future__ import annotations

import json
from pathlib import Path

import oracle as reference
import pytest
import torch
from training_cases import CASES, backbone, golden, loss_of, token_ids, train

from locret import RetainingHeads, labels
from locret.backbone.adapters import describe
from locret.backbone.chunk import Attended
from locret.labels.kinds import KINDS
from locret.labels.labels import answer_labels, layer_labels, observe, prompt_scores
from locret.scorers import RetainingHeadScorer
from locret.train.step import train_step


@pytest.mark.parametrize(("case", "labels"), CASES)
def test_labels_and_scores_are_those_of_the_original(case: str, labels: str) -> None:
    g = golden(case, labels)
    expected = g.outputs[f"labels.{labels}"]
    actual = answer_labels(g.model, g.prompt_ids, g.answer_ids)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    expected = g.outputs["full.scores"].transpose(1, 2)
    torch.testing.assert_close(prompt_scores(g.model, g.heads, g.prompt_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("kind", ["logit", "log_attention"])
@pytest.mark.parametrize(("family", "prompt", "answer"), [("llama", 1, 1), ("llama-mha", 13, 11)])
def test_any_block_size_gives_the_labels_of_the_oracle(
    family: str, prompt: int, answer: int, kind: str, include_last: bool
) -> None:
    first = prompt - 1 if include_last else prompt
    chunks: list[Attended] = []
    observe(backbone(family), token_ids(prompt + answer), chunks.append)
    for chunk in chunks:
        expected = reference.labels(chunk.query[0], chunk.key[0], prompt, first, chunk.scaling, kind)
        for block_elements in (1, 4 * (prompt + answer) * 3, 10**6):  # one row, three rows, all rows at once
            actual = layer_labels(chunk, prompt, kind, include_last, block_elements=block_elements)
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
        cut = layer_labels(chunk, prompt, kind, include_last, labelled=prompt // 2 + 1)
        torch.testing.assert_close(cut, expected[:, : prompt // 2 + 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])  # gemma2: softcap, and a layer without a head
def test_log_attention_is_the_log_of_the_most_attention_an_answer_token_gives(family: str, include_last: bool) -> None:
    model, prompt_ids, answer_ids = backbone(family), token_ids(21), token_ids(9, seed=1)
    with torch.no_grad():
        attentions = model(torch.cat([prompt_ids, answer_ids], dim=1), output_attentions=True).attentions
    layers = describe(model).layers
    first = 20 if include_last else 21
    expected = torch.stack([attentions[i][0, :, first:, :21].unflatten(0, (2, 2)).amax(dim=(1, 2)) for i in layers])
    actual = answer_labels(model, prompt_ids, answer_ids, "log_attention", include_last)
    assert actual.shape == (len(layers), 2, 21)
    torch.testing.assert_close(actual.exp(), expected, atol=1e-5, rtol=0)


# -- kinds of labels: one object each --------------------------------------------------------------------------------

ATTENTION = labels.LabelKind(
    name="attention",
    meaning="the attention",
    block=lambda logits_KQS, labelled: logits_KQS.softmax(dim=-1)[:, :, :labelled].amax(dim=1),
    whole_rows=True,
    comparable=True,
)
"""What a file of one's own would hold: no kernel, so it is computed from blocks of logits."""


def test_a_kind_of_ones_own_labels_trains_and_is_recorded(
    paths: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, row = backbone(), (token_ids(21), token_ids(9, seed=1))
    own, logs = (answer_labels(model, *row, kind) for kind in (ATTENTION, "log_attention"))
    torch.testing.assert_close(own, logs.exp(), atol=1e-5, rtol=0)
    monkeypatch.setitem(KINDS, ATTENTION.name, ATTENTION)
    assert labels.names() == ["logit", "log_attention", "attention"]
    heads = RetainingHeads.for_model(model, hidden_dim=12, seed=3)
    assert train_step(model, heads, *row, loss_of("attention")).total != train_step(model, heads, *row).total
    assert train(paths, tmp_path / "run", "--steps=1", "--warmup-steps=0", "--label-kind=attention") == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["label"]["kind"] == "attention"
    assert "A token's label is the attention, maximum over" in (tmp_path / "run" / "README.md").read_text()


@pytest.mark.parametrize(
    ("kind", "objective", "relative"),
    [
        ("logit", "regression", True),
        ("log_attention", "regression", False),
        ("log_attention", "ranking, temperature 1.0", True),
    ],
)
def test_only_a_regression_on_comparable_labels_lets_heads_compete(
    kind: str | None, objective: str, relative: bool
) -> None:
    heads = RetainingHeads.for_model(backbone(), hidden_dim=4, seed=0)
    heads.annotate(label={"kind": kind}, training={"objective": objective})
    assert RetainingHeadScorer(heads=heads).relative(heads) == relative
