"""What a bounded cache holds: its units, their bytes, and caches as a whole that are copied, batched and reordered."""

# B batch, K KV heads, S slots, E hidden size

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from locret.backbone.adapters import Backbone
from locret.backbone.rotary import Rotary
from locret.cache.layer import RetentionLayer, Workspace
from locret.cache.limits import Limits
from locret.cache.ragged import RaggedLayer
from locret.cache.sliding import SlidingLayer
from locret.policy.budget import cache_bytes
from locret.policy.policy import RetentionPolicy
from locret.scorers import Scorer

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of a cache. `planned` follows from the policy alone; `actual` and `peak` are counted from the tensors."""

    planned: int
    actual: int
    peak: int
    units: int
    """Units held per KV head, on average, in the fullest layer."""

    def to_dict(self) -> dict[str, int]:
        """Return the numbers as plain data."""
        return asdict(self)


class CacheContents(Cache):
    """A transformers cache with a budgeted layer per layer of full attention; `RetentionCache` fills it.

    Args:
        model: The backbone the cache is for.
        backbone: Its shape.
        scorer: What rates units.
        policy: How many of them stay.
        rotary: The backbone's rotary embedding.
    """

    def __init__(
        self, model: nn.Module, backbone: Backbone, scorer: Scorer, policy: RetentionPolicy, rotary: Rotary
    ) -> None:
        self.model, self.backbone, self.scorer, self.policy = model, backbone, scorer, policy
        self._rotary, self._workspace = rotary, Workspace()
        self.limits = Limits(policy, scorer, len(backbone.layers))
        """What stays, now and in each step to come."""
        super().__init__(layers=[self._new_layer(index) for index in range(backbone.num_layers)])
        self.seen = 0
        """Tokens read or generated so far, padding included."""
        self.last_tokens: Tensor | None = None
        """(B, 1) the prompt's last token, while it is the newest unit."""
        self.held_back = False
        """Whether `last_tokens` is still to be fed."""
        self._again = False
        """Whether it has been fed before."""
        self._context: Tensor | None = None
        """(B, 1 or 2, E) hidden states of the newest tokens, for a scorer that rates tokens."""
        self.pad: Tensor | None = None
        """(B,) left padding of each row, where rows differ."""
        self._shift: Tensor | None = None
        self._next_position = 0
        self._peak = 0
        self._largest = [0] * len(backbone.layers)

    def _new_layer(self, index: int) -> RetentionLayer | SlidingLayer:
        if index in self.backbone.layers:
            common = (self._rotary, self._workspace, self.policy.positions == "compact")
            if self.policy.head_budgets == "adaptive":
                return RaggedLayer(*common, self.policy.head_floor, self.scorer.relative)
            return RetentionLayer(*common)
        assert self.backbone.window is not None
        return SlidingLayer(self.backbone.window)

    @property
    def governed(self) -> list[RetentionLayer]:
        """The layers whose units compete for the budget."""
        return [layer for layer in self.layers if isinstance(layer, RetentionLayer)]

    # -- looking inside ---------------------------------------------------------------------------------------------

    def kept_positions(self, layer: int) -> Tensor:
        """Return the original text positions of the units held in one layer.

        Args:
            layer: Index of a full-attention layer of the backbone.

        Returns:
            (batch, kv_heads, units) int64, ascending; -1 in front where a row or head holds fewer units than others.

        Raises:
            ValueError: If that layer slides over a window and holds no scored units.
        """
        return self._held(layer, "positions").long()

    def kept_scores(self, layer: int) -> Tensor:
        """Return the (batch, kv_heads, units) float32 scores of the units held in one layer."""
        return self._held(layer, "scores").clone()

    def _held(self, index: int, name: str) -> Tensor:
        layer = self.layers[index]
        if not isinstance(layer, RetentionLayer):
            raise ValueError(f"layer {index} slides over a window; layers with scored units: {self.backbone.layers}")
        if not layer.is_initialized:
            return torch.empty(1, self.backbone.num_kv_heads, 0)
        return layer.held(name)

    def memory(self) -> CacheMemory:
        """Return planned and counted bytes of all buffers, the shared workspace included."""
        units = max((layer.fill for layer in self.governed), default=0)
        return CacheMemory(self._plan(), self._bytes(), max(self._peak, self._bytes()), units)

    def _bytes(self) -> int:
        held: int = sum(layer.nbytes for layer in self.layers)
        return self._workspace.nbytes + held

    def _plan(self) -> int:
        governed = self.governed
        rows = governed[0].keys.shape[0] if governed and governed[0].is_initialized else 1
        self._note_largest()
        slots = self._largest
        if not any(slots) and not self.policy.needs_length:
            slots = list(self.limits.plan(None).peak)
        return cache_bytes(self.backbone, slots, next(self.model.parameters()).element_size(), rows)

    def _note_largest(self) -> None:
        self._largest = list(map(max, self._largest, [layer.capacity for layer in self.governed]))

    @property
    def next_position(self) -> int:
        """Rotary position of the coming token: how far positions reach."""
        return self._next_position

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens read so far, padding included: what `generate` need not feed again."""
        return self.seen

    # -- whole caches -----------------------------------------------------------------------------------------------

    def take_back(self) -> None:
        """Forget the newest token, so that it can be fed again for its logits; a second call changes nothing."""
        if self.held_back:
            return
        self.held_back = self._again = True
        if self._context is not None:
            self._context = self._context[:, :-1] if self._context.shape[1] > 1 else None
        for layer in self.layers:
            layer.take_back()
        self.seen -= 1
        self._next_position -= 1

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._workspace = Workspace()
        twin.limits, twin._largest = copy.copy(self.limits), list(self._largest)
        twin.layers = []
        for layer in self.layers:
            clone = copy.copy(layer)
            for name, value in vars(layer).items():
                if isinstance(value, Tensor):
                    setattr(clone, name, value.clone())
            if isinstance(clone, RetentionLayer):
                clone.workspace = twin._workspace
            twin.layers.append(clone)
        return twin

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder rows of the batch; `rows` is (new batch,) int64."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.select_rows(rows)
        for name in ("pad", "_shift", "last_tokens", "_context"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, rows.to(tensor.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams of a beam search."""
        self.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row, as `generate` does with its inputs for beams and several answers."""
        rows = next((layer.keys.shape[0] for layer in self.layers if layer.is_initialized), 0)
        self.select_rows(torch.arange(rows).repeat_interleave(repeats))

    def crop(self, *_: Any, **__: Any) -> None:
        """Refuse: an evicted unit cannot come back, so speculative tokens cannot be taken back."""
        raise ValueError(
            "a RetentionCache cannot be cropped, so assisted and prompt-lookup decoding do not work with it; "
            "leave out assistant_model and prompt_lookup_num_tokens"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the units but not the backbone."""
        return self.copy()

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows."""
        self.select_rows(indices)
