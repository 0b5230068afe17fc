"""Tests the pool as SGLang's HiCache storage, with SGLang's own factory, configuration and
descriptors. In these tests, the pool is a dictionary. Needs SGLang."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("sglang.srt.mem_cache.storage.backend_factory")

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from moonpool_engine.sglang.hicache_backend import MoonpoolHiCache, UnsupportedError
from moonpool_engine.sglang.page_store import Piece

PAGE, LAYERS, HEADS, WIDTH, PAGES = 4, 3, 2, 8, 16
EXTRA = {
    "backend_name": "moonpool",
    "module_path": "moonpool_engine.sglang.hicache_backend",
    "class_name": "MoonpoolHiCache",
    "interface_v1": 1,
    "model_identity": "weights",
}


class Blocks:
    """A pool in this process."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    def exists(self, keys: Sequence[bytes]) -> int:
        return next((n for n, key in enumerate(keys) if key not in self.blocks), len(keys))

    def get(self, keys: Sequence[bytes], addresses: Sequence[list[Piece]]) -> list[bool]:
        return [self._get(key, pieces) for key, pieces in zip(keys, addresses, strict=True)]

    def _get(self, key: bytes, pieces: list[Piece]) -> bool:
        data = self.blocks.get(key)
        if data is None or len(data) != sum(size for _, size in pieces):
            return False
        for pointer, size in pieces:
            ctypes.memmove(pointer, data[:size], size)
            data = data[size:]
        return True

    def put(self, keys: Sequence[bytes], addresses: Sequence[list[Piece]]) -> list[bool]:
        for key, pieces in zip(keys, addresses, strict=True):
            self.blocks[key] = b"".join(ctypes.string_at(*piece) for piece in pieces)
        return [True] * len(keys)

    def close(self) -> None:
        self.blocks.clear()


class HostMemory:
    """Host memory of plain attention, with the methods of SGLang's class that a backend calls."""

    storage_format_tag = None
    layer_num, head_num, head_dim, dtype, page_size = LAYERS, HEADS, WIDTH, torch.float16, PAGE

    def __init__(self, layout: str = "page_first") -> None:
        self.layout = layout
        shape = (PAGES * PAGE, LAYERS) if layout == "page_first" else (LAYERS, PAGES * PAGE)
        self.kv_buffer = torch.randn((2, *shape, HEADS, WIDTH)).half()

    def page(self, number: int) -> torch.Tensor:
        tokens = slice(number * PAGE, (number + 1) * PAGE)
        if self.layout == "page_first":
            return self.kv_buffer[:, tokens]
        return self.kv_buffer[:, :, tokens]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pointers, sizes = [], []
        for index in indices.tolist()[::PAGE]:
            page = self.page(index // PAGE)
            parts = page if self.layout == "page_first" else page.flatten(0, 1)
            for part in parts:
                pointers.append(part.data_ptr())
                sizes.append(part.numel() * part.element_size())
        return pointers, sizes


def config(**changes: Any) -> HiCacheStorageConfig:
    known: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 2,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "m",
        "extra_config": EXTRA,
    }
    return HiCacheStorageConfig(**(known | changes))


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    pool = Blocks()
    monkeypatch.setattr(MoonpoolHiCache, "open_client", staticmethod(lambda *_: pool))
    return pool


def backend(memory: HostMemory, **changes: Any) -> MoonpoolHiCache:
    made = StorageBackendFactory.create_backend("dynamic", config(**changes), memory)
    assert isinstance(made, MoonpoolHiCache)
    made.register_mem_pool_host(memory)
    made.on_host_pools_registered()
    return made


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


HASHES = [f"{number:064x}" for number in range(6)]


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_as_they_were(layout: str) -> None:
    memory = HostMemory(layout)
    store = backend(memory)
    stored = [memory.page(number).clone() for number in (3, 5, 1)]
    assert store.batch_exists(HASHES) == 0
    assert store.batch_set_v1(HASHES[:3], indices(3, 5, 1)) == [True] * 3
    assert store.batch_exists(HASHES) == 3 and store.exists(HASHES[2])
    later = HostMemory(layout)  # as after a restart of SGLang
    again = backend(later)
    assert again.batch_get_v1(HASHES[:4], indices(7, 8, 9, 10)) == [True, True, True, False]
    for page, number in zip(stored, (7, 8, 9), strict=True):
        assert torch.equal(later.page(number), page)
    assert again.batch_get_v1([], indices(0)[:0]) == []


