"""Pages of SGLang's HiCache in a pool of blocks: their keys, and where they lie in host memory.

This module does not import SGLang. A page is one block of the pool: all of its pieces, in the order
in which the host pool names them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.sglang")

_T = TypeVar("_T")
KEY_BYTES = 16
Piece = tuple[int, int]
"""Address and bytes of a part of host memory."""


class BlockClient(Protocol):
    """A pool of blocks. A block that is absent, damaged or cannot be had in time is a False, and no
    exception. A key's block always has the same size."""

    def exists(self, keys: Sequence[bytes]) -> int:
        """Returns how many blocks from the first key on are there."""
        ...

    def get(self, keys: Sequence[bytes], addresses: Sequence[list[Piece]]) -> list[bool]:
        """Writes each block to its pieces, in their order. Where the result is False, the pieces
        may hold anything."""
        ...

    def put(self, keys: Sequence[bytes], addresses: Sequence[list[Piece]]) -> list[bool]:
        """Stores each block from its pieces, which are not read after the return."""
        ...

    def close(self) -> None: ...


def namespace_of(parts: Sequence[str | bytes | int | bool | None]) -> bytes:
    """The digest of everything that gives the bytes of a page their meaning. No two lists have the
    same digest."""
    made = hashlib.blake2b(digest_size=32, person=b"moonpool hicache")
    for part in parts:
        data = part if isinstance(part, bytes) else f"{type(part).__name__}:{part}".encode()
        made.update(len(data).to_bytes(8, "little") + data)
    return made.digest()


def page_key(namespace: bytes, pool_name: str, page_hash: str) -> bytes:
    """The pool's key of a page, by SGLang's hash of all tokens up to its end."""
    made = hashlib.blake2b(namespace, digest_size=KEY_BYTES, person=b"moonpool page")
    made.update(len(pool_name).to_bytes(4, "little") + pool_name.encode())
    made.update(page_hash.encode())
    return made.digest()


def pieces_of(num_pages: int, pointers: Sequence[int], sizes: Sequence[int]) -> list[list[Piece]]:
    """The pieces of each page, of which the host pool lists equally many one after another. Raises
    ValueError if their numbers differ."""
    if not num_pages or len(pointers) != len(sizes) or len(pointers) % num_pages:
        raise ValueError(f"{len(pointers)} pieces of {len(sizes)} sizes are no {num_pages} pages")
    width = len(pointers) // num_pages
    pieces = list(zip(pointers, sizes, strict=True))
    return [pieces[number * width : (number + 1) * width] for number in range(num_pages)]


class PageStore:
    """Pages of one rank. Each failure counts as a miss: SGLang computes such pages again."""

    def __init__(self, client: BlockClient, namespaces: dict[str, bytes]) -> None:
        """`namespaces`: the namespace of each pool of host memory, by name (see `namespace_of`)."""
        self._client = client
        self._namespaces = namespaces
        self.counts = {"pages_found": 0, "pages_missed": 0, "pages_stored": 0, "pages_dropped": 0}

    def leading(self, pool_name: str, hashes: Sequence[str]) -> int:
        """Returns how many pages from the first one on are there."""
        return self._try(0, lambda: self._client.exists(self._keys(pool_name, hashes)))

    def has(self, pool_name: str, page_hash: str) -> bool:
        return self.leading(pool_name, [page_hash]) == 1

    def get(
        self, pool_name: str, hashes: Sequence[str], addresses: Sequence[list[Piece]]
    ) -> list[bool]:
        keys = self._keys(pool_name, hashes)
        nothing: list[bool] = []
        found = self._try(nothing, lambda: self._client.get(keys, addresses))
        return self._counted(found, len(hashes), "pages_found", "pages_missed")

    def put(
        self, pool_name: str, hashes: Sequence[str], addresses: Sequence[list[Piece]]
    ) -> list[bool]:
        keys = self._keys(pool_name, hashes)
        nothing: list[bool] = []
        found = self._try(nothing, lambda: self._client.put(keys, addresses))
        return self._counted(found, len(hashes), "pages_stored", "pages_dropped")

    def close(self) -> None:
        self._try(None, self._client.close)

    def _keys(self, pool_name: str, hashes: Sequence[str]) -> list[bytes]:
        namespace = self._namespaces[pool_name]
        return [page_key(namespace, pool_name, page_hash) for page_hash in hashes]

    def _counted(self, found: list[bool], count: int, good: str, bad: str) -> list[bool]:
        """A client that failed has reported nothing about any page."""
        results = found if len(found) == count else [False] * count
        self.counts[good] += sum(results)
        self.counts[bad] += count - sum(results)
        return results

    def _try(self, without: _T, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except Exception as error:  # an error of the pool must never end an engine
            log.warning("the pool failed: %s: %s", type(error).__name__, error)
            return without
