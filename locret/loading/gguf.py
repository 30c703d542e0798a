"""One reading of a GGUF file: transformers asks for it anew for the config, the tokenizer and the weights."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from locret.backbone.instrument import replaced
from locret.heads.fingerprint import NORM

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

    # transformers asks for the names of a model's tensors at each of its modules.
    names = cache(gguf.get_tensor_name_map)
    with _lock, replaced(gguf, "GGUFReader", _reader), replaced(gguf, "get_tensor_name_map", names):
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


@cache
def _reader_class() -> type:
    import numpy as np
    from gguf.gguf_reader import GGUFReader

    class Reader(GGUFReader):
        """Slices a plain array, because slices of a memory map take three times as long."""

        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    return Reader
