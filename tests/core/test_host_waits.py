"""Reading and answering never wait for the device: scores, selection and compaction stay where the units are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import build, prompt
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from locret import RetainingHeads, RetentionCache, RetentionPolicy, prefill

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__iter__", "__contains__"}
SIZED_BY_VALUES = {
    *("local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "repeat_interleave"),
}


class _Operators(TorchDispatchMode):
    """Notes operations whose result is on the host, or whose shape follows from values."""

    def __init__(self, seen: list[str], more: tuple[str, ...]) -> None:
        super().__init__()
        self.seen, self.names = seen, {*SIZED_BY_VALUES, *more}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        masked = any(index is not None and index.dtype == torch.bool for index in indices)
        if masked or name.lstrip("_") in self.names:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Notes values that Python reads of a tensor."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(*more: str) -> Iterator[list[str]]:
    """Collect what would make a host wait for its device: values read, shapes that follow from values, and `more`."""
    seen: list[str] = []
    with _Operators(seen, more), _Functions(seen):
        yield seen


def test_the_watch_sees_a_host_that_waits() -> None:
    for read in (torch.Tensor.item, torch.Tensor.tolist, bool, lambda t: t.view(1)[t.view(1) > 0]):
        with host_reads() as seen:
            read(torch.tensor(1.0))
        assert seen


@pytest.mark.parametrize("positions", ["compact", "original"])
@pytest.mark.parametrize("scorer", ["retaining_heads", "snapkv", "h2o"])
@pytest.mark.parametrize("family", ["llama", "phi3-longrope"])
def test_chunks_after_the_first_wait_for_nothing(family: str, scorer: str, positions: str) -> None:
    model = build(family)
    with host_reads() as plain:
        model.model(prompt(10), position_ids=torch.arange(10).unsqueeze(0))
    if plain:
        pytest.skip("this transformers itself reads positions on the host, to choose between LongRoPE's factors")
    chosen = RetainingHeads.for_model(model, hidden_dim=16, seed=3) if scorer == "retaining_heads" else scorer
    policy = RetentionPolicy(budget=24, chunk_size=10, stabilizers=5, local_len=6, positions=positions)
    cache, waits = RetentionCache(model, chosen, policy), []
    with host_reads() as seen:

        def chunk_done(_cache: RetentionCache) -> None:
            waits.append(list(seen))
            seen.clear()

        prefill(model, prompt(77), cache, on_chunk=chunk_done)
    assert len(waits) == 8
    assert not any(waits[1:])
    assert not seen
