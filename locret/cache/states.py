"""What a cache holds besides units: states of fixed size, which no budget touches; and layers that hold nothing."""

# B batch

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from typing_extensions import Self

from locret.backbone.recurrence import CONV, SCAN
from locret.cache.units import Units, Workspace

BEFORE = "before"
"""What the names of a state's tensors begin with, where they are those before the newest token."""
STATES = "states."
"""What the names of states' tensors begin with among those of their layer, in a file."""

# A private name of transformers, the same in 5.17 and 5.23.
_Base: Any = cache_utils.LinearAttentionLayer


class States(Units, _Base):
    """The states of one layer, and what they were before the newest token, which may be taken back."""

    once, counter = None, "marked"

    def __init__(self, number_of_states: int = 1) -> None:
        _Base.__init__(self, number_of_states=number_of_states)
        self.marking = True
        """Whether the newest token of the coming pass may be taken back."""
        self.before: dict[str, Tensor] | None = None
        """The state before the newest token, nothing if that was the first; None where it is not known."""

    @property
    def now(self) -> dict[str, Tensor]:
        """The state as it is: "conv.0", "scan.0" and so on."""
        held = {CONV: self.conv_states, SCAN: self.recurrent_states}
        return {f"{kind}.{n}": t for kind, states in held.items() for n, t in states.items() if t is not None}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of it."""
        return {**self.now, **{f"{BEFORE}.{name}": tensor for name, tensor in (self.before or {}).items()}}

    @tensors.setter
    def tensors(self, held: Mapping[str, Tensor]) -> None:
        if self.before is not None:
            self.before = {n.removeprefix(f"{BEFORE}."): t for n, t in held.items() if n.startswith(BEFORE)}
        for n in range(self.number_of_states):
            conv, scan = held.get(f"{CONV}.{n}"), held.get(f"{SCAN}.{n}")
            self.conv_states[n], self.recurrent_states[n] = conv, scan
            self.is_conv_states_initialized[n] = conv is not None
            self.is_recurrent_states_initialized[n] = scan is not None
            self.has_previous_state[n] = conv is not None or scan is not None
            if conv is not None:  # the kernel of a convolution is as long as its state
                self.conv_kernel_size[n], self.dtype, self.device = conv.shape[-1], conv.dtype, conv.device

    @property
    def begun(self) -> bool:
        """Whether there is a state."""
        return any(self.has_previous_state.values())

    def mark(self) -> None:
        """Remember the state as it is, which is that before the newest token."""
        self.before = {name: tensor.clone() for name, tensor in self.now.items()} if self.begun else {}

    @contextmanager
    def trial(self, number: float) -> Iterator[None]:
        """Let recurrent states be all `number`, and put everything back when the block ends."""
        saved = self.tensors
        self.tensors = {n: torch.full_like(t, number) if n.startswith(SCAN) else t.clone() for n, t in saved.items()}
        try:
            yield
        finally:
            self.tensors = saved

    def strength(self) -> float:
        """Return the largest number of the recurrent states; 0 where there are none."""
        return max((float(state.abs().max()) for name, state in self.now.items() if name.startswith(SCAN)), default=0.0)

    def take_back(self) -> None:
        """Forget the newest token; `check_take_back` says whether that can be."""
        before, self.before = self.before, None
        assert before is not None
        self.tensors = before

    def check_take_back(self) -> None:
        """Refuse to forget the newest token if what the state was before it is not known any more."""
        if self.before is None:
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
        for name, state in self.now.items():
            kind, _, n = name.partition(".")
            (layer.update_conv_state if kind == CONV else layer.update_recurrent_state)(state.clone(), int(n))

    @property
    def count(self) -> bool:
        """Whether the newest token may be taken back."""
        return self.before is not None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(state.untyped_storage().nbytes() for state in self.tensors.values())

    def trim(self) -> None:
        """Leave it as it is: no slot is empty."""

    def join(self, others: Sequence[Self], room: int = 0) -> None:
        """See `Units`; a state of zeros is what there was before the first token."""
        known = all(other.before is not None for other in others)
        some = known and any(other.before for other in others)
        for other in others:
            zeros = {name: torch.zeros_like(tensor) for name, tensor in other.now.items()} if some else {}
            other.before = (other.before or zeros) if known else None
        self.before = {} if known else None
        super().join(others)

    def copy(self, workspace: Workspace) -> States:
        twin = States(self.number_of_states)
        twin.marking, twin.before = self.marking, None if self.before is None else {}
        twin.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return twin

    def load(self, tensors: Mapping[str, Tensor], fill: int) -> None:
        """See `Units`; `fill` says whether the newest token may be taken back."""
        self.before = {} if fill else None
        self.tensors = dict(tensors)


class EmptyLayer:
    """The cache layer of what holds no units: all it may have is a state, or it is an MLP layer of Nemotron-H."""

    is_compileable = False
    supports_early_init = False
    is_croppable = False
    rotated = False
    holders: Mapping[str, Units] = {}

    def get_max_length(self) -> int:
        """No fixed maximum; a part of the contract of transformers."""
        return -1

    def copy(self, workspace: Workspace) -> EmptyLayer:
        """Return another one."""
        return EmptyLayer()
