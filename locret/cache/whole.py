"""A cache as a whole: rows, copies and files, each a loop over all holders."""

# B batch, L new tokens, E hidden size

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locret.backbone.adapters import attention_modules, compute_dtype, device_of, input_device
from locret.cache.checks import check_scores
from locret.cache.digest import shortened
from locret.cache.layer import HOST, RetentionLayer
from locret.cache.limits import Limits
from locret.cache.sliding import SlidingLayer
from locret.cache.states import STATES
from locret.cache.transformers_cache import TransformersCache
from locret.cache.units import Units, Workspace
from locret.policy.protection import Rows, spans_data, spans_from

if TYPE_CHECKING:
    from typing_extensions import Self

_PER_ROW = {
    "rows.pad": "pad",
    "rows._shift": "shift",
    "rows.last_tokens": "last_tokens",
    "rows._context": "newest_hidden",
    "rows.digest": "digest",
}
"""Tensors with a row per row of the batch: names in a file, and here."""
_COUNTERS = ("seen", "held_back", "fed_again", "next_position", "text_end")
_STATES = re.compile(r"(\.|_)(keys|values|queries)$|\.conv\.\d+$|^rows\._context$")
"""What the backbone computes in its own dtype, unless it is held in codes."""


class Whole(TransformersCache):
    """What a cache holds of the texts that it has read, whatever was chosen to stay."""

    model: Any
    scorer: Any
    workspace: Workspace
    """Memory that the layers share."""
    limits: Limits
    """How many units of which layer stay."""
    next_position = 0
    """Rotary position of the coming token: how far positions reach."""
    text_end = 0
    """Tokens up to where the last text that was read ends, padding included; what follows it are turns."""
    last_tokens: Tensor | None = None
    """(B, 1) the prompt's last token, while it is the newest unit."""
    held_back = False
    """Whether `last_tokens` is still to be fed."""
    fed_again = False
    """Whether it has been fed before."""
    newest_hidden: Tensor | None = None
    """(B, 1 or 2, E) hidden states of the newest tokens, for a scorer that rates tokens."""
    pad: Tensor | None = None
    """(B,) left padding of each row, where rows differ."""
    shift: Tensor | None = None
    """(B,) by how much rotary positions of each row lag behind `next_position`, where rows differ."""
    digest: Tensor | None = None
    """(B,) fingerprint of the token ids that were read; None where they are unknown."""
    protected: Rows = ()
    """Spans that stay whatever their scores, of each row or of all rows alike; see `RetentionCache.protect`."""
    suspect: Tensor | None = None
    """Whether a scorer may have returned NaN or infinity; looked at where the cache is used next."""
    watch: Any = None
    """What looks at the attention of the answer in progress, if anybody wants to know."""
    _slots: list[int]
    """Most slots that each full-attention layer has had."""
    _second_slots: list[int]
    """The same of its second tier."""
    _interrupted = False
    _peak = 0

    def holders(self) -> Iterator[tuple[int, str, Units]]:
        """Yield all that holds anything, with its layer and what its tensors' names begin with in a file."""
        for index, layer in enumerate(self.layers):
            for name, holder in layer.holders.items():
                yield index, f"layers.{index}.{name}", holder
            if index in self.carriers:
                yield index, f"layers.{index}.{STATES}", self.carriers[index]

    @property
    def governed(self) -> list[RetentionLayer]:
        """The layers of full attention, whose units compete for the budget."""
        return [layer for layer in self.layers if isinstance(layer, RetentionLayer)]

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return max((holder.batch for _, _, holder in self.holders()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers on the backbone's devices."""
        return self.workspace.nbytes + sum(holder.nbytes for _, _, holder in self.holders())

    def check_whole(self) -> None:
        """Refuse to go on from a read that did not end."""
        if self.suspect is not None:
            check_scores(self.scorer, self.suspect)
            self.suspect = None
        if self._interrupted:
            raise ValueError("an earlier read of this cache was interrupted; start again with cache.fresh()")
        if self.reader is not None and self.reader.torn:
            raise ValueError("this cache is being read; go on when that read has ended, or with cache.fresh()")

    def _settled(self) -> None:
        """Refuse to go on from a read that did not end, and give all units their scores."""
        self.check_whole()
        if self.reader is not None:
            self.reader.rate_waiting()

    @contextmanager
    def _changed_whole(self) -> Iterator[None]:
        """Let all layers be changed; if that ends in the middle, remember it as an interrupted read."""
        self.check_whole()
        self._interrupted = True
        yield
        self._interrupted = False

    @torch.inference_mode(False)
    def copy(self) -> Self:
        """Return an independent copy: a document read once answers many questions, each on its own copy.

        Raises:
            ValueError: If a read of this cache was interrupted, or is in progress.
        """
        self._settled()
        return self.take_rows()

    def take_back(self) -> None:
        """Forget the newest token, so that it can be fed again for its logits; a second call changes nothing.

        Raises:
            ValueError: If a read of this cache was interrupted, or is in progress, or it carries states that do not say
                what they were before that token.
        """
        self.check_whole()
        if self.held_back:
            return
        for states in self.carriers.values():
            states.check_take_back()
        self._settled()
        with self._changed_whole():
            if self.digest is not None:
                last = self.last_tokens
                self.digest = None if last is None else shortened(self.digest, last.to(self.digest.device))
            if self.newest_hidden is not None:
                self.newest_hidden = self.newest_hidden[:, :-1] if self.newest_hidden.shape[1] > 1 else None
            for _, _, holder in self.holders():
                holder.take_back()
            self.seen -= 1
            self.next_position -= 1
            self.held_back = self.fed_again = True

    @torch.inference_mode(False)
    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; `rows` is (new batch,) int64.

        Raises:
            ValueError: If a read of this cache was interrupted, or is in progress.
        """
        self._settled()
        before = self.rows
        with self._changed_whole():
            for _, _, holder in self.holders():
                holder.select_rows(rows)
            self._index_rows(rows)
            if len(rows) < before:
                self.workspace.clear()  # it is of a size for more

    @torch.inference_mode(False)
    def take_rows(self, rows: Tensor | None = None) -> Self:
        """Return some rows, or all, as a cache of their own."""
        twin = copy.copy(self)
        twin.reader, twin.watch, twin.workspace = None, None, Workspace()
        twin.layers, twin.carriers = [], {}
        for index, layer in enumerate(self.layers):  # one after the other: only one layer is held twice as a whole
            twin.layers.append(layer.copy(twin.workspace))
            if index in self.carriers:
                twin.carriers[index] = self.carriers[index].copy(twin.workspace)
                twin.carriers[index].show(twin.layers[index])
            if rows is not None:
                for at, _, holder in twin.holders():
                    if at == index:
                        holder.select_rows(rows)
        if rows is not None:
            twin._index_rows(rows)
        return twin

    def _index_rows(self, rows: Tensor) -> None:
        for name in _PER_ROW.values():
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))
        if len(self.protected) > 1:
            self.protected = tuple(self.protected[row] for row in rows.tolist())
            if self.reader is not None:
                self.reader.limits.protect(self.protected)

    def _trimmed(self, row: int) -> Self:
        """Return one row as a cache of its own, without the empty slots in front."""
        own = self.take_rows(torch.tensor([row]))
        pad = 0 if self.pad is None else int(self.pad[row])
        own.seen, own.text_end = own.seen - pad, own.text_end - pad
        own.next_position -= 0 if self.shift is None else int(self.shift[row])
        own.pad = own.shift = None
        for _, _, holder in own.holders():
            holder.trim()
        own._count_windows()
        return own

    def join(self, rows: list[Self], width: int, new_tokens: int = 0) -> None:
        """Take over the units of single rows, aligned to the right, with room for `new_tokens` more."""
        with self._changed_whole():
            self._join(rows, width, new_tokens)

    def _join(self, rows: list[Self], width: int, new_tokens: int) -> None:
        device = input_device(self.model)
        seen = torch.tensor([row.seen for row in rows], device=device)
        following = torch.tensor([row.next_position for row in rows], device=device)
        # Where a later text is padded too, padding is not only on the left, so ids do not tell any more what was read.
        known = not self.seen or bool((width - seen == (0 if self.pad is None else self.pad)).all())
        held = {name: [own for row in rows if (own := getattr(row, name)) is not None] for name in _PER_ROW.values()}
        self.digest = torch.cat(held["digest"]) if known and len(held["digest"]) == len(rows) else None
        self.last_tokens = torch.cat(held["last_tokens"]) if held["last_tokens"] else None
        if newest := held["newest_hidden"]:
            tokens = min(states.shape[1] for states in newest)
            self.newest_hidden = torch.cat([states[:, -tokens:] for states in newest])
        suspects = [row.suspect for row in rows if row.suspect is not None]
        self.suspect = torch.stack(suspects).any() if suspects else None
        self.seen, self.next_position, self.held_back = width, int(following.max()), False
        self.text_end = width - max(row.seen - row.text_end for row in rows)
        self.pad, self.shift = self.seen - seen, self.next_position - following
        room = {}
        for nth, layer in enumerate(self.governed):
            theirs = [row.governed[nth] for row in rows]
            most, layer.rotated = self.limits.most_answering(nth), theirs[0].rotated
            left = new_tokens if most is None else most - max(one.fill for one in theirs)
            room[layer.store] = max(0, min(new_tokens, left))
        parts = [list(row.holders()) for row in rows]
        for row in rows:  # each holder is gone once it has been joined
            row.layers, row.carriers = [], {}
        for _, _, holder in self.holders():
            holder.join([own.pop(0)[2] for own in parts], room.get(holder, 0))  # type: ignore[call-overload]
        self._count_windows()
        self._peak = max(self._peak, self.nbytes)

    def _count_windows(self) -> None:
        """Let layers that slide know how many tokens were read, padding included."""
        for layer in self.layers:
            if isinstance(layer, SlidingLayer):
                layer.seen = self.seen

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and numbers that say everything, for `load`."""
        self._settled()
        layers: list[dict[str, Any]] = [{"fill": 0, "rotated": layer.rotated} for layer in self.layers]
        tensors = {name: getattr(self, own) for name, own in _PER_ROW.items() if getattr(self, own) is not None}
        for index, prefix, holder in self.holders():
            tensors |= {f"{prefix}{name}": tensor for name, tensor in holder.state().items()}
            if holder.counter:
                layers[index][holder.counter] = holder.count
        counters: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        if self.protected:
            counters["protected"] = spans_data(self.protected)
        return {name: tensor.contiguous() for name, tensor in tensors.items()}, {**counters, "layers": layers}

    @torch.inference_mode(False)
    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over what `state` returned, on the backbone's device and in its dtype."""
        dtype, rows = compute_dtype(self.model), input_device(self.model)
        devices = [device_of(module) for module in attention_modules(self.model)]
        usual = {"fed_again": False, "text_end": numbers["seen"]}  # files of earlier versions do not say these
        for name in _COUNTERS:
            setattr(self, name, numbers.get(name, usual.get(name)))
        self.protected = spans_from(numbers.get("protected", []))
        left = {
            name: tensor.to(dtype) if tensor.is_floating_point() and _STATES.search(name) else tensor
            for name, tensor in tensors.items()
        }
        for name, attribute in _PER_ROW.items():
            if name in left:
                setattr(self, attribute, left.pop(name).to(rows))
        parts: dict[str, dict[str, Tensor]] = {}
        for _, prefix, _ in sorted(self.holders(), key=lambda one: -len(one[1])):
            parts[prefix] = {name.removeprefix(prefix): left.pop(name) for name in [*left] if name.startswith(prefix)}
        for index, prefix, holder in sorted(self.holders(), key=lambda one: len(one[1])):
            own, counters = parts[prefix], numbers["layers"][index]
            if not prefix.endswith(HOST):  # a second tier has a place of its own
                own = {name: tensor.to(devices[index]) for name, tensor in own.items()}
            holder.load(own, counters.get(holder.counter, 0))
        for layer, counters in zip(self.layers, numbers["layers"], strict=True):
            layer.rotated = counters["rotated"]
