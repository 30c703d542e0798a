"""What a cache holds besides units: states of fixed size, which no budget touches; and layers that hold nothing."""

# B batch

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import cache_utils

from locret.backbone.recurrence import CONV, SCAN
from locret.cache.store import Workspace

if TYPE_CHECKING:
    from typing_extensions import Self

BEFORE = "before"
"""What the names of a state's tensors begin with, where they are those before the newest token."""
STATES = "states."
"""What the names of states' tensors begin with among those of their layer, in a file."""
_Parts = dict[str, dict[int, Tensor]]

# Private names of transformers, the same in 5.17 and 5.23.
_Base: Any = getattr(cache_utils, "LinearAttentionLayer", None)
if _Base is None:
    raise ImportError(
        "transformers has moved LinearAttentionLayer, which holds the states of hybrids; install transformers 5.17 to "
        "5.23"
    )


class States(_Base):
    """The states of one layer, and what they were before the newest token, which may be taken back.

    Args:
        number_of_states: How many states the layer has, each with a convolution's and a recurrent part.
    """

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.marking = True
        """Whether the newest token of the coming pass may be taken back."""
        self._before: _Parts | None = None

    def _parts(self) -> _Parts:
        held = {CONV: self.conv_states, SCAN: self.recurrent_states}
        return {name: {n: t for n, t in states.items() if t is not None} for name, states in held.items()}

    def _put(self, parts: _Parts) -> None:
        """Take over tensors; the kernel of a convolution is as long as its state."""
        for name, ours, ready in (
            (CONV, self.conv_states, self.is_conv_states_initialized),
            (SCAN, self.recurrent_states, self.is_recurrent_states_initialized),
        ):
            for n in range(self.number_of_states):
                ours[n] = parts[name].get(n)
                ready[n] = n in parts[name]
        for n in range(self.number_of_states):
            found = parts[CONV].get(n)
            self.has_previous_state[n] = found is not None or n in parts[SCAN]
            if found is not None:
                self.conv_kernel_size[n] = found.shape[-1]
                self.dtype, self.device = found.dtype, found.device

    def _tensors(self) -> Iterator[Tensor]:
        for parts in (self._parts(), self._before or {}):
            for states in parts.values():
                yield from states.values()

    # -- what carries the state from pass to pass ---------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether there is a state."""
        return any(self.has_previous_state.values())

    def mark(self) -> None:
        """Remember the state as it is, which is that before the newest token."""
        if not self.begun:
            self._before = {CONV: {}, SCAN: {}}
            return
        now = self._parts()
        if (
            self._before is None
            or self._before.keys() != now.keys()
            or any(self._before[name].keys() != now[name].keys() for name in now)
        ):
            self._before = _cloned(now)
            return
        for name, states in now.items():
            for n, state in states.items():
                self._before[name][n].copy_(state)

    @contextmanager
    def trial(self, number: float) -> Iterator[None]:
        """Let recurrent states be all `number`, and put everything back when the block ends."""
        saved = self._parts()
        self._put(_cloned(saved))
        for state in self._parts()[SCAN].values():
            state.fill_(number)
        try:
            yield
        finally:
            self._put(saved)

    def strength(self) -> float:
        """Return the largest number of the recurrent states; 0 where there are none."""
        return max((float(state.abs().max()) for state in self._parts()[SCAN].values()), default=0.0)

    def take_back(self) -> None:
        """Forget the newest token; `check_take_back` says whether that can be."""
        before, self._before = self._before, None
        assert before is not None
        self._put(before)

    def check_take_back(self) -> None:
        """Refuse to forget the newest token if what the state was before it is not known any more.

        Raises:
            ValueError: Saying what to do instead.
        """
        if self._before is None:
            raise ValueError(
                "the newest token cannot be taken back, because a recurrent state does not say what it was before it; "
                "go on from what was read, or read it again"
            )

    def show(self, layer: Any) -> None:
        """Let a cache layer have the states as attributes, where the backbones of transformers 5.17 look for them."""
        for name in ("conv_states", "recurrent_states", "record_past"):
            setattr(layer, name, getattr(self, name))

    def give(self, layer: Any) -> None:
        """Put copies into a cache layer of transformers that has read nothing."""
        for n, state in self._parts()[CONV].items():
            layer.update_conv_state(state.clone(), n)
        for n, state in self._parts()[SCAN].items():
            layer.update_recurrent_state(state.clone(), n)

    # -- rows and whole layers ----------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Rows; 0 before the first token."""
        return next((state.shape[0] for state in self._tensors()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(state.untyped_storage().nbytes() for state in self._tensors())

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch."""
        self._put(_each(self._parts(), lambda state: state.index_select(0, rows.to(state.device))))
        if self._before is not None:
            self._before = _each(self._before, lambda state: state.index_select(0, rows.to(state.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams."""
        self.select_rows(beam_idx)

    def join(self, layers: Sequence[Self]) -> None:
        """Become a batch of the only rows of other layers."""
        parts = [layer._parts() for layer in layers]
        self._put(_stacked(parts))
        before = [layer._before for layer in layers]
        # A state of zeros is what there was before the first token.
        known = [one for one in before if one is not None]
        filled = [
            one if one is None or any(one.values()) else _each(parts[n], torch.zeros_like)
            for n, one in enumerate(before)
        ]
        self._before = _stacked([one for one in filled if one is not None]) if len(known) == len(layers) else None

    def copy(self) -> States:
        """Return an independent copy."""
        twin = States(self.number_of_states)
        twin._put(_cloned(self._parts()))
        twin.marking = self.marking
        twin._before = None if self._before is None else _cloned(self._before)
        return twin

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and numbers that say everything, for `load`."""
        tensors = {f"{name}.{n}": t for name, states in self._parts().items() for n, t in states.items()}
        for name, states in (self._before or {}).items():
            tensors |= {f"{BEFORE}.{name}.{n}": t for n, t in states.items()}
        return {name: t.contiguous() for name, t in tensors.items()}, {"marked": self._before is not None}

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Take over what `state` returned; what a convolution reads has the `dtype` of the backbone."""
        found: dict[str, _Parts] = {"": {CONV: {}, SCAN: {}}, BEFORE: {CONV: {}, SCAN: {}}}
        for name, tensor in tensors.items():
            when, _, kind = name.rpartition(".")[0].rpartition(".")
            found[when][kind][int(name.rpartition(".")[2])] = tensor.to(dtype) if kind == CONV else tensor
        self._put(found[""])
        self._before = found[BEFORE] if numbers["marked"] else None


class EmptyLayer:
    """The cache layer of what holds no units: all it may have is a state, or it is an MLP layer of Nemotron-H."""

    is_compileable = False
    supports_early_init = False
    is_croppable = False
    batch = nbytes = fill = 0

    def get_max_length(self) -> int:
        """No fixed maximum; a part of the contract of transformers."""
        return -1

    def take_back(self) -> None:
        """Leave nothing as it is, like all that follows."""

    def select_rows(self, rows: Tensor) -> None:
        """See `take_back`."""

    def trim(self, seen: int) -> None:
        """See `take_back`."""

    def join(self, layers: Sequence[Self], seen: int, new_tokens: int, most: int | None) -> None:
        """See `take_back`."""

    def copy(self, workspace: Workspace) -> EmptyLayer:
        """Return another one."""
        return EmptyLayer()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a file says of it."""
        return {}, {"fill": 0, "rotated": False}

    def load(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """See `take_back`."""


def _each(parts: _Parts, change: Any) -> _Parts:
    return {name: {n: change(state) for n, state in states.items()} for name, states in parts.items()}


def _cloned(parts: _Parts) -> _Parts:
    return _each(parts, torch.clone)


def _stacked(parts: Sequence[_Parts]) -> _Parts:
    first = parts[0]
    return {name: {n: torch.cat([part[name][n] for part in parts]) for n in states} for name, states in first.items()}
