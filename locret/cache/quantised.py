"""Units in 8, 4, 3 or 2 bits: rounded once, when they come, and never again.

Eviction gathers codes and scales. Keys are held un-rotated and rotated when they are read, so that no code is ever
rewritten: `turn_keys` only remembers. What queries attend to is one layer at a time, in the workspace.
"""

# B batch, K KV heads, L new tokens, S slots, C kept slots, W window of units held as they are, D head dim

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self

from locret.backbone.attention import View
from locret.backbone.rotary import Rotary
from locret.cache.rounding import COUNT, PLACE, Form
from locret.cache.store import QUERIES, STATES, DenseStore, Store, UnitRanks, Workspace
from locret.lookups.base import Keys, KeysInSpans
from locret.policy.selectors import Kept, KeptPerHead

_BLOCK = 1024
"""Slots that are read at once: what they take in float32 is small beside the workspace."""
_PARTS = {"keys": ("keys", "key_scales"), "values": ("values", "value_scales")}
_TURNS = ("following", "lags")
_FRAMES = {"keys": "key_frame", "values": "value_frame"}


class _Newest(NamedTuple):
    """States that came last, as queries attend to them once."""

    keys: Tensor
    values: Tensor
    waiting: bool
    """Whether keys are held un-rotated, although these are not."""


