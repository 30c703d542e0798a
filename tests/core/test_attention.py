"""Attention of new tokens over a cache equals the per-token oracle, whichever kernel it takes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import oracle as reference
import pytest
import torch
from families import build, prompt

from locret.backbone import attention
from locret.backbone.attention import MaskMemo, Recalled, View, attend, flash_attend, flash_covers
from locret.backbone.chunk import Attended
from locret.labels.labels import layer_labels, observe

SINKS = torch.tensor([0.7, -1.2, 2.5, 0.1])
LEARNED = pytest.mark.parametrize("sinks", [None, SINKS])


def tensors(new: int, slots: int, heads: int = 4, kv_heads: int = 2) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(new * 100 + slots)
    shapes = ((1, heads, new, 8), (1, kv_heads, slots, 8), (1, kv_heads, slots, 8))
    return tuple(torch.randn(shape, generator=g) for shape in shapes)


@LEARNED
@pytest.mark.parametrize(("new", "slots"), [(1, 37), (300, 333), (1, 1), (5, 5), (5, 6), (7, 41)])
@pytest.mark.parametrize("kv_heads", [2, 1, 4])
def test_attention_equals_the_oracle(new: int, slots: int, kv_heads: int, sinks: torch.Tensor | None) -> None:
    query, key, value = tensors(new, slots, kv_heads=kv_heads)
    out = attend(query, View(key, value), scaling=0.3, memo=MaskMemo(), sinks=sinks)
    torch.testing.assert_close(out[0], reference.attend(query[0], key[0], value[0], 0.3, sinks), atol=1e-5, rtol=0)


@LEARNED
@pytest.mark.parametrize("shared", [True, False])
def test_recalled_units_share_one_softmax_with_the_others(shared: bool, sinks: torch.Tensor | None) -> None:
    query, key, value = tensors(5, 20)
    g = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(1, 2, 1 if shared else 5, 7, 8, generator=g) for _ in range(2))
    view = View(key, value, recalled=Recalled(keys, values, None))
    out = attend(query, view, scaling=0.3, memo=MaskMemo(), sinks=sinks)
    for n, i in ((n, i) for n in range(4) for i in range(5)):
        far, of, seen = n // 2, 0 if shared else i, 20 - 5 + i + 1
        all_keys = torch.cat([keys[0, far, of], key[0, far, :seen]])[None]
        all_values = torch.cat([values[0, far, of], value[0, far, :seen]])[None]
        its = None if sinks is None else sinks[n : n + 1]
        alone = reference.attend(query[0, n : n + 1, i : i + 1], all_keys, all_values, 0.3, its)
        torch.testing.assert_close(out[0, n, i], alone[0, 0], atol=1e-5, rtol=0)


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


@pytest.mark.parametrize("row_start", [None, torch.tensor([0, 20])])
@pytest.mark.parametrize("window", [None, 30])
def test_a_chunk_in_blocks_of_rows_attends_as_one(
    monkeypatch: pytest.MonkeyPatch, window: int | None, row_start: torch.Tensor | None
) -> None:
    query, key, value = (tensor.repeat(2, 1, 1, 1) for tensor in tensors(150, 211))
    settings, view = {"scaling": 0.3, "window": window}, View(key, value, row_start)
    whole = attend(query, view, memo=MaskMemo(), **settings)
    monkeypatch.setattr(attention, "ROWS", 64)
    torch.testing.assert_close(attend(query, view, memo=MaskMemo(), **settings), whole, atol=1e-5, rtol=0)


@LEARNED
@pytest.mark.parametrize(("new", "slots", "window"), [(1, 9, 4), (6, 20, 4), (6, 6, None), (3, 5, 50)])
def test_flash_attn_is_asked_for_what_torch_computes(
    monkeypatch: pytest.MonkeyPatch, new: int, slots: int, window: int | None, sinks: torch.Tensor | None
) -> None:
    """The package needs a card, so what its documentation says stands in for it; tests/gpu has the real one."""

    def documented(q, k, v, *, softmax_scale, causal, window_size, softcap, return_attn_probs=False):
        logits = torch.einsum("bind,bjnd->bnij", q, k.repeat_interleave(2, 2)) * softmax_scale
        logits = torch.tanh(logits / softcap) * softcap if softcap else logits
        apart = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
        hidden = (apart > 0) | ((apart < -window_size[0]) if window_size[0] >= 0 else False)
        logits = logits.masked_fill(hidden, -torch.inf)
        out = torch.einsum("bnij,bjnd->bind", logits.softmax(-1), v.repeat_interleave(2, 2))
        return (out, logits.logsumexp(-1), None) if return_attn_probs else out

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_func=documented))
    query, key, value = tensors(new, slots)
    how = {"scaling": 0.3, "memo": MaskMemo(), "softcap": 2.0, "window": window, "sinks": sinks}
    view = View(key, value)
    assert flash_covers(view)
    assert not flash_covers(View(key, value, segments=[[slice(0, 1)]]))
    torch.testing.assert_close(flash_attend(query, view, **how), attend(query, view, **how))
