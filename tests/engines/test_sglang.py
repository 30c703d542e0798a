"""The storage backend for SGLang against the interface of its hierarchical cache; the engine itself does not run here.

Where SGLang is on the path, the interface is its own module (without the package's `__init__`, which wants a GPU's
libraries); elsewhere it is written down below as it is in 0.5.23.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from core.families import build, prompt
from torch import Tensor

from locret import RetentionCache, RetentionPolicy, prefill
from locret.engines.prefix import Prefix

PARTS = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
MODULE = "sglang.srt.mem_cache.hicache_storage"


class WrittenDown(ABC):
    """What 0.5.23 asks a backend for."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool: ...

    @abstractmethod
    def batch_set(self, keys: list[str], values: Any = None, locations: Any = None, sizes: Any = None) -> bool: ...

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return next((number for number, key in enumerate(keys) if not self.exists(key)), len(keys))


@dataclass
class Config:
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = None
    should_split_heads: bool = False
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1


class Names:
    KV = "kv"


@dataclass
class Transfer:
    name: str
    host_indices: Tensor | None = None
    keys: list[str] | None = None


@dataclass
class Result:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int] = field(default_factory=dict)


@dataclass
class Pool:
    """Memory of the host for pages, as `MHATokenToKVPoolHost` lays it out."""

    layout: str
    page_size: int = 4
    layer_num: int = 3
    head_num: int = 2
    head_dim: int = 8
    start_layer: int = 0
    size: int = 64
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        pages, units = self.size // self.page_size, self.page_size
        layers, heads, dim = self.layer_num, self.head_num, self.head_dim
        shapes = {
            "layer_first": (2, layers, self.size, heads, dim),
            "page_first": (2, self.size, layers, heads, dim),
            "page_first_direct": (2, pages, layers, units, heads, dim),
            "page_head": (2, pages, heads, units, layers, dim),
        }
        self.kv_buffer = torch.zeros(shapes[self.layout], dtype=self.dtype)

    def set_from_flat_data_page(self, index: int, page: Tensor) -> None:
        if self.layout == "layer_first":
            part = self.kv_buffer[:, :, index : index + self.page_size]
        elif self.layout == "page_first":
            part = self.kv_buffer[:, index : index + self.page_size]
        else:
            part = self.kv_buffer[:, index // self.page_size : index // self.page_size + 1]
        part.copy_(page.reshape(part.shape))

    def unit(self, slot: int) -> Tensor:
        """(keys and values, layers, heads, D) of one slot."""
        page, offset = divmod(slot, self.page_size)
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, slot]
        if self.layout == "page_first":
            return self.kv_buffer[:, slot]
        if self.layout == "page_first_direct":
            return self.kv_buffer[:, page, :, offset]
        return self.kv_buffer[:, page, :, offset].transpose(1, 2)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend's module, over the interface that there is."""
    found = importlib.machinery.PathFinder.find_spec("sglang")
    for name in PARTS:
        module = ModuleType(name)
        where = Path(*name.split(".")[1:])
        module.__path__ = [str(Path(found.origin).parent / where)] if found is not None and found.origin else []
        monkeypatch.setitem(sys.modules, name, module)
    if found is None:
        interface: Any = ModuleType(MODULE)
        interface.HiCacheStorage, interface.HiCacheStorageConfig, interface.PoolName = WrittenDown, Config, Names
        interface.PoolTransfer, interface.PoolTransferResult, interface.HiCacheStorageExtraInfo = (
            Transfer,
            Result,
            object,
        )
        monkeypatch.setitem(sys.modules, MODULE, interface)
    monkeypatch.delitem(sys.modules, "locret.engines.sglang", raising=False)
    module = importlib.import_module("locret.engines.sglang")
    yield module
    sys.modules.pop("locret.engines.sglang")


@pytest.fixture
def book(tmp_path: Path) -> Prefix:
    """A saved context of 24 units."""
    model = build("llama")
    cache = RetentionCache(model, "key_norm", RetentionPolicy(budget=16, chunk_size=12, stabilizers=4, local_len=8))
    prefill(model, prompt(71), cache)
    from locret import save_cache

    save_cache(cache, tmp_path / "book.safetensors")
    return Prefix.from_file(tmp_path / "book.safetensors")


def storage(sglang: Any, folder: Path, pool: Pool, **changes: Any) -> Any:
    needed = {name: Config.__dataclass_fields__[name].default for name in list(Config.__dataclass_fields__)[:10]}
    config = sglang.HiCacheStorageConfig(**{**needed, "extra_config": {"contexts": str(folder)}, **changes})
    made = sglang.LocretStorage(config, {})
    made.register_mem_pool_host(pool)
    return made


