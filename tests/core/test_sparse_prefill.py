"""Sparse prefill attention agrees with the oracle, alone and in a read; files of patterns are refused or used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import build, prompt
from oracle import sparse_prefill as oracle
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, prefill, prefill_attention
from locret.backbone.attention import MaskMemo, View, attend
from locret.prefill_attention import AShape, BlockSparse, PrefillAttention, VerticalSlash, XAttention
from locret.prefill_attention.blocked import SparseAttention

SCALING, DIM = 0.4, 8
PATTERNS: dict[str, PrefillAttention] = {
    "a_shape": AShape(sinks=5, window=70),
    "vertical_slash": VerticalSlash(vertical=34, slash=104),
    "block_sparse": BlockSparse(blocks=2),
    "xattention": XAttention(threshold=0.6, stride=4, block=16),
}
LENGTHS = [(65, 200), (1, 150), (63, 300), (64, 64), (64, 321), (130, 131), (150, 437)]
"""New tokens and slots: a block less or more one, an empty cache in front, and one of any length."""


def states(new: int, slots: int, seed: int = 0, heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, DIM, generator=random) for n in (new * heads, slots, slots))  # type: ignore[return-value]


def oracle_mask(pattern: PrefillAttention, query: Tensor, key: Tensor, softcap: float | None) -> Tensor:
    if isinstance(pattern, AShape):
        return oracle.a_shape(len(query), len(key), pattern.sinks, pattern.window)
    if isinstance(pattern, VerticalSlash):
        return oracle.vertical_slash(query, key, pattern.vertical, pattern.slash, SCALING, softcap)
    if isinstance(pattern, BlockSparse):
        return oracle.block_sparse(query, key, pattern.blocks)
    assert isinstance(pattern, XAttention)
    return oracle.xattention(query, key, pattern.threshold, pattern.stride, pattern.block, SCALING, softcap)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("new", "slots"), LENGTHS)
@pytest.mark.parametrize("name", PATTERNS)
def test_blocked_attention_agrees_with_the_oracle(name: str, new: int, slots: int, softcap: float | None) -> None:
    pattern, (query, key, value) = PATTERNS[name], states(new, slots)
    mask = oracle_mask(pattern, query, key, softcap)
    expected = oracle.masked_attention(query, key, value, mask, SCALING, softcap)
    query, key, value = (one[None, None] for one in (query, key, value))
    got = SparseAttention([pattern])(query, View(key, value), SCALING, softcap)[0, 0]
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "pattern",
    [
        AShape(sinks=0, window=448),
        VerticalSlash(vertical=448, slash=0),
        VerticalSlash(vertical=0, slash=448),
        BlockSparse(blocks=8),
        XAttention(threshold=0.999999, stride=4, block=32),
    ],
)
@pytest.mark.parametrize("kind", ["rows", "padded", "ragged"])
def test_a_pattern_that_selects_everything_is_dense_attention(pattern: PrefillAttention, kind: str) -> None:
    new, slots = 70, 449
    random = torch.Generator().manual_seed(1)
    query = torch.randn(2, 4, new, DIM, generator=random)
    key, value = (torch.randn(2, 2, slots, DIM, generator=random) for _ in range(2))
    view = View(key, value)
    if kind == "padded":
        view = View(key, value, row_start=torch.tensor([0, 40]))
    if kind == "ragged":
        counts = [[300, 149], [200, 249]]
        spans = [[slice(0, first), slice(first, first + second)] for first, second in counts]
        view = View(key[:, :1], value[:, :1], segments=spans)
    dense = attend(query, view, scaling=SCALING, memo=MaskMemo())
    assert not pattern.covers(slots)
    sparse = SparseAttention([pattern] * 4)(query, view, SCALING, None)
    torch.testing.assert_close(sparse, dense, atol=2e-6, rtol=1e-5)


SMALL = {"chunk_size": 96, "stabilizers": 16, "local_len": 20}


def test_a_read_agrees_with_the_plain_backbone_under_the_oracles_mask() -> None:
    model, ids, sinks, window = build("llama"), prompt(300), 5, 70
    policy = RetentionPolicy(budget=300, **SMALL, prefill_attention=f"a_shape:sinks={sinks},window={window}")
    got = prefill(model, ids, RetentionCache(model, "random", policy))
    seen = torch.ones(300, 300, dtype=torch.bool).tril()
    for start, end in ((0, 96), (96, 192), (192, 280)):  # the chunks; the local tokens see everything
        seen[start:end, :end] &= oracle.a_shape(end - start, end, sinks, window)
    mask = torch.zeros(300, 300).masked_fill(~seen, -torch.inf)[None, None]
    with torch.no_grad():
        expected, dense = model(ids, attention_mask=mask).logits[:, -1], model(ids).logits[:, -1]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert (expected - dense).abs().max() > 1e-2


# -- patterns per head ------------------------------------------------------------------------------------------------


def test_patterns_of_a_file_serve_the_heads_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "patterns.json"
    heads = {
        "0": ["stream_llm", 4, 60, 0.9],
        "1": ["vertical_and_slash", 40, 50, 0.9],
        "3": ["block_sparse", 2, 1, 0.9],
    }
    file.write_text(json.dumps([heads, {}, {"2": ["stream_llm", 0, 50]}]))
    strategy = prefill_attention.get(f"minference:patterns={file},vertical=30,slash=80")
    assert strategy is not None
    usual = VerticalSlash(vertical=30, slash=80)
    found = strategy.by_head(RetentionCache(build("llama"), "random").backbone)
    assert found[0] == [AShape(sinks=4, window=60), VerticalSlash(vertical=40, slash=50), usual, BlockSparse(blocks=2)]
    assert found[1] == [usual] * 4
    assert found[2] == [usual, usual, AShape(sinks=0, window=50), usual]
    policy = RetentionPolicy(budget=120, **SMALL, prefill_attention=f"minference:patterns={file}")
    cache = RetentionCache(build("llama"), "random", policy)
    assert prefill(cache.model, prompt(300), cache).isfinite().all()


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("[]", "has 0 layers, but the backbone has 3"),
        ('[{"a": ["stream_llm", 1, 1, 0]}]', "is no list of layers with .* by head .layer 0: invalid literal"),
        ('[{}, {"0": ["strem_llm", 1, 1, 0]}]', "is no list of layers with .stream_llm or .* .layer 1: 'strem_llm'"),
        ('[{"0": ["stream_llm", 1.5, 1, 0]}]', "sinks=1.5 is not a whole number"),
        ('[{"0": ["stream_llm", 1, 1, 0], "0": ["stream_llm", 1, 1, 0]}]', "twice"),
        ("[{}]", "has 1 layers, but the backbone has 3"),
        ('[{}, {}, {"4": ["stream_llm", 1, 1, 0]}]', "has a head 4 in layer 2, but the backbone has 4 heads"),
    ],
)
def test_a_file_of_patterns_is_refused_before_anything_is_read(tmp_path: Path, text: str, about: str) -> None:
    file = tmp_path / "patterns.json"
    file.write_text(text)
    model = build("llama")
    policy = RetentionPolicy(budget=120, **SMALL, prefill_attention=f"minference:patterns={file}")
    cache = RetentionCache(model, "random", policy)
    with pytest.raises(ValueError, match=about):
        prefill(model, prompt(300), cache)
    assert cache.seen == 0
    cache.check_whole()


@pytest.mark.parametrize(
    ("spec", "about"),
    [
        ("xattention:treshold=0.9", "did you mean threshold"),
        ("xattention:threshold=0", "threshold=0 is not a share"),
        ("xattention:stride=7", "stride=7 does not divide block=128"),
        ("dense:threshold=1", "dense has no options"),
        ("", "not NAME"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_with_the_policy(spec: str, about: str) -> None:
    with pytest.raises(ValueError, match=about):
        RetentionPolicy(prefill_attention=spec)
