r"""Contexts in SGLang: a storage backend of its hierarchical cache that finds pages of saved contexts. UNTRIED.

    python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache --page-size 64 \
        --hicache-storage-prefetch-policy wait_complete --hicache-storage-backend dynamic \
        --hicache-storage-backend-extra-config '{"backend_name": "locret", "module_path": "locret.engines.sglang",
            "class_name": "LocretStorage", "prefetch_threshold": 64, "contexts": "FOLDER"}'

A prompt that begins with the placeholder ids of a context in the folder (`Prefix.placeholders`) finds its pages here,
as SGLang names a page by the SHA-256 of its ids and those before it. Written against the source of SGLang 0.5.23 and
tested against its interface; it has not run in the engine. What SGLang does not find it takes for text, without a word:
units must be a multiple of the page size, the file must be there before it is asked, and prefetching must wait and have
no threshold above the units, as in the command.
"""

# U units, K KV heads, D head dim

from __future__ import annotations

import hashlib
import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from torch import Tensor

from locret.engines.folder import ContextFolder, Listed, Stamp
from locret.engines.prefix import Prefix

_ORDERS = {
    "layer_first": (0, 1, 2, 3, 4),
    "page_first": (0, 2, 1, 3, 4),
    "page_first_direct": (0, 1, 2, 3, 4),
    "page_head": (0, 3, 2, 1, 4),
}
"""Per layout of the host's memory, the order of (keys and values, layers, units, heads, D) in a page."""
_IN_MEMORY = 16

_logger = logging.getLogger(__name__)


def page_keys(ids: Sequence[int], page_size: int) -> list[str]:
    """Return what SGLang calls the whole pages of a prompt."""
    keys, digest = [], b""
    for start in range(0, len(ids) - page_size + 1, page_size):
        digest = hashlib.sha256(digest + array("I", ids[start : start + page_size]).tobytes()).digest()
        keys.append(digest.hex())
    return keys


