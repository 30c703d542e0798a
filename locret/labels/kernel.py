"""Labels without logits in memory: Triton kernels that keep a running maximum in registers. Needs triton.

One program of `_largest_logit` holds a block of keys and walks over all queries of its KV head, so keys are read once
and nothing but the labels is written. Relative labels first need every query's log-sum-exp over the keys it sees;
`_log_sum_exp` finds it in one walk, as flash attention does. Their slow twin is `layer_labels(fused=False)`.

Products are accumulated in float32 from operands as they are, so labels differ from the twin's by rounding alone.
"""
# K KV heads, N query heads, G = N / K, S prompt and answer tokens, T labelled tokens, R queries, D head dim

from __future__ import annotations

import warnings
from functools import cache

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor


def raise_labels(
    query_NSD: Tensor,
    key_KSD: Tensor,
    labels_KT: Tensor,
    *,
    start: int,
    end: int,
    scaling: float,
    softcap: float | None,
    relative: bool,
) -> None:
    """Raise each label, in place, to the largest that the queries at positions `start` to `end` - 1 give its token."""
    heads, rows, dim = query_NSD.shape[0], end - start, query_NSD.shape[2]
    kv_heads, labelled = labels_KT.shape
    if not labelled or rows <= 0:
        return
    wide = torch.promote_types(query_NSD.dtype, key_KSD.dtype)
    query_NSD, key_KSD = query_NSD.to(wide), key_KSD.to(wide)
    shape = {**tiles(dim, wide.itemsize), "SOFTCAP": softcap is not None}
    numbers = (start, rows, scaling, softcap or 1.0, heads // kv_heads)
    strides = (*query_NSD.stride(), *key_KSD.stride())
    totals_NR = labels_KT.new_empty((heads, rows) if relative else (1, 1))
    row_blocks, token_blocks = (triton.cdiv(count, shape["BLOCK"]) for count in (rows, labelled))
    tensors = query_NSD, key_KSD, totals_NR
    with torch.cuda.device_of(key_KSD):  # triton launches on the current device, wherever the tensors are
        if relative:
            _log_sum_exp[(heads, row_blocks)](*tensors, *numbers, *strides, **shape)
        held = labels_KT, labelled, *numbers, *strides, *labels_KT.stride()
        _largest_logit[(kv_heads, token_blocks)](*tensors, *held, **shape, RELATIVE=relative)


@cache
def works(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Return whether the kernels compile and run here; if not, warn once and say why."""
    query, labels = torch.zeros(1, 2, dim, dtype=dtype, device=device), torch.zeros(1, 1, device=device)
    try:
        for relative in (False, True):
            raise_labels(query, query, labels, start=1, end=2, scaling=1.0, softcap=None, relative=relative)
    except Exception as error:  # a missing compiler, an old card, a head too wide for it: triton raises many kinds
        warnings.warn(f"labels are computed without Triton kernels, which fail here: {error}", stacklevel=2)
        return False
    return True


def tiles(dim: int, itemsize: int) -> dict[str, int]:
    """Return the sizes that kernels are compiled for.

    A tile of keys and those of queries that are on their way fit in the 99 KiB of a consumer card.
    """
    dim_block = max(16, triton.next_power_of_2(dim))
    row = dim_block * itemsize
    return {
        "DIM": dim,
        "DIM_BLOCK": dim_block,
        "BLOCK": 64 if row <= 256 else 32 if row <= 512 else 16,
        "num_stages": 2,
    }


_NOT_SPECIALISED = ["start", "rows", "labelled"]
"""Every text has other lengths; none is worth compiling for."""


@triton.jit(do_not_specialize=_NOT_SPECIALISED)  # type: ignore
def _log_sum_exp(  # type: ignore
    query,
    key,
    totals,
    start,
    rows,
    scaling,
    softcap,
    group,
    query_head_stride,
    query_token_stride,
    query_dim_stride,
    key_head_stride,
    key_token_stride,
    key_dim_stride,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Write the log-sum-exp of one block of one head's queries over the tokens up to each query's own."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = start + row
    dim = tl.arange(0, DIM_BLOCK)
    asked = query + head * query_head_stride + place.to(tl.int64)[:, None] * query_token_stride
    queries = tl.load(
        asked + dim[None, :] * query_dim_stride, mask=(row < rows)[:, None] & (dim < DIM)[None, :], other=0.0
    )
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    seen = start + tl.minimum(rows, (tl.program_id(1) + 1) * BLOCK)  # by the last query of the block
    for first in range(0, seen, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        given = key + (head // group) * key_head_stride + slot.to(tl.int64)[:, None] * key_token_stride
        keys = tl.load(
            given + dim[None, :] * key_dim_stride, mask=(slot < seen)[:, None] & (dim < DIM)[None, :], other=0.0
        )
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
        if SOFTCAP:
            logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))  # softcap * tanh
        logits = tl.where(slot[None, :] <= place[:, None], logits, -float("inf"))
        larger = tl.maximum(largest, tl.max(logits, 1))  # finite from the first block on: all see token 0
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logits - larger[:, None]), 1)
        largest = larger
    tl.store(totals + head * rows + row, largest + tl.log(total), mask=row < rows)


@triton.jit(do_not_specialize=_NOT_SPECIALISED)  # type: ignore
def _largest_logit(  # type: ignore
    query,
    key,
    totals,
    labels,
    labelled,
    start,
    rows,
    scaling,
    softcap,
    group,
    query_head_stride,
    query_token_stride,
    query_dim_stride,
    key_head_stride,
    key_token_stride,
    key_dim_stride,
    label_head_stride,
    label_token_stride,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    """Raise the labels of one block of one KV head's tokens over all queries of its group."""
    kv_head = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM_BLOCK)
    given = key + kv_head * key_head_stride + slot.to(tl.int64)[:, None] * key_token_stride
    keys = tl.load(
        given + dim[None, :] * key_dim_stride, mask=(slot < labelled)[:, None] & (dim < DIM)[None, :], other=0.0
    )
    held = labels + kv_head * label_head_stride + slot.to(tl.int64) * label_token_stride
    best = tl.load(held, mask=slot < labelled, other=-float("inf"))
    for first in range(0, group * rows, BLOCK):
        asking = first + tl.arange(0, BLOCK)  # head by head of the group, each with all its rows
        head, row = kv_head * group + asking // rows, asking % rows
        asked = query + head[:, None] * query_head_stride + (start + row).to(tl.int64)[:, None] * query_token_stride
        real = asking < group * rows
        queries = tl.load(asked + dim[None, :] * query_dim_stride, mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
        if SOFTCAP:
            logits = softcap * (1.0 - 2.0 / (tl.exp(2.0 * logits / softcap) + 1.0))
        if RELATIVE:
            logits -= tl.load(totals + head * rows + row, mask=real, other=0.0)[:, None]
        best = tl.maximum(best, tl.max(tl.where(real[:, None], logits, -float("inf")), 0))
    tl.store(held, best, mask=slot < labelled)
