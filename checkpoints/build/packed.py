"""Many texts in one row of fixed length, for training the embedded backbone on a GPU.

On a GPU a step costs much the same for one short text as for tens of thousands of tokens. So a step there reads one
row filled with texts that do not see each other, FlexAttention leaves out the blocks in which nothing is seen, and
processes beside it make the rows.
"""
# T tokens of the row, F fields of a token, M tokens that bear loss, S blocks of the row, E width, V vocabulary,
# R branches, and texts without any

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention
from torch.utils.data import DataLoader, Dataset
from transformers import AttentionInterface, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.masking_utils import AttentionMaskInterface

from checkpoints.build.batches import Batch, Stage, batches_of
from locret.data.text.filler import generator

NAME = "locret_backbone_packed"
BLOCK = 128
"""Tokens of a block that FlexAttention reads or leaves out."""
EVERYWHERE = 2**30
"""The window of a token that sees all that comes before it."""
_TEXT = -1
"""The branch of a text's own tokens, which all of its branches see."""


@dataclass(frozen=True)
class Row:
    """One row of texts, padded on the right."""

    stage: int
    kinds: tuple[str, ...]
    """What each branch, or each text without branches, is (`Batch.kinds`)."""
    fields_FT: Tensor
    """Int32, of each token: its id, its position id, its text, its branch in the row or -1, how many tokens of its text
    and branch come before it, and the windows in which it sees, in the first layers and in the others."""
    marked_2M: Tensor
    """Int64: places of the tokens to be predicted, and which of `kinds` each belongs to."""
    blocks_4SS: Tensor
    """Bool, for each block which blocks it sees in part, and which as a whole; in the first layers, then in others."""


def pack(batches: Sequence[Batch], tokens: int, *, window: int, skim_window: int) -> Row:
    """Return one row of `tokens` tokens with the first of the texts of `batches` that find room in it.

    Raises:
        ValueError: If the first text finds none.
    """
    rows: list[Tensor] = []
    marked: list[Tensor] = []
    kinds: list[str] = []
    used = 0
    texts = ((batch, *text) for batch in batches for text in _texts(batch))
    for of, ids_T, mask_T, positions_T, branch_T, place_T, names in texts:
        if used + len(ids_T) > tokens:
            break
        near_T = torch.full_like(ids_T, window if of.local else EVERYWHERE)
        far_T = torch.where((branch_T < 0) & of.skim, skim_window, EVERYWHERE)
        own_T = torch.where(branch_T < 0, _TEXT, branch_T + len(kinds))
        text_T = torch.full_like(ids_T, len(rows))
        rows.append(torch.stack([ids_T, positions_T, text_T, own_T, place_T, near_T.minimum(far_T), far_T]))
        places_M = mask_T.nonzero()[:, 0]
        marked.append(torch.stack([places_M + used, branch_T[places_M].clamp(min=0) + len(kinds)]))
        kinds += names
        used += len(ids_T)
    if not rows:
        raise ValueError(f"row_tokens={tokens} has no room for a text of its stages; give more")
    rest = torch.zeros(7, tokens - used, dtype=torch.long)
    rest[2], rest[3], rest[4], rest[5:] = len(rows), _TEXT, torch.arange(tokens - used), 1
    fields_FT = torch.cat([*rows, rest], dim=1)
    _, _, text_T, branch_T, place_T, *windows = fields_FT
    blocks_4SS = torch.cat([_blocks(text_T, branch_T, place_T, window_T) for window_T in windows])
    return Row(batches[0].stage, tuple(kinds), fields_FT.int(), torch.cat(marked, dim=1), blocks_4SS)


def _texts(batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[str]]]:
    """Yield ids, marks, position ids, branches or -1, places (each (T,)) and kinds of each text of a batch."""
    if batch.forks:
        (forks,) = batch.forks
        branch_T = torch.cat([torch.full((forks.text,), _TEXT), forks.branches_F])
        place_T = torch.cat([torch.arange(forks.text), forks.text + forks.places_F])
        yield batch.ids_BT[0], batch.mask_BT[0], batch.positions_1T[0], branch_T, place_T, [*batch.kinds]
        return
    for ids_T, mask_T, kind in zip(batch.ids_BT, batch.mask_BT, batch.kinds, strict=True):
        size = int(mask_T.nonzero()[-1]) + 1  # what comes after is padding, or teaches nothing
        branch_T = torch.full((size,), _TEXT)
        yield ids_T[:size], mask_T[:size], batch.positions_1T[0, :size], branch_T, torch.arange(size), [kind]


class Rows(Dataset[Row]):
    """The row of every step; it depends on seed and step alone."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, stages: Sequence[Stage], seed: int, tokens: int, **windows: int
    ) -> None:
        self._tokenizer, self._stages, self._seed, self._tokens, self._windows = (
            tokenizer, stages, seed, tokens, windows,
        )  # fmt: skip
        self._plan = [index for index, stage in enumerate(stages) for _ in range(stage.steps)]

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, step: int) -> Row:
        index = self._plan[step]
        stage = replace(self._stages[index], batch_tokens=1)  # one text at a time
        rng = generator(self._seed, "train", "backbone", step)
        batches: list[Batch] = []
        room = self._tokens
        while room > 0:
            seed = f"{self._seed}/{step}/{len(batches)}"
            batches += batches_of(rng, self._tokenizer, index, stage, seed)
            room -= batches[-1].ids_BT.shape[1]
        return pack(batches, self._tokens, **self._windows)


class _Attempts(Dataset[Row | ValueError]):
    """Rows, or why there is none: a process of workers would bury the sentence in its traceback."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __getitem__(self, step: int) -> Row | ValueError:
        try:
            return self._rows[step]
        except ValueError as error:
            return error


