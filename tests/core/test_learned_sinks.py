"""Learned sinks take their share of every softmax: in all ways of attending, in scores and labels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle as reference
import pytest
import torch
from chunks import make_chunk
from families import build, prompt

from locret.backbone.attention import MaskMemo, Recalled, View, attend
from locret.backbone.chunk import Attended
from locret.labels.labels import layer_labels, observe
from locret.scorers.attention_rows import attention_sums

SINKS = torch.tensor([0.7, -1.2, 2.5, 0.1])


def tensors(new: int, slots: int, batch: int = 1) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(new * 100 + slots)
    shapes = ((batch, 4, new, 8), (batch, 2, slots, 8), (batch, 2, slots, 8))
    return tuple(torch.randn(shape, generator=g) for shape in shapes)


def with_sinks(query: torch.Tensor, view: View, **options: Any) -> torch.Tensor:
    return attend(query, view, scaling=0.3, memo=MaskMemo(), sinks=SINKS, **options)


@pytest.mark.parametrize(("new", "slots"), [(1, 37), (300, 333)])
def test_plain_attention_equals_the_oracle(new: int, slots: int) -> None:
    query, key, value = tensors(new, slots)
    out = with_sinks(query, View(key, value))
    torch.testing.assert_close(out[0], reference.attend(query[0], key[0], value[0], 0.3, SINKS), atol=1e-5, rtol=0)
    assert (out - attend(query, View(key, value), scaling=0.3, memo=MaskMemo())).abs().max() > 0.01


def test_heads_with_different_numbers_of_units_keep_their_own_sinks() -> None:
    query, key, value = tensors(3, 20)
    segments = [[slice(0, 12), slice(12, 20)]]
    out = with_sinks(query, View(key[:, :1], value[:, :1], segments=segments))
    for head, span in enumerate(segments[0]):
        own = slice(2 * head, 2 * head + 2)
        alone = reference.attend(query[0, own], key[0, :1, span], value[0, :1, span], 0.3, SINKS[own])
        torch.testing.assert_close(out[0, own], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_recalled_units_share_one_softmax_with_the_sink(shared: bool) -> None:
    query, key, value = tensors(5, 20)
    g = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(1, 2, 1 if shared else 5, 7, 8, generator=g) for _ in range(2))
    out = with_sinks(query, View(key, value, recalled=Recalled(keys, values, None)))
    for n in range(4):
        for i in range(5):
            far, of = n // 2, 0 if shared else i
            seen = 20 - 5 + i + 1
            all_keys = torch.cat([keys[0, far, of], key[0, n // 2, :seen]])[None]
            all_values = torch.cat([values[0, far, of], value[0, n // 2, :seen]])[None]
            alone = reference.attend(query[0, n : n + 1, i : i + 1], all_keys, all_values, 0.3, SINKS[n : n + 1])
            torch.testing.assert_close(out[0, n, i], alone[0, 0], atol=1e-5, rtol=0)


def test_scorers_read_attention_of_which_the_sink_has_its_share() -> None:
    query, key, _ = tensors(7, 20)
    chunk = make_chunk(query, key, 0.3)
    plain, sunk = attention_sums(chunk), attention_sums(replace(chunk, learned_sinks=SINKS))
    expected = torch.zeros(4, 20)
    for n in range(4):
        for i in range(7):
            seen = 20 - 7 + i + 1
            row = torch.cat([key[0, n // 2, :seen] @ query[0, n, i] * 0.3, SINKS[n : n + 1]])
            expected[n, :seen] += row.softmax(0)[:-1]
    torch.testing.assert_close(sunk[0], expected, atol=1e-5, rtol=0)
    assert (plain.sum(-1) - 7).abs().max() < 1e-4
    assert (sunk.sum(-1) < 7).all()


def test_labels_of_gpt_oss_equal_the_oracle() -> None:
    model, ids, found = build("gpt-oss"), prompt(40), {}

    def on_layer(chunk: Attended) -> None:
        assert chunk.learned_sinks is not None
        ours, sinks = layer_labels(chunk, 30, "log_attention", False), chunk.learned_sinks.detach()
        theirs = reference.labels(chunk.query[0], chunk.key[0], 30, 30, chunk.scaling, "log_attention", sinks)
        found[chunk.layer_idx] = (ours - theirs).abs().max().item()

    observe(model, ids, on_layer)
    assert list(found) == [1]
    assert max(found.values()) < 1e-4