class QuantisedStore(DenseStore):
    """As many units in all heads, as codes and scales, for which `form` says bits and rounding.

    The newest `form.recent` tokens' units are held as they are besides; a unit leaves that window when as many newer
    ones have come, and has had its codes from the first. Where keys are read as if rotated, `following` is per row the
    position after the newest key, and `lags` by how much it lags behind the longest row's.
    """

    name, holds, rewrites = "quantised", "dense", True
    uncounted = (*_TURNS, QUERIES)
    once = ("exact_keys", "exact_values", "exact", *_FRAMES.values(), *uncounted)

    def __init__(
        self, rotary: Rotary, workspace: Workspace, columns: Mapping[str, torch.dtype] | None = None, *, form: Form
    ) -> None:
        super().__init__(rotary, workspace, columns)
        self.form = form
        self._newest: _Newest | None = None

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        for name, states in zip(STATES, (keys, values), strict=True):
            shape = (*states.shape[:2], self.form.recent, states.shape[-1])
            self.tensors[f"exact_{name}"] = torch.zeros(shape, dtype=states.dtype, device=keys.device)
            if self.form.coder(name).framed and _FRAMES[name] not in self.tensors:
                frame = self.form.coder(name).rounding.frame(states)
                assert frame is not None
                self.tensors[_FRAMES[name]] = frame
        self.tensors["exact"] = torch.zeros(keys.shape[:2], dtype=COUNT, device=keys.device)
        super()._allocate(keys, values)

    def _kinds(self, keys: Tensor, values: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        held = self._coded(keys[:, :, :0], values[:, :, :0])
        kinds = {name: (tuple(tensor.shape[3:]), tensor.dtype) for name, tensor in held.items()}
        places = {"places": ((), PLACE)} if self.form.placed else {}
        return {**super()._kinds(keys, values), **kinds, **places}

    def _coded(self, keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        """Return what is held of states (B, K, L, D), by name."""
        parts: dict[str, Tensor] = {}
        for name, states in zip(STATES, (keys, values), strict=True):
            coder, frame = self.form.coder(name), self.tensors.get(_FRAMES[name])
            parts |= zip(_PARTS[name], coder.encode(states, frame), strict=False)
        return parts

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, rotated: Tensor | None = None) -> None:
        new = keys.shape[-2]
        self._newest = _Newest(keys if rotated is None else rotated, values, rotated is not None)
        following, places = self._following(keys.shape[0]), None
        if following is not None:
            cos, sin = _table(self.rotary, following, new, keys)
            keys, places = self.rotary.turn_back(keys, cos, sin), _consecutive(following, new, keys.device)
            self.tensors["following"] = following + new
        super().append(keys, values, positions)
        if self.form.placed:
            self.tensors["places"][:, :, self.fill - new : self.fill] = 0 if places is None else places

    def _following(self, batch: int) -> Tensor | None:
        """Return (B,) following; where nothing has come yet there is one number for all rows."""
        following = self.tensors.get("following")
        return following.expand(batch) if following is not None and len(following) < batch else following

    def look_again(self, keys: Tensor, values: Tensor, *, waiting: bool) -> None:
        self._newest = _Newest(keys, values, waiting)

    def _write(self, span: slice, keys: Tensor, values: Tensor) -> None:
        new, window = span.stop - span.start, self.form.recent
        for name, part in self._coded(keys, values).items():
            self.tensors[name][:, :, span] = part
        newest = min(new, window)
        for name, states in zip(STATES, (keys, values), strict=True):
            exact = self.tensors[f"exact_{name}"]
            exact[:, :, : window - newest] = exact[:, :, newest:].clone()
            exact[:, :, window - newest :] = states[:, :, new - newest :]
        self.tensors["exact"].add_(new).clamp_(max=window)

    def view(self, base: int) -> View:
        newest, self._newest = self._newest, None
        old = self.fill - (0 if newest is None else newest.keys.shape[-2])
        begin = base - old if newest is not None and newest.waiting else None
        like, copies = self.tensors["exact_keys"], self.form.states
        batch, heads, _, dim = like.shape
        wide = self.tensors["exact_values"].shape[-1] if copies > 1 else 0
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
        coder, exact = self.form.coder(name), self.tensors[f"exact_{name}"]
        parts = tuple(self.tensors[part][:, :, span] for part in _PARTS[name] if part in self.tensors)
        states = coder.decode(parts, exact.shape[-1], self.tensors.get(_FRAMES[name])).to(exact.dtype)
        window = self.form.recent
        first = max(span.start, self.fill - window)
        if coder.exact or first >= span.stop:
            return states
        inside = slice(first - self.fill + window, span.stop - self.fill + window)
        slots = torch.arange(inside.start, inside.stop, device=states.device)
        there = slots >= window - self.tensors["exact"][..., None]
        part = states[:, :, first - span.start :]
        part.copy_(torch.where(there[..., None], exact[:, :, inside], part))
        return states

    def _read_keys(self, span: slice, begin: int | None, out: Tensor) -> None:
        """Write keys of some slots as queries attend to them: rotated, if only because slot 0 is at `begin`."""
        keys, following = self._read("keys", span), self.tensors.get("following")
        if following is None and begin is None:
            out.copy_(keys)
        elif self.form.placed and following is not None:
            self.rotary.turn(keys, *self.rotary.at(self.tensors["places"][:, :, span], keys), out=out)
        else:
            starts = torch.tensor([begin]) if following is None else following - self.fill
            cos, sin = _table(self.rotary, starts, span.stop, keys)
            self.rotary.turn(keys, cos[..., span, :], sin[..., span, :], out=out)

    def keep(self, kept: Kept, turned: bool) -> None:
        """See `Store`: codes and scales move, and nothing is turned, for positions are those of slots."""
        assert isinstance(kept, KeptPerHead)
        window, exact = self.form.recent, self.tensors["exact"]
        if window:
            newest = kept.units[..., -window:]
            into = slice(window - newest.shape[-1], None)
            inside = (newest - self.fill + window).clamp_min(0)[..., None]
            for name in STATES:
                states = self.tensors[f"exact_{name}"]
                states[:, :, into] = states.gather(2, inside.expand(*inside.shape[:3], states.shape[-1]))
            exact.copy_((newest >= self.fill - exact[..., None]).sum(-1))
        super().keep(kept, turned=False)

    def _gather(self, buffer: Tensor, kept_BKC: Tensor, rows: Tensor) -> None:
        # Codes are small: memory of their own, rather than a workspace of every type.
        moved = buffer.flatten(0, 2).index_select(0, rows)
        buffer[:, :, : kept_BKC.shape[2]] = moved.view(*kept_BKC.shape, *buffer.shape[3:])

    def turn_keys(self, base: int, ranks: UnitRanks | None = None, *, back: bool = False) -> None:
        """Remember where keys are, and where those begin that come next."""
        if back:
            self.tensors.pop("following", None)
            return
        following = base - self.tensors.get("lags", torch.zeros(max(self.batch, 1), dtype=torch.int64))
        self.tensors["following"] = following
        if self.form.placed and self.fill:
            places = self.held("places")
            slots = torch.arange(self.fill, device=places.device) - self.fill
            after = following.to(places.device)[:, None, None]
            places.copy_(after + (slots if ranks is None else ranks.ranks - ranks.held))

    def take_back(self) -> None:
        super().take_back()
        for name in STATES:
            exact = self.tensors[f"exact_{name}"]
            exact[:, :, 1:] = exact[:, :, :-1].clone()
        self.tensors["exact"].sub_(1).clamp_(min=0)
        if "following" in self.tensors:
            self.tensors["following"] = self.tensors["following"] - 1

    def all_keys(self) -> Keys:
        like = self.tensors["exact_keys"]
        shape = (*like.shape[:2], self.fill, like.shape[-1])
        return KeysInSpans(shape, like.device, lambda span: self.states_of("keys", self.held_of("keys", span)))

    def as_held(self, ranks: Tensor | None) -> dict[str, Tensor]:
        """See `DenseStore`: codes and scales."""
        return {**self.held_of("keys", ranks), **self.held_of("values", ranks)}

    def as_states(self, held: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.states_of("keys", held), self.states_of("values", held)

    def held_of(self, name: str, ranks: Tensor | slice | None) -> dict[str, Tensor]:
        """Return what is held of keys, or values, of units by ranks, of a span of slots, or of all."""
        places = ("places",) if name == "keys" and "following" in self.tensors else ()
        return self._picked([*(part for part in _PARTS[name] if part in self.tensors), *places], ranks)

    def states_of(self, name: str, held: Mapping[str, Tensor]) -> Tensor:
        """Return keys as queries attend to them, or values, (B, heads, ..., D), of what is held of them."""
        like, shape = self.tensors[f"exact_{name}"], held[name].shape[:-1]
        parts = [held[part].flatten(2, -2) for part in _PARTS[name] if part in held]
        units, device = parts[0].shape[2], parts[0].device
        if (frame := self.tensors.get(_FRAMES[name])) is not None:
            frame = frame.to(device, non_blocking=True).repeat_interleave(shape[1] // frame.shape[1], dim=1)
        states = like.new_empty((*shape[:2], units, like.shape[-1]), device=device)
        for start in range(0, units, _BLOCK):
            span = slice(start, start + _BLOCK)
            own = tuple(part[:, :, span] for part in parts)
            decoded = self.form.coder(name).decode(own, like.shape[-1], frame).to(like.dtype)
            if name == "keys" and "places" in held:
                places = held["places"].flatten(2)[:, :, span]
                self.rotary.turn(decoded, *self.rotary.at(places, decoded), out=states[:, :, span])
            else:
                states[:, :, span] = decoded
        return states.view(*shape, like.shape[-1])

    def lag_like(self, fast: Store) -> None:
        self.tensors.pop("lags", None)
        self.tensors |= {name: lags for name, lags in fast.tensors.items() if name == "lags"}

    def open(self, like: Store, new: int) -> None:
        if "keys" not in self.tensors:
            self.capacity = max(self.capacity, self.fill + new)
            device = self.empty((0,), dtype=PLACE, device=like.tensors["exact"].device).device
            frames = [name for name in _FRAMES.values() if name in like.tensors]
            self.tensors |= {name: like.tensors[name].to(device, copy=True) for name in frames}
            self._allocate(*(like.tensors[f"exact_{name}"][:, :, :0].to(device) for name in STATES))
        self.reserve(self.fill + new)
        self.fill += new

    def select_rows(self, rows: Tensor) -> None:
        if (following := self._following(int(rows.max()) + 1)) is not None:
            self.tensors["following"] = following
        super().select_rows(rows)

    def trim(self) -> None:
        """See `Units`; the only row lags behind nothing."""
        super().trim()
        self.tensors.pop("lags", None)

    def join(self, others: Sequence[Self], room: int = 0) -> None:
        super().join(others, room)
        self.tensors.pop("lags", None)
        if (following := self.tensors.get("following")) is not None:
            self.tensors["lags"] = following.max() - following

    def chain(self, stores: Sequence[DenseStore]) -> None:
        """See `Store`; the newest units that are held as they are besides are those of the last store."""
        newest = {n: t for n, t in stores[-1].tensors.items() if n in self.once and n not in _FRAMES.values()}
        super().chain(stores)
        self.tensors |= newest

    def _like_ours(self, store: DenseStore) -> dict[str, Tensor]:
        held = super()._like_ours(store)
        if store is not self and any(frame in self.tensors for frame in _FRAMES.values()):
            held |= self._coded(*store.as_states(store.as_held(None)))  # codes mean something in their own frame only
        return held

    def state(self) -> dict[str, Tensor]:
        held = super().state()
        lags = held.pop("lags", None)
        if (following := held.get("following")) is not None:
            held["following"] = torch.stack([following, torch.zeros_like(following) if lags is None else lags])
        return held

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        super().load(tensors, fill)
        if "following" in self.tensors:
            self.tensors |= zip(_TURNS, self.tensors["following"].cpu(), strict=True)


def _table(rotary: Rotary, starts: Tensor, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin for positions that begin at `starts`, one for each row: (L, R), or (B, 1, L, R)."""
    if len(starts.unique()) == 1:
        return rotary.table(int(starts[0]), length, like)
    return rotary.at(_consecutive(starts, length, like.device), like)


def _consecutive(starts: Tensor, length: int, device: torch.device) -> Tensor:
    """Return (B, 1, L) positions that begin at `starts`."""
    return starts.to(device)[:, None, None] + torch.arange(length, device=device)