def _obey_the_parent(_worker: int) -> None:
    # A terminal's ^C reaches workers as well, and what they inherit would say that the run was interrupted once each.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A run that stops while it takes a row leaves the thread that hands it over without a listener.
    sys.excepthook = _shown


def _shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


@contextmanager
def reader(rows: Rows, start: int, workers: int) -> Iterator[Iterator[Row]]:
    """Give the rows from step `start` (counted from 0) on, made by `workers` processes meanwhile; 0 makes them here.

    Raises:
        ValueError: If a row cannot be made.
    """
    processes: dict[str, Any] = {"prefetch_factor": 4, "worker_init_fn": _obey_the_parent} if workers else {}
    steps = range(start, len(rows))
    made: Any = iter(DataLoader(_Attempts(rows), batch_size=None, sampler=steps, num_workers=workers, **processes))

    def checked() -> Iterator[Row]:
        for row in made:
            if isinstance(row, ValueError):
                raise row
            yield row

    try:
        yield checked()
    finally:
        if workers:
            made._shutdown_workers()


class Packed:
    """Reads rows with a model, on its device: gives it the attention of packed texts, and the loss."""

    def __init__(self, model: LlamaForCausalLM, tokens: int, local_layers: int) -> None:
        self._model = model
        model.set_attn_implementation(NAME)
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.sees_near = index < local_layers
            if model.device.type == "cuda":
                layer.compile(dynamic=False)
        # What is seen is read from the same memory at every step: a new tensor might be taken for a new function.
        self._fields_FT = torch.zeros(7, tokens, dtype=torch.int32, device=model.device)
        _, _, text_T, branch_T, place_T, near_T, far_T = self._fields_FT
        self._near, self._far = (_seen(text_T, branch_T, place_T, window_T) for window_T in (near_T, far_T))

    def loss(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean cross-entropy of the marked tokens, and per kind (R,) how many are marked, and right."""
        device = self._model.device
        self._fields_FT.copy_(row.fields_FT, non_blocking=True)
        blocks_4SS = row.blocks_4SS.to(device, non_blocking=True)
        order_4SS = blocks_4SS.int().argsort(dim=-1, descending=True, stable=True).int()
        some, found = blocks_4SS.sum(dim=-1).int()[:, None, None], order_4SS[:, None, None]
        near, far = (
            BlockMask.from_kv_blocks(some[i], found[i], some[i + 1], found[i + 1], BLOCK_SIZE=BLOCK, mask_mod=seen)
            for i, seen in ((0, self._near), (2, self._far))
        )
        places_M, kinds_M = row.marked_2M.to(device, non_blocking=True)
        hidden_TE = self._model.model(
            input_ids=self._fields_FT[:1], position_ids=self._fields_FT[1:2], use_cache=False, blocks=(near, far)
        ).last_hidden_state[0]
        logits_MV = self._model.lm_head(hidden_TE[places_M - 1]).float()
        targets_M = self._fields_FT[0, places_M].long()
        loss = nn.functional.cross_entropy(logits_MV, targets_M)
        none_R = torch.zeros(len(row.kinds), device=device)
        right_M = (logits_MV.detach().argmax(-1) == targets_M).float()
        marked_R = none_R.index_add(0, kinds_M, torch.ones_like(right_M))
        return loss, marked_R, none_R.index_add(0, kinds_M, right_M)


def _seen(text_T: Tensor, branch_T: Tensor, place_T: Tensor, window_T: Tensor) -> Callable[..., Tensor]:
    def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (text_T[query] == text_T[key]) & (query >= key)
        along = (branch_T[key] < 0) | (branch_T[key] == branch_T[query])
        return same & along & (place_T[query] - place_T[key] < window_T[query])

    return seen


def _blocks(text_T: Tensor, branch_T: Tensor, place_T: Tensor, window_T: Tensor) -> Tensor:
    """Return (2, S, S) bool: which blocks each block sees in part, and which as a whole.

    The first are all between the first token that one of its tokens sees and it; branches between them are hidden by
    the look at each token.
    """
    index_T = torch.arange(len(text_T))
    begins_T = torch.diff(text_T, prepend=text_T.new_tensor([-1])) != 0
    begin_T = torch.where(begins_T, index_T, 0).cummax(0).values
    # A branch's window reaches back into its text, whatever branches lie between.
    first_T = begin_T + (place_T - window_T + 1).clamp(min=0)
    split = (-1, BLOCK)
    block_S = torch.arange(len(text_T) // BLOCK)
    before_SS = block_S < block_S[:, None]
    touched_SS = (block_S >= first_T.view(split).min(dim=1).values[:, None] // BLOCK) & (block_S <= block_S[:, None])
    text_S = text_T.view(split)[:, 0]
    alone_S = (text_T.view(split) == text_S[:, None]).all(dim=1)
    sees_all_S = alone_S & (window_T.view(split) >= EVERYWHERE).all(dim=1)
    seen_by_all_S = alone_S & (branch_T.view(split) < 0).all(dim=1)
    whole_SS = before_SS & sees_all_S[:, None] & seen_by_all_S & (text_S == text_S[:, None])
    return torch.stack([touched_SS & ~whole_SS, whole_SS])


_compiled = torch.compile(flex_attention, dynamic=False)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    near, far = kwargs["blocks"]
    mask = near if module.sees_near else far
    if query.is_cuda:
        out = _compiled(query, key, value, block_mask=mask, scale=kwargs["scaling"], enable_gqa=True)
    else:  # FlexAttention has no backward there
        seen_11TT = create_mask(mask.mask_mod, None, None, query.shape[2], key.shape[2], query.device.type)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen_11TT, scale=kwargs["scaling"], enable_gqa=True
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
