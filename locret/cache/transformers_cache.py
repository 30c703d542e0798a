"""What transformers asks of a cache: its length, units and states of new tokens, rows for beams."""

# B batch, L new tokens

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from locret.cache.sliding import SlidingLayer

if TYPE_CHECKING:
    from typing_extensions import Self

    from locret.cache.reader import Reader
    from locret.cache.states import States

ASSISTED = (
    "an evicted unit cannot come back, so assisted and prompt-lookup decoding do not work with a RetentionCache; "
    "use sampling or beams"
)


class TransformersCache(Cache):
    """What models and `generate` call: answered from what a `RetentionCache` holds, or passed on to its reader."""

    reader: Reader | None = None
    """The read or answer in progress, which observes the backbone's forward passes."""
    carriers: dict[int, States]
    """The states of the layers that carry any."""
    seen = 0
    """Tokens read or generated so far, padding included."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens read so far, padding included: what `generate` need not feed again."""
        return self.seen

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Add the units of L new tokens to a layer; what to attend to is asked of the reader's `view`."""
        layer, reader = self.layers[layer_idx], self._reading()
        if isinstance(layer, SlidingLayer):
            layer.update(key_states, value_states)
        else:
            reader.update(key_states, value_states, layer_idx)
        return key_states, value_states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the (B, ...) newest inputs of a layer's convolution; None: there are none yet."""
        return self.carriers[layer_idx].now.get(f"conv.{state_idx}")

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Tensor:
        """Add new inputs of a layer's convolution, and return them with the earlier ones that it needs."""
        self._reading()
        return self.carriers[layer_idx].update_conv_state(conv_states, state_idx, **options)  # type: ignore[no-any-return]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the (B, ...) recurrent state of a layer; None: there is none yet."""
        states = self.carriers[layer_idx]
        return states.recurrent_states[state_idx] if states.has_previous_state[state_idx] else None

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Tensor:
        """Take over the recurrent state of a layer after new tokens."""
        self._reading()
        return self.carriers[layer_idx].update_recurrent_state(recurrent_states, state_idx, **options)  # type: ignore[no-any-return]

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a layer, or if None the last one that carries any, has a state."""
        found = self.carriers[max(self.carriers) if layer_idx is None else layer_idx].has_previous_state
        return all(found.values()) if state_idx is None else bool(found[state_idx])

    def _reading(self) -> Reader:
        if self.reader is None:
            raise ValueError(
                "a RetentionCache is filled by locret.prefill, locret.generate and the generate method of its model, "
                "not by calling the model; where it was model.generate, import RetentionCache from locret before"
            )
        return self.reader

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, as `generate` does with its inputs for beams and several answers."""
        self.select_rows(torch.arange(self.rows).repeat_interleave(repeats))

    def crop(self, *_: Any, **__: Any) -> None:
        """Refuse: an evicted unit cannot come back, so speculative tokens cannot be taken back."""
        raise ValueError(f"a RetentionCache cannot be cropped: {ASSISTED}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the units but not the backbone."""
        return self.copy()  # type: ignore[no-any-return]