def keys_of(ids: list[int], page_size: int) -> list[str]:
    """What SGLang calls pages: SHA-256 of the page before and of the ids as four bytes each, the lowest first."""
    keys, before = [], b""
    for start in range(0, len(ids), page_size):
        before = hashlib.sha256(
            before + b"".join(one.to_bytes(4, "little") for one in ids[start : start + page_size])
        ).digest()
        keys.append(before.hex())
    return keys


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pages_of_a_context_land_where_the_engine_reads_them(
    sglang: Any, tmp_path: Path, book: Prefix, layout: str
) -> None:
    pool = Pool(layout)
    store, keys = storage(sglang, tmp_path, pool), keys_of(book.placeholders, 4)
    assert sglang.page_keys(book.placeholders + [1, 2], 4) == keys
    assert store.batch_exists([*keys, "00" * 32]) == 6
    slots = torch.arange(8, 32)
    assert store.batch_get_v1(keys, slots) == [True] * 6
    for unit, slot in enumerate(slots.tolist()):
        wanted = torch.stack([torch.stack([states[unit] for states in of]) for of in (book.keys, book.values)])
        assert torch.equal(pool.unit(slot), wanted)
    flat = store.batch_get([keys[2], "00" * 32], [torch.empty(2 * 3 * 4 * 2 * 8) for _ in range(2)])
    pool.set_from_flat_data_page(0, flat[0])
    assert torch.equal(pool.unit(1), pool.unit(8 + 9))
    assert flat[1] is None


def test_the_newer_interface_finds_keys_and_values_only(sglang: Any, tmp_path: Path, book: Prefix) -> None:
    store, keys = storage(sglang, tmp_path, Pool("page_first")), keys_of(book.placeholders, 4)
    assert store.batch_exists_v2(keys).kv_hit_pages == 6
    other = sglang.PoolTransfer(name="mamba", host_indices=torch.arange(4), keys=keys[:1])
    mine = sglang.PoolTransfer(name=sglang.PoolName.KV, host_indices=torch.arange(8), keys=keys[:2])
    assert store.batch_exists_v2(keys, [other]).kv_hit_pages == 0
    assert store.batch_get_v2([mine, other]) == {"kv": [True, True], "mamba": [False]}
    assert store.set("k", torch.zeros(1))
    assert store.batch_set(["k"], [torch.zeros(1)])
    assert store.batch_set_v1(["k"], torch.arange(4)) == [True]
    assert not store.exists("k")


def test_each_rank_takes_its_own_heads_and_layers(sglang: Any, tmp_path: Path, book: Prefix) -> None:
    for rank in (0, 1):
        pool = Pool("layer_first", head_num=1, layer_num=1, start_layer=2)
        store = storage(sglang, tmp_path, pool, tp_rank=rank, tp_size=2)
        assert store.batch_get_v1(keys_of(book.placeholders, 4)[:1], torch.arange(4)) == [True]
        assert torch.equal(pool.kv_buffer[0, 0, :4, 0], book.keys[2][:4, rank])


def test_new_contexts_are_found_and_unusable_ones_are_not(
    sglang: Any, tmp_path: Path, book: Prefix, caplog: pytest.LogCaptureFixture
) -> None:
    store, keys = storage(sglang, tmp_path, Pool("layer_first")), keys_of(book.placeholders, 4)
    written = (tmp_path / "book.safetensors").read_bytes()
    (tmp_path / "book.safetensors").unlink()
    assert not store.exists("00" * 32)
    assert store.batch_exists(keys) == 0
    (tmp_path / "again.safetensors").write_bytes(written)
    assert store.batch_exists(keys) == 6
    (tmp_path / "no.safetensors").write_bytes(b"nothing")
    assert not store.exists("00" * 32)
    assert "no.safetensors cannot be asked" in caplog.text
    assert (
        storage(sglang, tmp_path, Pool("layer_first", page_size=16)).batch_exists(keys_of(book.placeholders, 16)) == 0
    )
    assert "24 units, no multiple of the page size 16" in caplog.text
    assert storage(sglang, tmp_path, Pool("layer_first", head_dim=16)).batch_exists(keys) == 0
    assert "of another backbone" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra_config": {}}, 'needs "contexts"'),
        ({"extra_config": {"contexts": "/no/such/folder"}}, "is no folder"),
        ({"is_mla_model": True}, "serve without latent attention"),
        ({"attn_cp_size": 2}, "context parallelism"),
    ],
)
def test_what_cannot_be_right_is_refused(sglang: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        storage(sglang, tmp_path, Pool("layer_first"), **changes)
    unknown = Pool("layer_first")
    unknown.layout = "page_unified"
    with pytest.raises(ValueError, match="hicache-mem-layout page_unified is not known"):
        storage(sglang, tmp_path, unknown)