def test_nothing_is_taken_for_anothers() -> None:
    backend(HostMemory()).batch_set_v1(HASHES, indices(*range(6)))
    assert backend(HostMemory()).batch_exists(HASHES) == 6
    others: list[dict[str, Any]] = [
        {"tp_rank": 1},
        {"tp_size": 4},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"model_name": "m-fp8"},
        {"is_mla_model": True},
        {"should_split_heads": True},
        {"extra_config": EXTRA | {"model_identity": "other weights"}},
    ]
    for changes in others:
        assert backend(HostMemory(), **changes).batch_exists(HASHES) == 0, changes
    assert backend(HostMemory("layer_first")).batch_exists(HASHES) == 0
    wider = HostMemory()
    wider.dtype = torch.bfloat16
    assert backend(wider).batch_exists(HASHES) == 0


def test_ranks_of_a_replicated_cache_share_its_pages() -> None:
    backend(HostMemory(), is_mla_model=True).batch_set_v1(HASHES, indices(*range(6)))
    other = backend(HostMemory(), is_mla_model=True, tp_rank=1)
    assert other.batch_exists(HASHES) == 6
    assert backend(HostMemory(), is_mla_model=True, dp_rank=1).batch_exists(HASHES) == 6


def test_the_older_interface_with_tensors() -> None:
    store = backend(HostMemory())
    values = [torch.randn(2 * PAGE * LAYERS * HEADS * WIDTH).half() for _ in range(3)]
    assert store.batch_set(HASHES[:3], values)
    assert store.set(HASHES[3], values[0].view(2, -1).T)  # not contiguous
    targets = [torch.zeros_like(values[0]) for _ in range(5)]
    found = store.batch_get(HASHES[:5], targets)
    assert [one is not None for one in found] == [True] * 4 + [False]
    assert all(torch.equal(a, b) for a, b in zip(values, targets, strict=False))
    assert torch.equal(targets[3], values[0].view(2, -1).T.flatten())
    assert store.get(HASHES[0], torch.zeros(3)) is None  # None, because the tensor has another size
    assert store.batch_get(HASHES[:2], None) == [None, None]


def test_pools_of_hybrid_models() -> None:
    memory, state = HostMemory(), HostMemory("layer_first")
    store = backend(memory)
    store.register_mem_host_pool_v2(state, PoolName.MAMBA)
    store.register_mem_host_pool_v2(state, PoolName.INDEXER)
    store.batch_set_v1(HASHES[:5], indices(*range(5)))

    def transfer(name: PoolName, policy: PoolHitPolicy, *pages: int) -> PoolTransfer:
        keys = [HASHES[page] for page in pages]
        return PoolTransfer(name, indices(*pages), keys=keys, hit_policy=policy)

    trailing, every = PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES
    last = transfer(PoolName.MAMBA, trailing, 2)
    first = transfer(PoolName.INDEXER, every, 0, 1, 2, 3)
    results = store.batch_set_v2([last, first])
    assert results == {PoolName.MAMBA: [True], PoolName.INDEXER: [True] * 4}
    found = store.batch_exists_v2(HASHES, [last, first])
    assert found.kv_hit_pages == 3 and found.restorable_prefix_pages == [3]
    assert found.extra_pool_hit_pages == {PoolName.KV: 5, PoolName.MAMBA: 3, PoolName.INDEXER: 4}
    assert store.batch_exists_v2(HASHES).kv_hit_pages == 5
    before = state.page(2).clone()
    state.page(2).zero_()
    assert store.batch_get_v2([last]) == {PoolName.MAMBA: [True]}
    assert torch.equal(state.page(2), before)
    wrong = PoolTransfer(PoolName.MAMBA, indices(1)[:2], keys=[HASHES[1]])
    assert store.batch_set_v2([wrong]) == {PoolName.MAMBA: [False]}


def test_what_cannot_be_served_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"weights.* model_path"):
        backend(HostMemory(), extra_config={**EXTRA, "model_identity": ""})
    monkeypatch.delattr("sglang.srt.mem_cache.utils.storage_namespace_seed")
    with pytest.raises(UnsupportedError, match="two tenants"):
        backend(HostMemory())
