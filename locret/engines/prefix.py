"""What every engine is handed: the units of a context as keys and values of an ordinary prompt, and ids that name it.

Needs no backbone: an engine's process reads a saved context with this and nothing else of the toolkit.
"""

# U units, K KV heads, D head dim

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locret.backbone.adapters import find_decoder
from locret.backbone.rotary import rotary_parameters
from locret.backbone.shape import Backbone
from locret.cache.cache import RetentionCache
from locret.cache.cache_file import SavedCache, read_saved
from locret.cache.export import check_one_row, is_uneven, uneven_units
from locret.cache.row_algebra import saved_state
from locret.conversation.context import Context
from locret.heads.fingerprint import any_fingerprint
from locret.policy.policy import RetentionPolicy


@dataclass(frozen=True, eq=False)
class Prefix:
    """The units of one context, as an engine would hold them for a prompt of as many tokens.

    Or, with `counts`, of a context whose KV heads hold different numbers of units, which `PagedContexts` takes alone.

    Args:
        keys: For each layer (U, K, D), rotated to the positions 0, 1, ..., U - 1; with `counts` (units, D), head after
            head, rotated to positions before `next_position`.
        values: Shaped like the keys.
        vocab_size: Token ids that the backbone knows.
        tokens: Tokens that were read.
        model_type: The backbone's, which tells an engine in which order it holds a head.
        rotary: How the backbone rotates keys, as its config says it.
        backbone: Its shape; None where nobody has said it.
        weights: `any_fingerprint` of the backbone, "" where nobody has said it.
        counts: Units of each layer's KV heads, where these differ.
        next_position: And the position of the token that follows.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    vocab_size: int
    tokens: int
    model_type: str = ""
    rotary: Mapping[str, Any] = field(default_factory=dict)
    backbone: Backbone | None = None
    weights: str = ""
    counts: tuple[tuple[int, ...], ...] = ()
    next_position: int = 0

    @classmethod
    def of(cls, read: RetentionCache | Context, *, uneven: bool = False) -> Prefix:
        """Return the prefix that a cache or a context is; with `uneven` also if its KV heads differ in units.

        Processes that share the weights by tensor parallelism all have to call it, as they do to save.

        Raises:
            ValueError: If it would be no ordinary prefix; see `RetentionCache.to_dynamic_cache`. Or if it has more than
                one row.
        """
        cache = read if isinstance(read, RetentionCache) else read.cache
        check_one_row(cache.rows)
        what: dict[str, Any] = {
            "vocab_size": int(cache.model.config.get_text_config().vocab_size),
            "tokens": cache.seen,
            "model_type": cache.backbone.model_type,
            "rotary": rotary_parameters(find_decoder(cache.model)),
            "backbone": cache.whole,
            "weights": any_fingerprint(cache.model) or "",
        }
        if uneven and is_uneven(cache.policy, {layer.fill for layer in cache.governed}):
            return cls._uneven(*saved_state(cache), cache.policy, **what)
        exported = cache.to_dynamic_cache()
        keys, values = (
            tuple(getattr(layer, name)[0].transpose(0, 1).contiguous() for layer in exported.layers)
            for name in ("keys", "values")
        )
        return cls(keys, values, **what)

    @classmethod
    def from_file(cls, path: str | Path, *, uneven: bool = False) -> Prefix:
        """Return the prefix that a saved context or cache is; its units are copied, not mapped.

        Raises:
            ValueError: If the file is none, is damaged, or would be no ordinary prefix, as in `of`.
            OSError: If the file cannot be read.
        """
        return cls.from_saved(read_saved(path), uneven=uneven)

    @classmethod
    def from_saved(cls, saved: SavedCache, *, uneven: bool = False) -> Prefix:
        """Return the prefix that a file that has been read is; see `from_file`."""
        state, backbone = saved.state, saved.backbone
        what: dict[str, Any] = {"tokens": state["seen"], "model_type": backbone.model_type, "backbone": backbone}
        what |= {name: state[name] for name in ("vocab_size", "rotary")} | {"weights": state.get("weights") or ""}
        if uneven and is_uneven(saved.policy, {counters["fill"] for counters in state["layers"]}):
            return cls._uneven(saved.tensors, state, saved.policy, **what)
        return cls(*saved.prefix(), **what)

    @classmethod
    def _uneven(
        cls, tensors: Mapping[str, Tensor], state: Mapping[str, Any], policy: RetentionPolicy, **what: Any
    ) -> Prefix:
        """Return the prefix of a state, as `saved_state` gives it, whose KV heads differ in units."""
        keys, values, counts = uneven_units(tensors, state, policy, what["backbone"], what["rotary"])
        return cls(keys, values, counts=counts, next_position=state["next_position"], **what)

    @property
    def units(self) -> int:
        """Units per KV head, U: the positions that the prefix takes; on average, where they differ."""
        return -(-sum(map(sum, self.counts)) // sum(map(len, self.counts))) if self.counts else len(self.keys[0])

    @property
    def end(self) -> int:
        """The position of the token that follows."""
        return self.next_position if self.counts else self.units

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shape (U, K, D) of all its layers, U as in `units`; of something that is damaged several."""
        layers = zip((*self.keys, *self.values), 2 * (self.counts or ((),) * len(self.keys)), strict=True)
        return {
            (self.units, len(counts), one.shape[-1]) if sum(counts) == len(one) else tuple(one.shape)
            for one, counts in layers
        }

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the units: contexts that are the same have the same, whatever their names and files."""
        total = hashlib.sha256(repr((self.counts, self.end)).encode() if self.counts else b"")
        for tensor in (*self.keys, *self.values):
            total.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
            total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return total.digest()

    @cached_property
    def placeholders(self) -> list[int]:
        """U token ids drawn from the digest, which stand for the units in a prompt.

        Engines find what they hold by the ids of a prompt. Ids of other content are others, so that no two contexts
        meet in an engine's own prefix cache.
        """
        drawn = hashlib.shake_256(self.digest).digest(8 * self.units)
        return [int.from_bytes(drawn[at : at + 8], "little") % self.vocab_size for at in range(0, len(drawn), 8)]
