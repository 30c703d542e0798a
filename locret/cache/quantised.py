"""Units in 8, 4, 3 or 2 bits: rounded once, when they come, and never again.

Eviction gathers codes and scales. Keys are held un-rotated and rotated when they are read, so that no code is ever
rewritten: `rotate` and `unrotate` only remember. What queries attend to is one layer at a time, in the workspace.
"""

# B batch, K KV heads, L new tokens, S slots, C kept slots, W window of units held as they are, D head dim

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from locret.backbone.attention import Recalled, View
from locret.backbone.rotary import Rotary
from locret.cache.rounding import COUNT, PLACE, Coder, Form
from locret.cache.store import DenseStore, UnitRanks, Workspace
from locret.lookups.base import Keys, RoundedKeys
from locret.policy.selectors import Kept, KeptPerHead

_BLOCK = 1024
"""Slots that are read at once: what they take in float32 is small beside the workspace."""
_PARTS = {"keys": ("keys", "key_scales"), "values": ("values", "value_scales")}
_FRAMES = {"keys": "key_frame", "values": "value_frame"}
_BESIDES = ("key_scales", "value_scales", "places")


class _Newest(NamedTuple):
    """States that came last, as queries attend to them once."""

    keys: Tensor
    values: Tensor
    waiting: bool
    """Whether keys are held un-rotated, although these are not."""


