"""One reading of a GGUF file: transformers asks for it anew for the config, the tokenizer and the weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from locret.backbone.instrument import replaced
from locret.heads.fingerprint import NORM

_STRING, _ARRAY = 8, 9
"""Types of a field in a GGUF file."""

_lock = threading.RLock()
_held: dict[tuple[Any, ...], Any] = {}
"""The reader of the file that was read last, by what tells one file from another, until its weights are loaded."""


@contextmanager
def read_once(file: str | None, *, last: bool = False) -> Iterator[None]:
    """Let transformers find, while this lasts, what was read of a GGUF file already; without a file nothing happens.

    What was read is let go of after the `last` time, also if that fails.
    """
    if file is None:
        yield
        return
    import gguf
    from transformers import modeling_gguf_pytorch_utils as unpacking

    # transformers asks for the names of a model's tensors at each of its modules.
    names, values = cache(gguf.get_tensor_name_map), partial(_value, unpacking._gguf_parse_value)
    with (
        _lock,
        replaced(gguf, "GGUFReader", _reader),
        replaced(gguf, "get_tensor_name_map", names),
        replaced(unpacking, "_gguf_parse_value", values),
    ):
        try:
            yield
        finally:
            if last:
                _held.clear()


@contextmanager
def without_bars() -> Iterator[None]:
    """Load without the bars of transformers, which nobody has asked for; those of downloads stay."""
    from transformers import modeling_gguf_pytorch_utils as unpacking
    from transformers.utils import logging

    with _lock, replaced(unpacking, "tqdm", partial(unpacking.tqdm, disable=True)), ExitStack() as ending:
        before = logging.set_tqdm_hook(lambda make, args, how: make(*args, **{**how, "disable": True}))
        ending.callback(logging.set_tqdm_hook, before)
        yield


def norms(file: str | os.PathLike[str]) -> list[Tensor]:
    """Return the weights of a file's norms."""
    with _lock:
        return [torch.tensor(one.data) for one in _reader(file).tensors if one.name.endswith(NORM)]


def _reader(path: str | os.PathLike[str], mode: str = "r") -> Any:
    found = os.stat(path)
    key = os.path.realpath(path), mode, found.st_size, found.st_mtime_ns, found.st_ino
    if key not in _held:
        made = _reader_class()(path, mode)
        _held.clear()
        _held[key] = made
    return _held[key]


def _value(otherwise: Callable[[Any, Any], Any], part: Any, types: list[int]) -> Any:
    """Return what a part of a field says, as transformers does, which takes ten times as long for a vocabulary."""
    if len(types) > 2 or part.ndim != 1:
        return otherwise(part, types)
    return part.tobytes().decode() if types[-1] == _STRING else part.item()


@cache
def _reader_class() -> type:
    import numpy as np
    from gguf import GGUFValueType
    from gguf.gguf_reader import GGUFReader

    scalars: dict[Any, Any] = GGUFReader.gguf_scalar_to_np

    class Reader(GGUFReader):
        """Slices a plain array, which takes a third of the time of slicing a memory map, and reads arrays in one go."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            if raw_type != _ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            plain, entries = scalars.get(int(kind[0])), int(count[0])
            if not entries or (plain is None and kind[0] != _STRING):
                return super()._get_field_parts(orig_offs, raw_type)
            at, data = orig_offs + 12, cast(Any, self._data)
            if plain:
                end = at + entries * np.dtype(plain).itemsize
                values = data[at:end].view(plain)
                parts, which = [values[i : i + 1] for i in range(len(values))], range(2, 2 + entries)
            else:
                parts, end, whole = [], at, memoryview(data)
                for _ in range(entries):
                    at, end = end, end + 8 + int.from_bytes(whole[end : end + 8], "little")
                    if end > len(data):
                        break
                    parts += [data[at : at + 8].view(np.uint64), data[at + 8 : end]]
                which = range(3, 2 + 2 * entries, 2)
            if end > len(data):
                raise ValueError("an array is said to reach beyond the file's end")
            return end - orig_offs, [kind, count, *parts], list(which), [*map(GGUFValueType, (raw_type, kind[0]))]

    return Reader
