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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from locret.backbone.adapters import find_decoder
from locret.backbone.rotary import rotary_parameters
from locret.backbone.shape import Backbone
from locret.cache.cache import RetentionCache
from locret.cache.cache_file import SavedCache, read_saved
from locret.cache.export import check_one_row

if TYPE_CHECKING:
    from locret.conversation.context import Context


@dataclass(frozen=True, eq=False)
class Prefix:
    """The units of one context, as an engine would hold them for a prompt of as many tokens.

    Args:
        keys: For each layer (U, K, D), rotated to the positions 0, 1, ..., U - 1.
        values: For each layer (U, K, D).
        vocab_size: Token ids that the backbone knows.
        tokens: Tokens that were read.
        model_type: The backbone's, which tells an engine in which order it holds a head.
        rotary: How the backbone rotates keys, as its config says it.
        backbone: Its shape; None where nobody has said it.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    vocab_size: int
    tokens: int
    model_type: str = ""
    rotary: Mapping[str, Any] = field(default_factory=dict)
    backbone: Backbone | None = None

    @classmethod
    def of(cls, read: RetentionCache | Context) -> Prefix:
        """Return the prefix that a cache or a context is.

        Raises:
            ValueError: If it would be no ordinary prefix; see `RetentionCache.to_dynamic_cache`. Or if it has more than
                one row.
        """
        cache = read if isinstance(read, RetentionCache) else read.cache
        check_one_row(cache.rows)
        exported = cache.to_dynamic_cache()
        keys, values = (
            tuple(getattr(layer, name)[0].transpose(0, 1).contiguous() for layer in exported.layers)
            for name in ("keys", "values")
        )
        vocab_size = int(cache.model.config.get_text_config().vocab_size)
        rotary = rotary_parameters(find_decoder(cache.model))
        return cls(keys, values, vocab_size, cache.seen, cache.backbone.model_type, rotary, cache.whole)

    @classmethod
    def from_file(cls, path: str | Path) -> Prefix:
        """Return the prefix that a saved context or cache is; its units are copied, not mapped.

        Raises:
            ValueError: If the file is none, is damaged, or would be no ordinary prefix.
            OSError: If the file cannot be read.
        """
        return cls.from_saved(read_saved(path))

    @classmethod
    def from_saved(cls, saved: SavedCache) -> Prefix:
        """Return the prefix that a file that has been read is."""
        state, backbone = saved.state, saved.backbone
        keys, values = saved.prefix()
        return cls(keys, values, state["vocab_size"], state["seen"], backbone.model_type, state["rotary"], backbone)

    @property
    def units(self) -> int:
        """Units per KV head, U: the positions that the prefix takes."""
        return len(self.keys[0])

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the units: contexts that are the same have the same, whatever their names and files."""
        total = hashlib.sha256()
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
