"""Labels equal the original implementation's, the dense oracle's, and the logarithm of plain attention."""

from __future__ import annotations

import oracle as reference
import pytest
import torch
from torch import Tensor
from training_cases import CASES, backbone, golden, token_ids

from locret import RetainingHeads
from locret.backbone.adapters import describe
from locret.backbone.chunk import Attended
from locret.labels.labels import answer_labels, layer_labels, observe, prompt_scores


def chunks_of(model: torch.nn.Module, ids: Tensor) -> list[Attended]:
    chunks: list[Attended] = []
    observe(model, ids, chunks.append)
    return chunks


@pytest.mark.parametrize(("case", "labels"), CASES)
def test_labels_are_those_of_the_original(case: str, labels: str) -> None:
    g = golden(case, labels)
    expected = g.outputs[f"labels.{labels}"]
    actual = answer_labels(g.model, g.prompt_ids, g.answer_ids)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("case", "labels"), CASES)
def test_scores_of_one_pass_are_those_of_the_original(case: str, labels: str) -> None:
    g = golden(case, labels)
    expected = g.outputs["full.scores"].transpose(1, 2)
    torch.testing.assert_close(prompt_scores(g.model, g.heads, g.prompt_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("kind", ["logit", "log_attention"])
@pytest.mark.parametrize(("prompt", "answer"), [(1, 1), (1, 5), (7, 1), (13, 11), (23, 4)])
@pytest.mark.parametrize("family", ["llama", "llama-mha"])
def test_any_block_size_gives_the_labels_of_the_oracle(
    family: str, prompt: int, answer: int, kind: str, include_last: bool
) -> None:
    first = prompt - 1 if include_last else prompt
    for chunk in chunks_of(backbone(family), token_ids(prompt + answer)):
        expected = reference.labels(chunk.query[0], chunk.key[0], prompt, first, chunk.scaling, kind)
        for block_elements in (1, 4 * (prompt + answer) * 3, 10**6):  # one row, three rows, all rows at once
            actual = layer_labels(chunk, prompt, kind, include_last, block_elements=block_elements)
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
        cut = layer_labels(chunk, prompt, kind, include_last, labelled=prompt // 2 + 1)
        torch.testing.assert_close(cut, expected[:, : prompt // 2 + 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])  # gemma2: softcap, and a layer without a head
def test_log_attention_is_the_log_of_the_largest_attention_an_answer_token_gives(
    family: str, include_last: bool
) -> None:
    model, prompt_ids, answer_ids = backbone(family), token_ids(21), token_ids(9, seed=1)
    with torch.no_grad():
        attentions = model(torch.cat([prompt_ids, answer_ids], dim=1), output_attentions=True).attentions
    layers = describe(model).layers
    first = 20 if include_last else 21
    expected = torch.stack([attentions[i][0, :, first:, :21].unflatten(0, (2, 2)).amax(dim=(1, 2)) for i in layers])
    actual = answer_labels(model, prompt_ids, answer_ids, "log_attention", include_last)
    assert actual.shape == (len(layers), 2, 21)
    torch.testing.assert_close(actual.exp(), expected, atol=1e-5, rtol=0)


def test_the_last_prompt_token_counts_only_on_request() -> None:
    model, prompt_ids, answer_ids = backbone(), token_ids(12), token_ids(3, seed=1)
    without = answer_labels(model, prompt_ids, answer_ids)
    counted = answer_labels(model, prompt_ids, answer_ids, include_last_prompt_token=True)
    last_as_answer = answer_labels(model, prompt_ids[:, :-1], torch.cat([prompt_ids[:, -1:], answer_ids], dim=1))
    assert (counted >= without).all()
    assert (counted > without).any()
    torch.testing.assert_close(counted[..., :-1], last_as_answer, atol=1e-5, rtol=0)


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("kind", ["logit", "log_attention"])
def test_every_answer_labels_what_stands_before_it(kind: str, include_last: bool) -> None:
    """As one row per answer would, each reading the text up to its answer's end; a token takes the largest label."""
    model, ids = backbone(), token_ids(40)
    answers = [(7, 12), (20, 21), (33, 40)]
    expected = torch.full((3, 2, 33), -torch.inf)
    for first, end in answers:
        labels = answer_labels(model, ids[:, :first], ids[:, first:end], kind, include_last)
        expected[..., :first] = torch.maximum(expected[..., :first], labels)
    actual = answer_labels(model, ids[:, :33], ids[:, 33:], kind, include_last, answers[:2])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert (actual[..., :20] > answer_labels(model, ids[:, :33], ids[:, 33:], kind, include_last)[..., :20]).any()
    chunk = chunks_of(model, ids)[0]
    cut = layer_labels(chunk, 33, kind, include_last, labelled=10, earlier_answers=answers[:2], block_elements=1)
    torch.testing.assert_close(cut, expected[0, :, :10], atol=1e-5, rtol=0)


def test_ids_may_come_with_or_without_a_batch_dimension() -> None:
    model, prompt_ids, answer_ids = backbone(), token_ids(12), token_ids(3, seed=1)
    flat = answer_labels(model, prompt_ids[0], answer_ids[0])
    assert torch.equal(flat, answer_labels(model, prompt_ids, answer_ids))


def test_labels_of_a_bfloat16_backbone_are_computed_in_float32() -> None:
    model = backbone().to(torch.bfloat16)
    chunk = chunks_of(model, token_ids(40))[0]
    expected = reference.labels(chunk.query[0].float(), chunk.key[0].float(), 30, 30, chunk.scaling, "logit")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = layer_labels(chunk, 30, "logit", False)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_a_label_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match='label kind "softmax" is unknown; did you mean logit or log_attention'):
        answer_labels(backbone(), token_ids(4), token_ids(2), kind="softmax")
    with pytest.raises(ValueError, match='label kind "attention" is unknown; did you mean log_attention'):
        answer_labels(backbone(), token_ids(4), token_ids(2), kind="attention")


@pytest.mark.parametrize("bad", [torch.zeros(2, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long)])
def test_more_or_less_than_one_text_is_refused(bad: Tensor) -> None:
    with pytest.raises(ValueError, match=r"answer_ids has shape .*; give the ids of one text"):
        answer_labels(backbone(), token_ids(4), bad)


def test_scores_of_foreign_heads_are_refused() -> None:
    heads = RetainingHeads.for_model(backbone("llama-mha"), hidden_dim=4, seed=0)
    with pytest.raises(ValueError, match="num_key_value_heads is 4 in the heads and 2 in the model"):
        prompt_scores(backbone(), heads, token_ids(4))