class QuantisedStore(DenseStore):
    """As many units in all heads, as codes and scales.

    The newest `form.recent` tokens' units are held as they are besides; a unit leaves that window when as many newer
    ones have come, and has had its codes from the first.

    Args:
        rotary: Turns keys to the positions of their slots.
        workspace: Memory that all stores of a cache share.
        columns: Columns besides `scores` and `positions`.
        form: Bits and rounding.
    """

    name, holds = "quantised", "dense"

    def __init__(
        self,
        rotary: Rotary,
        workspace: Workspace,
        columns: Mapping[str, torch.dtype] | None = None,
        *,
        form: Form,
    ) -> None:
        super().__init__(rotary, workspace, columns)
        self.form = form
        self.beside: dict[str, Tensor] = {}
        """Scales, (B, K, capacity, 2 x groups), and positions, (B, K, capacity): what units have besides."""
        self.fixed: dict[str, Tensor] = {}
        """What KV heads have once: frames, the window of exact units, and how many there are, (B, K)."""
        self.following: list[int] | None = None
        """Per row the position after the newest key, where keys are read as if rotated; None: as they are held."""
        self._lags: list[int] | None = None
        """Per row of a batch by how much its positions lag behind those of the longest; None: by nothing."""
        self._newest: _Newest | None = None

    # -- memory -------------------------------------------------------------------------------------------------------

    @property
    def key_numbers(self) -> int:
        """None: while an answer is written the workspace is not idle."""
        return 0

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        batch, heads = keys.shape[:2]
        window = (batch, heads, self.form.recent)
        self.fixed |= {
            "exact_keys": torch.zeros((*window, keys.shape[-1]), dtype=keys.dtype, device=keys.device),
            "exact_values": torch.zeros((*window, values.shape[-1]), dtype=values.dtype, device=keys.device),
            "exact": torch.zeros((batch, heads), dtype=COUNT, device=keys.device),
        }
        for name, states in (("keys", keys), ("values", values)):
            if self._coder(name).framed and _FRAMES[name] not in self.fixed:
                frame = self._coder(name).rounding.frame(states)
                assert frame is not None
                self.fixed[_FRAMES[name]] = frame
        coded = self._coded(keys[:, :, :0], values[:, :, :0])
        shape, device = (batch, heads, self.capacity), keys.device
        kinds = {name: (tuple(tensor.shape[3:]), tensor.dtype) for name, tensor in coded.items()}
        kinds |= {name: ((), dtype) for name, dtype in self.dtypes.items()}
        if self.form.placed:
            kinds["places"] = ((), PLACE)
        self._set_buffers(
            {n: self.empty((*shape, *rest), dtype=dtype, device=device) for n, (rest, dtype) in kinds.items()}
        )

    def _coded(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return what is held of states (B, K, L, D), by name."""
        parts: dict[str, Tensor] = {}
        for name, states in (("keys", keys), ("values", values)):
            coder = self._coder(name)
            parts |= dict(zip(_PARTS[name], coder.encode(states, self.fixed.get(_FRAMES[name])), strict=False))
        return parts

    def _coder(self, name: str) -> Coder:
        return self.form.keys if name == "keys" else self.form.values

    def _buffers(self) -> dict[str, Tensor]:
        return {**super()._buffers(), **self.beside}

    def _set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        super()._set_buffers(buffers)
        self.beside = {n: t for n, t in buffers.items() if n in _BESIDES}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return super().nbytes + sum(tensor.nbytes for tensor in self.fixed.values())

    def plan(  # type: ignore[override]  # of a form, not of a class
        self,
        slots: int,
        rows: int,
        kv_heads: int,
        head_dim: int,
        element_size: int,
        columns: Sequence[torch.dtype] = (),
        value_dim: int | None = None,
    ) -> int:
        """See `Store`."""
        unit = self.form.unit_bytes(head_dim, element_size, sum(dtype.itemsize for dtype in columns), value_dim)
        return rows * kv_heads * (slots * unit + self.form.head_bytes(head_dim, element_size, value_dim))

    # -- units --------------------------------------------------------------------------------------------------------

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, rotated: Tensor | None = None) -> None:
        """See `Store`."""
        batch, new = keys.shape[0], keys.shape[-2]
        self._newest = _Newest(keys if rotated is None else rotated, values, rotated is not None)
        places: Tensor | int = 0
        if self.following is not None:
            if len(self.following) < batch:
                self.following = self.following * batch
            cos, sin = self._table(self.following, new, keys)
            keys, places = self.rotary.turn_back(keys, cos, sin), _consecutive(self.following, new, keys.device)
            self.following = [following + new for following in self.following]
        super().append(keys, values, positions)
        if self.form.placed:
            self.beside["places"][:, :, self.fill - new : self.fill] = places

    def look_again(self, keys: Tensor, values: Tensor, *, waiting: bool) -> None:
        """See `Store`."""
        self._newest = _Newest(keys, values, waiting)

    def _write(self, span: slice, keys: Tensor, values: Tensor) -> None:
        buffers, new, window = self._buffers(), span.stop - span.start, self.form.recent
        for name, part in self._coded(keys, values).items():
            buffers[name][:, :, span] = part
        newest = min(new, window)
        for name, states in (("exact_keys", keys), ("exact_values", values)):
            exact = self.fixed[name]
            exact[:, :, : window - newest] = exact[:, :, newest:].clone()
            exact[:, :, window - newest :] = states[:, :, new - newest :]
        self.fixed["exact"].add_(new).clamp_(max=window)

    def view(self, base: int) -> View:
        """See `Store`."""
        assert self.values is not None
        newest, self._newest = self._newest, None
        old = self.fill - (0 if newest is None else newest.keys.shape[-2])
        begin = base - old if newest is not None and newest.waiting else None
        like, copies = self.fixed["exact_keys"], self.form.states
        batch, heads, _, dim = like.shape
        wide = self.fixed["exact_values"].shape[-1] if copies > 1 else 0
        room = self.workspace.take((batch, heads, self.fill, dim + wide), self.capacity, like).view(-1)
        count = batch * heads * self.fill * dim
        keys = room[:count].view(batch, heads, self.fill, dim)
        values = self.values[:, :, : self.fill]
        if copies > 1:
            values = room[count:].view(batch, heads, self.fill, wide)
        for start in range(0, old, _BLOCK):
            span = slice(start, min(start + _BLOCK, old))
            self._read_keys(span, begin, out=keys[:, :, span])
            if copies > 1:
                values[:, :, span] = self._read("values", span)
        if newest is not None:
            keys[:, :, old:] = newest.keys
            if copies > 1:
                values[:, :, old:] = newest.values
        return View(keys, values, self.row_start)

    def _read(self, name: str, span: slice) -> Tensor:
        """Return keys as they are held, or values, of some slots."""
        coder, buffers, exact = self._coder(name), self._buffers(), self.fixed[f"exact_{name}"]
        parts = tuple(buffers[part][:, :, span] for part in _PARTS[name] if part in buffers)
        states = coder.decode(parts, exact.shape[-1], self.fixed.get(_FRAMES[name])).to(exact.dtype)
        window = self.form.recent
        first = max(span.start, self.fill - window)
        if coder.exact or first >= span.stop:
            return states
        inside = slice(first - self.fill + window, span.stop - self.fill + window)
        there = torch.arange(inside.start, inside.stop, device=states.device) >= window - self.fixed["exact"][..., None]
        part = states[:, :, first - span.start :]
        part.copy_(torch.where(there[..., None], exact[:, :, inside], part))
        return states

    def _read_keys(self, span: slice, begin: int | None, out: Tensor) -> None:
        """Write keys of some slots as queries attend to them: rotated, if only because slot 0 is at `begin`."""
        keys = self._read("keys", span)
        if self.following is None and begin is None:
            out.copy_(keys)
        elif self.form.placed and self.following is not None:
            self.rotary.turn(keys, *self.rotary.at(self.beside["places"][:, :, span], keys), out=out)
        else:
            starts = [begin] if self.following is None else [following - self.fill for following in self.following]
            cos, sin = self._table(starts, span.stop, keys)  # type: ignore[arg-type]
            self.rotary.turn(keys, cos[..., span, :], sin[..., span, :], out=out)

    def _table(self, starts: Sequence[int], length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for positions that begin at `starts`, one for each row: (L, R), or (B, 1, L, R)."""
        if len(set(starts)) == 1:
            return self.rotary.table(starts[0], length, like)
        return self.rotary.at(_consecutive(starts, length, like.device), like)

    def all_keys(self) -> Keys:
        """See `DenseStore`."""
        return _KeysInCodes(self)

    def as_held(self, ranks: Tensor | None) -> dict[str, Tensor]:
        """See `DenseStore`: codes and scales."""
        return {**self.held_of("keys", ranks), **self.held_of("values", ranks)}

    def as_states(self, held: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `DenseStore`."""
        return self.states_of("keys", held), self.states_of("values", held)

    def held_of(self, name: str, ranks: Tensor | slice | None) -> dict[str, Tensor]:
        """Return what is held of keys, or values, of units by ranks, of a span of slots, or of all."""
        buffers = self._buffers()
        parts = [part for part in _PARTS[name] if part in buffers]
        if name == "keys" and self.following is not None:
            assert self.form.placed
            parts.append("places")
        if not isinstance(ranks, Tensor):
            return {part: buffers[part][:, :, slice(0, self.fill) if ranks is None else ranks] for part in parts}
        where = self._where(ranks).flatten()
        return {
            part: buffers[part].flatten(0, 2).index_select(0, where).view(*ranks.shape, *buffers[part].shape[3:])
            for part in parts
        }

    def states_of(self, name: str, held: Mapping[str, Tensor]) -> Tensor:
        """Return keys as queries attend to them, or values, (B, heads, ..., D), of what is held of them."""
        like, shape = self.fixed[f"exact_{name}"], held[name].shape[:-1]
        parts = [held[part].flatten(2, -2) for part in _PARTS[name] if part in held]
        units, device = parts[0].shape[2], parts[0].device
        frame = self.fixed.get(_FRAMES[name])
        if frame is not None:
            frame = frame.to(device, non_blocking=True).repeat_interleave(shape[1] // frame.shape[1], dim=1)
        states = like.new_empty((*shape[:2], units, like.shape[-1]), device=device)
        for start in range(0, units, _BLOCK):
            span = slice(start, start + _BLOCK)
            own = tuple(part[:, :, span] for part in parts)
            decoded = self._coder(name).decode(own, like.shape[-1], frame).to(like.dtype)
            if name == "keys" and "places" in held:
                places = held["places"].flatten(2)[:, :, span]
                self.rotary.turn(decoded, *self.rotary.at(places, decoded), out=states[:, :, span])
            else:
                states[:, :, span] = decoded
        return states.view(*shape, like.shape[-1])

    def lend_room(self, recalled: Recalled) -> None:
        """See `DenseStore`: slots hold codes, so there is no room for states."""

    def open(self, like: DenseStore, new: int) -> None:
        """See `DenseStore`."""
        assert isinstance(like, QuantisedStore)
        if self.keys is None:
            self.capacity = max(self.capacity, self.fill + new)
            device = self.empty((0,), dtype=PLACE, device=like.fixed["exact"].device).device
            nothing = [like.fixed[name][:, :, :0].to(device) for name in ("exact_keys", "exact_values")]
            self.fixed = {
                name: like.fixed[name].to(device, copy=True) for name in _FRAMES.values() if name in like.fixed
            }
            self._allocate(*nothing)
        elif self.fill + new > self.capacity:
            self.reserve(self.fill + new)
        self.fill += new

    def keep(self, kept: Kept, turned: bool) -> None:
        """See `Store`: codes and scales move, and nothing is turned, for positions are those of slots."""
        assert isinstance(kept, KeptPerHead)
        window, exact = self.form.recent, self.fixed["exact"]
        if window:
            newest = kept.units[..., -window:]
            into = slice(window - newest.shape[-1], None)
            inside = (newest - self.fill + window).clamp_min(0)[..., None]
            for name in ("exact_keys", "exact_values"):
                states = self.fixed[name]
                states[:, :, into] = states.gather(2, inside.expand(*inside.shape[:3], states.shape[-1]))
            exact.copy_((newest >= self.fill - exact[..., None]).sum(-1))
        super().keep(kept, turned=False)

    def _gather(self, buffer: Tensor, kept_BKC: Tensor, rows: Tensor) -> None:
        # Codes are small: memory of their own, rather than a workspace of every type.
        moved = buffer.flatten(0, 2).index_select(0, rows)
        buffer[:, :, : kept_BKC.shape[2]] = moved.view(*kept_BKC.shape, *buffer.shape[3:])

    def rotate(self, base: int, ranks: UnitRanks | None = None) -> None:
        """See `Store`: remember where keys are, and where those begin that come next."""
        lags = self._lags or [0] * max(self.batch, 1)
        self.following = [base - lag for lag in lags]
        if self.form.placed and self.keys is not None and self.fill:
            places = self.beside["places"][:, :, : self.fill]
            slots = torch.arange(self.fill, device=places.device) - self.fill
            after = torch.tensor(self.following, device=places.device)[:, None, None]
            places.copy_(after + (slots if ranks is None else ranks.ranks - ranks.held))

    def unrotate(self, base: int, ranks: UnitRanks | None = None) -> None:
        """See `Store`."""
        self.following = None

    def lag_like(self, fast: DenseStore) -> None:
        """See `DenseStore`."""
        assert isinstance(fast, QuantisedStore)
        self._lags = fast._lags

    def take_back(self) -> None:
        """See `Store`."""
        super().take_back()
        for name in ("exact_keys", "exact_values"):
            self.fixed[name][:, :, 1:] = self.fixed[name][:, :, :-1].clone()
        self.fixed["exact"].sub_(1).clamp_(min=0)
        if self.following is not None:
            self.following = [following - 1 for following in self.following]

    # -- rows and whole stores ----------------------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """See `Store`."""
        super().select_rows(rows)
        self.fixed = {n: t.index_select(0, rows.to(t.device)) for n, t in self.fixed.items()}
        if self.following is not None:
            # Where nothing has come yet there is one number for all rows.
            self.following = [self.following[min(row, len(self.following) - 1)] for row in rows.tolist()]
        if self._lags is not None:
            self._lags = [self._lags[row] for row in rows.tolist()]

    def trim(self) -> None:
        """See `Store`; the only row lags behind nothing."""
        super().trim()
        self._lags = None

    def join(self, stores: Sequence[DenseStore], capacity: int) -> None:
        """See `Store`."""
        others = [store for store in stores if isinstance(store, QuantisedStore)]
        super().join(stores, capacity)
        self.fixed = {name: torch.cat([store.fixed[name] for store in others]) for name in others[0].fixed}
        following = [store.following[0] for store in others if store.following is not None]
        self.following = following or None
        self._lags = [max(following) - one for one in following] or None

    def chain(self, stores: Sequence[DenseStore]) -> None:
        """See `Store`; the newest units that are held as they are besides are those of the last store."""
        others = [store for store in stores if isinstance(store, QuantisedStore)]
        super().chain(stores)
        frames = {name: self.fixed[name] for name in _FRAMES.values() if name in self.fixed}
        self.fixed = {**others[-1].fixed, **frames}

    def _like_ours(self, store: DenseStore) -> dict[str, Tensor]:
        held = super()._like_ours(store)
        if store is not self and any(frame in self.fixed for frame in _FRAMES.values()):
            held |= self._coded(*store.as_states(store.as_held(None)))  # codes mean something in their own frame only
        return held

    def state(self) -> dict[str, Tensor]:
        """See `Store`."""
        held = {**super().state(), **self.fixed}
        if self.following is not None:
            held["following"] = torch.tensor([self.following, self._lags or [0] * len(self.following)])
        return held

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        """See `Store`."""
        super().load(tensors, fill)
        names = ("exact_keys", "exact_values", "exact", *_FRAMES.values())
        self.fixed = {name: tensors[name] for name in names if name in tensors}
        self.following, self._lags = tensors["following"].tolist() if "following" in tensors else (None, None)

    def copy(self, workspace: Workspace) -> QuantisedStore:
        """See `Store`."""
        twin = super().copy(workspace)
        twin.beside = {name: self.held_anew(tensor) for name, tensor in self.beside.items()}
        twin.fixed = {name: tensor.clone() for name, tensor in self.fixed.items()}
        twin._newest = None
        return twin


class _KeysInCodes(RoundedKeys):
    """Keys of a store of codes."""

    def __init__(self, store: QuantisedStore) -> None:
        like = store.fixed["exact_keys"]
        self._store, self.device = store, like.device
        self.shape = (*like.shape[:2], store.fill, like.shape[-1])

    def span(self, start: int, end: int) -> Tensor:
        """See `RoundedKeys`."""
        return self._store.states_of("keys", self._store.held_of("keys", slice(start, end)))

    def at(self, ranks: Tensor) -> Tensor:
        """See `RoundedKeys`."""
        return self._store.states_of("keys", self._store.held_of("keys", ranks))


def _consecutive(starts: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Return (B, 1, L) positions that begin at `starts`."""
    return torch.tensor(starts, device=device)[:, None, None] + torch.arange(length, device=device)
