"""The pool of this host as SGLang's pages see it: a `BlockClient`.

All pages of one size form a separate group in the pool. A page's pieces lie one behind another in
its block, which is one slice or several of equal size. Every copy is summed, and compared with the
checksum that the pool keeps.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.host_pool.messages import (
    PROTOCOL,
    AttachRank,
    Commit,
    Damaged,
    Find,
    Found,
    PoolMessage,
    Release,
    Reserve,
    Reserved,
)
from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.sglang.page_store import Piece
from moonpool_engine.vllm.pool_link import PoolLink, SpaceMemory
from moonpool_engine.vllm.slice_mover import SliceMover, open_mover

ANSWER_S = 1.0
LOAD_S = 20.0
"""How long a find may take whose blocks come from the SSD."""
JOIN_S = 60.0
"""How long the first page of a size waits for the pool, which takes memory for it."""
LEAST_SLICE_BYTES, SLICE_STEP_BYTES = 256, 64

Ids = npt.NDArray[np.int64]


class _Group:
    """The pages of one size. Thread-safe."""

    def __init__(self, path: Path, group: bytes, model: str, sizes: tuple[int, ...]) -> None:
        """Raises ValueError for pieces that no copy can move."""
        self.slice_bytes = math.gcd(*sizes)
        if self.slice_bytes < LEAST_SLICE_BYTES or self.slice_bytes % SLICE_STEP_BYTES:
            raise ValueError(
                f"pieces of {sizes} bytes have common slices of {self.slice_bytes} bytes; a copy"
                f" needs slices of at least {LEAST_SLICE_BYTES} bytes, in steps of"
                f" {SLICE_STEP_BYTES}"
            )
        self.num_slices = sum(sizes) // self.slice_bytes
        layout = BlockLayout(
            model_fingerprint=group.hex(),
            dtype="bfloat16",
            block_tokens=1,
            num_layers=self.num_slices,
            num_kv_heads=1,
            head_dim=self.slice_bytes // 4,
            inner="sglang",
        )
        self.group = group
        self._condition = threading.Condition()
        self._answers: dict[str, Found | Reserved | None] = {}
        self._number = 0
        attach = AttachRank(
            protocol=PROTOCOL,
            group=group,
            model=model,
            rank=0,
            num_ranks=1,
            block_tokens=1,
            layout=layout,
        )
        self.link = PoolLink(path, attach, self._on_message, self._on_end)
        self.link.start()
        until_s = time.monotonic() + JOIN_S
        while not self.link.connected and path.exists() and time.monotonic() < until_s:
            time.sleep(0.01)

    @property
    def memory(self) -> SpaceMemory | None:
        return self.link.memory

    def find(
        self, keys: Sequence[bytes], memory: SpaceMemory | None = None
    ) -> tuple[str, Found | None]:
        """Holds the leading blocks of `keys`. Returns the name of the hold, which `release` ends,
        and what was found, or None without an answer in time. `memory`: the memory in which the
        places are wanted, or None."""
        name = self._new()
        places = memory is not None
        message = Find(owner=name, group=self.group, keys=tuple(keys), places=places)
        answer = self._ask(name, message, LOAD_S, memory)
        return name, answer if isinstance(answer, Found) else None

    def release(self, name: str) -> None:
        self.link.send(Release(owner=name, group=self.group))

    def reserve(self, keys: Sequence[bytes], memory: SpaceMemory) -> tuple[int, Ids | None]:
        """Returns the number of the reservation, and the place of each key in `memory` (negative:
        not to be stored) or None without an answer in time. `commit` ends the reservation. Raises
        ValueError if the pool names places that do not exist."""
        name = self._new()
        asked = Reserve(number=int(name), keys=tuple(keys))
        answer = self._ask(name, asked, ANSWER_S, memory)
        if not isinstance(answer, Reserved):
            return int(name), None
        ids = np.frombuffer(answer.block_ids, "<i8")
        if len(ids) != len(keys) or ids.max(initial=-1) >= memory.num_blocks:
            self.commit(int(name), b"", memory)
            raise ValueError("the pool named blocks outside its memory, or too few")
        return int(name), ids

    def commit(self, number: int, sums: bytes, memory: SpaceMemory) -> bool:
        """Commits in the pool that made `memory`, not in a later one. Returns False if that pool
        has gone."""
        return self.link.send(Commit(number=number, checksums=sums), memory)

    def _new(self) -> str:
        with self._condition:
            self._number += 1
            return str(self._number)

    def _ask(
        self,
        name: str,
        message: Find | Reserve,
        timeout_s: float,
        memory: SpaceMemory | None = None,
    ) -> Found | Reserved | None:
        with self._condition:
            self._answers[name] = None
        sent = self.link.send(message, memory)
        with self._condition:
            if sent:
                self._condition.wait_for(
                    lambda: name not in self._answers or self._answers[name] is not None, timeout_s
                )
            return self._answers.pop(name, None)

    def _on_message(self, message: PoolMessage) -> None:
        if not isinstance(message, Found | Reserved):
            return
        name = message.owner if isinstance(message, Found) else str(message.number)
        with self._condition:
            if name in self._answers:
                self._answers[name] = message
                self._condition.notify_all()
                return
        if isinstance(message, Reserved):  # the reservation is no longer needed
            self.link.send(Commit(number=message.number, checksums=b""))

    def _on_end(self) -> None:
        with self._condition:
            self._answers.clear()
            self._condition.notify_all()


class HostPoolClient:
    """Pages of one namespace in the pool at `path`. Thread-safe. `sizes`: the sizes of the pieces
    of a page, if known before the first page is moved."""

    def __init__(
        self,
        path: Path,
        namespace: bytes,
        model: str,
        sizes: Sequence[int] = (),
        mover: SliceMover | None = None,
    ) -> None:
        self._path = path
        self._namespace = namespace
        self._model = model
        self._mover = mover or open_mover()
        self._lock = threading.Lock()
        self._groups: dict[tuple[int, ...], _Group] = {}
        if sizes:
            self._group(tuple(sizes))

    def exists(self, keys: Sequence[bytes]) -> int:
        """Counts pages in any of the sizes that this process has seen."""
        most = 0
        for group in list(self._groups.values()):
            name, found = group.find(keys)
            group.release(name)
            most = max(most, 0 if found is None else found.num_blocks)
        return most

    def get(self, keys: Sequence[bytes], addresses: Sequence[list[Piece]]) -> list[bool]:
        group = self._group(_sizes(addresses))
        memory = group.memory  # read before the question, because places refer to this memory
        if memory is None:
            return [False] * len(keys)
        name, found = group.find(keys, memory)
        try:
            if found is None or not found.ranks:
                return [False] * len(keys)
            return self._copy_in(group, memory, keys, addresses, found)
        finally:
            group.release(name)

    def _copy_in(
        self,
        group: _Group,
        memory: SpaceMemory,
        keys: Sequence[bytes],
        addresses: Sequence[list[Piece]],
        found: Found,
    ) -> list[bool]:
        ids = np.frombuffer(found.ranks[0].block_ids, "<i8")
        expected = np.frombuffer(found.ranks[0].checksums, "<u8").reshape(-1, group.num_slices)
        if ids.size and (ids.min() < 0 or ids.max() >= memory.num_blocks):
            raise ValueError("the pool named a block outside its memory")
        to = _slices(addresses[: len(ids)], group.slice_bytes)
        sums = self._mover.copy(_places(group, memory, ids), to, group.slice_bytes)
        right = (sums.reshape(-1, group.num_slices) == expected).all(axis=1)
        wrong = [keys[index] for index in np.flatnonzero(~right).tolist()]
        if wrong:
            group.link.send(Damaged(keys=tuple(wrong)), memory)
        return [*map(bool, right), *[False] * (len(keys) - len(ids))]

    def put(self, keys: Sequence[bytes], addresses: Sequence[list[Piece]]) -> list[bool]:
        group = self._group(_sizes(addresses))
        memory = group.memory
        if memory is None:
            return [False] * len(keys)
        number, ids = group.reserve(keys, memory)
        if ids is None:
            return [False] * len(keys)
        chosen = np.flatnonzero(ids >= 0)
        sums = b""
        if len(chosen):
            source = _slices([addresses[index] for index in chosen.tolist()], group.slice_bytes)
            to = _places(group, memory, ids[chosen])
            sums = self._mover.copy(source, to, group.slice_bytes).astype("<u8").tobytes()
        if not group.commit(number, sums, memory):
            return [False] * len(keys)
        if len(chosen) == len(keys):
            return [True] * len(keys)
        name, found = group.find(keys)  # pages that were there already count as stored
        group.release(name)
        there = 0 if found is None else found.num_blocks
        return [bool(ids[index] >= 0) or index < there for index in range(len(keys))]

    def close(self) -> None:
        for group in self._groups.values():
            group.link.close()

    def _group(self, sizes: tuple[int, ...]) -> _Group:
        with self._lock:
            if sizes not in self._groups:
                digest = hashlib.sha256(self._namespace + repr(sizes).encode()).digest()
                self._groups[sizes] = _Group(self._path, digest, self._model, sizes)
            return self._groups[sizes]


def _sizes(addresses: Sequence[list[Piece]]) -> tuple[int, ...]:
    """Raises ValueError if pages differ in their pieces."""
    found = {tuple(size for _, size in pieces) for pieces in addresses}
    if len(found) != 1:
        raise ValueError("pages of one call have pieces of different sizes")
    return found.pop()


def _slices(addresses: Sequence[list[Piece]], slice_bytes: int) -> npt.NDArray[np.uint64]:
    """The address of each slice of these pages, page after page."""
    starts = np.array([start for pieces in addresses for start, _ in pieces], np.int64)
    counts = np.array([size // slice_bytes for pieces in addresses for _, size in pieces], np.int64)
    within = np.concatenate([np.arange(count) for count in counts]) if len(counts) else counts
    return (np.repeat(starts, counts) + within * slice_bytes).astype(np.uint64)


def _places(group: _Group, memory: SpaceMemory, ids: Ids) -> npt.NDArray[np.uint64]:
    block_bytes = group.num_slices * group.slice_bytes
    within = np.arange(group.num_slices, dtype=np.int64) * group.slice_bytes
    starts = memory.address + ids * block_bytes
    return np.asarray((starts[:, None] + within).ravel().astype(np.uint64))
