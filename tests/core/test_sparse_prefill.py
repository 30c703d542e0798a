"""Sparse prefill attention: the fast paths agree with the oracle, and what is not skipped is dense attention."""

from __future__ import annotations

import pytest
import torch
from oracle import sparse_prefill as oracle
from torch import Tensor

from locret.backbone.attention import MaskMemo, View, attend
from locret.prefill_attention import AShape, BlockSparse, PrefillAttention, VerticalSlash, XAttention
from locret.prefill_attention.blocked import SparseAttention, by_flex, by_gathering, chosen_slots

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
    chosen, rows = chosen_slots([pattern], query[None], key, SCALING, softcap)
    for attended in (by_gathering, by_flex):
        got = attended(query[None], key, value, chosen, rows, SCALING, softcap)[0]
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


def test_each_head_of_a_group_has_its_own_pattern() -> None:
    new, slots, names = 80, 300, ["a_shape", "vertical_slash", "block_sparse", "a_shape"]
    random = torch.Generator().manual_seed(2)
    query = torch.randn(1, 4, new, DIM, generator=random)
    key, value = (torch.randn(1, 2, slots, DIM, generator=random) for _ in range(2))
    got = SparseAttention([PATTERNS[name] for name in names])(query, View(key, value), SCALING, None)
    for head, name in enumerate(names):
        own = query[0, head], key[0, head // 2], value[0, head // 2]
        mask = oracle_mask(PATTERNS[name], own[0], own[1], None)
        torch.testing.assert_close(got[0, head], oracle.masked_attention(*own, mask, SCALING), atol=2e-6, rtol=1e-5)