class LocretStorage(HiCacheStorage):
    """Pages of the contexts in a folder; what SGLang itself would store is dropped.

    Args:
        storage_config: SGLang's; `extra_config` names the folder as `contexts`.
        options: Further options of SGLang, which are not used.

    Raises:
        ValueError: If there is no such folder, or SGLang is set up in a way in which units cannot be handed over.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, options: dict[str, Any] | None = None) -> None:
        del options
        folder = (storage_config.extra_config or {}).get("contexts")
        if not isinstance(folder, str) or not folder:
            raise ValueError('hicache-storage-backend-extra-config needs "contexts", the folder with saved contexts')
        split = storage_config.attn_cp_size > 1 or storage_config.dcp_size > 1 or storage_config.should_split_heads
        if storage_config.is_mla_model or split:
            raise ValueError(
                "units are keys and values of whole heads and pages; serve without latent attention, context "
                "parallelism and tp_lcm_size"
            )
        self._tp_rank, self._tp_size = storage_config.tp_rank, storage_config.tp_size
        self._folder = ContextFolder(folder, self._check)
        self._lock = threading.Lock()
        self._pages: dict[str, tuple[Listed, int]] = {}
        self._complained: set[tuple[Path, Stamp]] = set()
        self._held: OrderedDict[tuple[Path, Stamp], Prefix] = OrderedDict()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn how the host's memory is laid out, and look for contexts.

        Raises:
            ValueError: If it is laid out in a way that is not known here.
        """
        if mem_pool_host.layout not in _ORDERS:
            raise ValueError(f"hicache-mem-layout {mem_pool_host.layout} is not known; choose one of {list(_ORDERS)}")
        super().register_mem_pool_host(mem_pool_host)
        with self._lock:
            self._refresh()

    def exists(self, key: str) -> bool:
        """Return whether a page is one of a context's."""
        with self._lock:
            if key not in self._pages:
                self._refresh()
            return key in self._pages

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return how many pages there are from the start; none where a page has more than keys and values."""
        others = [one for one in pool_transfers or [] if one.name != PoolName.KV]
        hits = 0 if others else self.batch_exists(keys, extra_info)
        return PoolTransferResult(hits, {PoolName.KV: hits} if hits else {})

    def get(self, key: str, target_location: Tensor | None = None, target_sizes: Any = None) -> Tensor | None:
        """Return a page as the host's memory has it, flat; None if there is none."""
        if not self.exists(key):
            return None
        try:
            with self._lock:
                listed, number = self._pages[key]
                page = self._page(self._prefix(listed), number)
        except (KeyError, OSError, ValueError) as error:
            _logger.error("page %s of a context cannot be read, and is taken for text: %s", key, error)
            return None
        return page if target_location is None else target_location.copy_(page)

    def batch_get(
        self, keys: list[str], target_locations: list[Tensor] | None = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        """Return pages, as `get`."""
        return [
            self.get(key, target_locations[number] if target_locations else None) for number, key in enumerate(keys)
        ]

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Write pages into the host's memory, and return which there were."""
        pages = self.batch_get(keys)
        for number, page in enumerate(pages):
            if page is not None:
                self.mem_pool_host.set_from_flat_data_page(
                    int(host_indices[number * self.mem_pool_host.page_size]), page
                )
        return [page is not None for page in pages]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Write pages of keys and values into the host's memory; other pools find nothing."""
        return {
            one.name: self.batch_get_v1(one.keys or [], one.host_indices, extra_info)
            if one.name == PoolName.KV
            else [False] * len(one.keys or [])
            for one in transfers
        }

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Drop a page of text: contexts are written by Locret alone."""
        return True

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Drop pages of text."""
        return True

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        """Drop pages of text."""
        return [True] * len(keys)

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Drop pages of text."""
        return {one.name: [True] * len(one.keys or []) for one in transfers}

    def _check(self, path: Path, prefix: Prefix) -> None:
        pool, heads = self.mem_pool_host, max(1, prefix.keys[0].shape[1] // self._tp_size)
        last = pool.start_layer + pool.layer_num
        if prefix.units % pool.page_size:
            raise ValueError(
                f"{path.name} has {prefix.units} units, no multiple of the page size {pool.page_size}, and the last "
                "ones would be taken for text; shrink it, or choose another page size"
            )
        if last > len(prefix.keys) or (heads, prefix.keys[0].shape[2]) != (pool.head_num, pool.head_dim):
            raise ValueError(
                f"{path.name} is of another backbone, with {len(prefix.keys)} layers of {heads} heads here"
            )

    def _refresh(self) -> None:
        try:
            self._folder.refresh()
        except OSError as error:
            _logger.error("the folder of contexts cannot be listed, so what it held before counts: %s", error)
            return
        self._pages = {}
        for listed in self._folder.files:
            if not listed.wrong:
                keys = page_keys(listed.ids, self.mem_pool_host.page_size)
                self._pages.update({key: (listed, number) for number, key in enumerate(keys)})
            elif (listed.path, listed.stamp) not in self._complained:
                self._complained.add((listed.path, listed.stamp))
                _logger.error("%s cannot be asked: %s", listed.path, listed.wrong)

    def _prefix(self, listed: Listed) -> Prefix:
        name = listed.path, listed.stamp
        if name not in self._held:
            prefix = Prefix.from_file(listed.path)
            if tuple(prefix.placeholders) != listed.ids:
                raise ValueError(f"{listed.path} has changed since its ids were asked")
            self._held[name] = prefix
            while len(self._held) > _IN_MEMORY:
                self._held.popitem(last=False)
        self._held.move_to_end(name)
        return self._held[name]

    def _page(self, prefix: Prefix, number: int) -> Tensor:
        pool = self.mem_pool_host
        units = slice(number * pool.page_size, (number + 1) * pool.page_size)
        first = self._tp_rank * prefix.keys[0].shape[1] // self._tp_size
        heads, layers = slice(first, first + pool.head_num), slice(pool.start_layer, pool.start_layer + pool.layer_num)
        page = torch.stack(
            [torch.stack([states[units, heads] for states in of[layers]]) for of in (prefix.keys, prefix.values)]
        )
        return page.permute(_ORDERS[pool.layout]).to(pool.dtype).flatten()
