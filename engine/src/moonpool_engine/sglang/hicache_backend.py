"""Stores SGLang's HiCache in moonpool's pool of a host.

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "moonpool", "interface_v1": 1,
        "module_path": "moonpool_engine.sglang.hicache_backend", "class_name": "MoonpoolHiCache"}'

SGLang names a page by a hash of its tokens and all tokens before it. The model's identity, the
rank's share and the layout of host memory are added, so no page is taken for another model's,
another rank's, or one that is laid out in another way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sglang.srt.mem_cache.utils as sglang_hashes
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolTransfer,
    PoolTransferResult,
)

from moonpool.host_pool.places import default_socket
from moonpool_engine.sglang.page_store import BlockClient, PageStore, Piece, namespace_of, pieces_of
from moonpool_engine.sglang.pool_client import HostPoolClient
from moonpool_engine.vllm.model_identity import UnknownModelError, hash_folder

KV = "kv"
"""The pool of host memory that has a page for every token."""
Opener = Callable[[dict[str, Any], bytes], BlockClient]
"""Opens the pool for this configuration and namespace."""


def open_host_pool(extra: dict[str, Any], namespace: bytes) -> BlockClient:
    """The pool of this host, at the socket `pool` of the configuration, or else at the default
    socket of `moonpool pool serve`."""
    named = extra.get("pool")
    path = Path(named) if named else default_socket()
    sizes = [int(size) for size in extra.get("piece_bytes", ())]
    return HostPoolClient(path, namespace, str(extra["model_identity"]), sizes)


class UnsupportedError(RuntimeError):
    """This SGLang, or its configuration, cannot use the pool; one line gives the reason."""


class MoonpoolHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types
    """SGLang makes one object for each rank. SGLang calls it from threads of its own, one for loads
    and one for stores."""

    open_client: Opener = staticmethod(open_host_pool)
    """How the pool is opened; tests have another one."""

    def __init__(self, storage_config: HiCacheStorageConfig, _kwargs: Any = None) -> None:
        """Raises UnsupportedError."""
        if not hasattr(sglang_hashes, "storage_namespace_seed"):
            raise UnsupportedError(
                "this SGLang names pages of two tenants or two adapters alike; moonpool's pool"
                " needs SGLang 0.5.23 or newer"
            )
        self._config = storage_config
        self._extra = dict(storage_config.extra_config or {})
        self._identity = self._identity_of(storage_config)
        self.registered_pools: dict[str, Any] = {}
        self._namespaces: dict[str, bytes] = {}
        self._store: PageStore | None = None

    # Host memory

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Raises UnsupportedError for memory whose layout is not known."""
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        name = str(host_pool_name)
        self.registered_pools[name] = host_pool
        self._namespaces[name] = self._namespace_of(host_pool)
        if self._store is None:
            extra = self._extra | {"model_identity": self._identity}
            extra |= {"piece_bytes": _piece_bytes(host_pool)}
            client = type(self).open_client(extra, self._namespaces[name])
            self._store = PageStore(client, self._namespaces)

    def _identity_of(self, config: HiCacheStorageConfig) -> str:
        identity = str(self._extra.get("model_identity") or "")
        if not identity:
            folder = Path(str(self._extra.get("model_path") or config.model_name or ""))
            try:
                identity = hash_folder(folder)
            except UnknownModelError as error:
                raise UnsupportedError(
                    f"the pool knows models by the hash of their weights: {error}; name the folder"
                    " as model_path"
                ) from None
        return f"{identity} as {config.model_name}"

    def _namespace_of(self, host_pool: Any) -> bytes:
        """The namespace of the pages in this memory. Replicated caches (MLA) are the same on all
        ranks."""
        config = self._config
        tensor_ranks = (0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size)
        shape = [
            str(getattr(host_pool, name, None))
            for name in (
                "layout",
                "dtype",
                "page_size",
                "layer_num",
                "start_layer",
                "end_layer",
                "head_num",
                "head_dim",
                "v_head_dim",
                "kv_lora_rank",
                "qk_rope_head_dim",
                "kv_cache_dim",
                "storage_format_tag",
            )
        ]
        return namespace_of(
            [
                self._identity,
                type(host_pool).__name__,
                *tensor_ranks,
                config.pp_rank,
                config.pp_size,
                config.attn_cp_rank,
                config.attn_cp_size,
                config.dcp_rank,
                config.dcp_size,
                config.tp_lcm_size,
                config.should_split_heads,
                *shape,
            ]
        )

    # Pages without a copy

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        return self._pages().leading(KV, keys) if keys else 0

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._pages().get(KV, keys, self._addresses(KV, keys, host_indices)) if keys else []

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self._pages().put(KV, keys, self._addresses(KV, keys, host_indices)) if keys else []

    def _addresses(
        self, name: str, keys: Sequence[str], indices: torch.Tensor
    ) -> list[list[Piece]]:
        pointers, sizes = self.registered_pools[name].get_page_buffer_meta(indices)
        return pieces_of(len(keys), pointers, sizes)

    # Several pools of host memory: hybrid models

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Returns the lengths of the prefixes that satisfy every pool's policy, up to the longest
        one."""
        num_pages = self.batch_exists(keys)
        hits: dict[str, int] = {KV: num_pages} if num_pages else {}
        lengths = list(range(1, num_pages + 1))
        for transfer in pool_transfers or ():
            if not lengths:
                break
            fits = self._lengths(transfer, keys[:num_pages])
            if fits:
                hits[transfer.name] = max(fits)
            lengths = [length for length in lengths if length in fits]
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def _lengths(self, transfer: PoolTransfer, keys: Sequence[str]) -> set[int]:
        """Returns the lengths of the prefix of which this pool has what SGLang requires."""
        name, pages = str(transfer.name), self._pages()
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, pages.leading(name, keys) + 1))
        if transfer.hit_policy != PoolHitPolicy.TRAILING_PAGES:
            raise UnsupportedError(f"pages of the pool {name} are kept by {transfer.hit_policy}")
        window = max(len(transfer.keys or ()), 1)
        has = [pages.has(name, key) for key in keys]
        return {
            length
            for length in range(1, len(keys) + 1)
            if all(has[max(length - window, 0) : length])
        }

    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {one.name: self._transfer(one, self._pages().get) for one in transfers}

    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        return {one.name: self._transfer(one, self._pages().put) for one in transfers}

    def _transfer(
        self,
        transfer: PoolTransfer,
        move: Callable[[str, Sequence[str], Sequence[list[Piece]]], list[bool]],
    ) -> list[bool]:
        name, keys, indices = str(transfer.name), transfer.keys or [], transfer.host_indices
        page_tokens = getattr(self.registered_pools[name], "page_size", 1) or 1
        if not keys or indices is None or indices.numel() != len(keys) * page_tokens:
            return [False] * len(keys)
        return move(name, keys, self._addresses(name, keys, indices))

    # Pages as tensors: the older interface

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        found: torch.Tensor | None = self.batch_get([key], [target_location])[0]
        return found

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        tensors: list[torch.Tensor] = list(target_locations or ())
        if len(tensors) != len(keys) or not all(map(_is_plain, tensors)):
            return [None] * len(keys)
        found = self._pages().get(KV, keys, [[_piece(one)] for one in tensors]) if keys else []
        return [one if is_here else None for one, is_here in zip(tensors, found, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        tensors = [one.contiguous() for one in values or () if one is not None]
        if len(tensors) != len(keys) or not all(map(_is_plain, tensors)):
            return False
        return all(self._pages().put(KV, keys, [[_piece(one)] for one in tensors]))

    # All

    def clear(self) -> None:
        """Keeps all pages, because other clients use the pool, too, and pages leave it by age."""

    def get_stats(self) -> dict[str, int] | None:
        return None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _pages(self) -> PageStore:
        if self._store is None:
            raise UnsupportedError("SGLang has registered no host memory")
        return self._store


def _piece_bytes(host_pool: Any) -> list[int]:
    """Returns the sizes in bytes of a page's pieces, as far as the memory tells them before a page
    is moved."""
    try:
        first = torch.arange(int(getattr(host_pool, "page_size", 1) or 1))
        return [int(size) for size in host_pool.get_page_buffer_meta(first)[1]]
    except Exception:  # another release of SGLang, where the first page tells the sizes
        return []


def _is_plain(tensor: Any) -> bool:
    """Whether the bytes of a page lie one after another in host memory."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and bool(tensor.is_contiguous())
    )


def _piece(tensor: torch.Tensor) -> Piece:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()
