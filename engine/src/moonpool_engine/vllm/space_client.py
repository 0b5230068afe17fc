"""One of a worker's spaces in the pool: its memory, its connection, and room for stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moonpool.host_pool.messages import (
    AttachRank,
    Commit,
    Damaged,
    PoolMessage,
    Reserve,
    Reserved,
)
from moonpool_engine.vllm.block_copier import BlockCopier
from moonpool_engine.vllm.block_kinds import BlockKind, Places
from moonpool_engine.vllm.cache_layout import CacheLayout
from moonpool_engine.vllm.pool_link import PoolLink, SpaceMemory
from moonpool_engine.vllm.transfers import LoadSpec

RESERVE_S = 0.5
"""How long a store waits for its places. vLLM keeps the blocks of finished requests until then, and
computes in the meantime."""
PAUSE_S = 2.0
"""How long nothing is stored in a pool that did not answer, unless it answers before."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Places of a store in the pool's memory: the block there for each key, or -1."""

    number: int
    rows: Places
    memory: SpaceMemory

    @property
    def num_wanted(self) -> int:
        """Blocks that the pool wants."""
        return int(np.count_nonzero(self.rows >= 0))


class SpaceClient:
    """The client of a space for one kind of KVCache. `copier` copies blocks of this kind."""

    def __init__(
        self,
        pool_path: Path,
        attach: AttachRank,
        layout: CacheLayout,
        kind: BlockKind,
        copier: BlockCopier,
    ) -> None:
        self.kind = kind
        self.copier = copier
        self.block_bytes = kind.num_slices * layout.slice_bytes
        self.layers = kind.slices_by_layer(layout)
        self._rank = attach.rank
        # memory of the last connection, which stays readable
        self._memory: SpaceMemory | None = None
        self._lock = threading.Condition()  # guards the fields below
        self._reserved: dict[int, Reserved | None] = {}
        self._paused_until_s = 0.0
        self.num_reservations = 0
        self._link = PoolLink(pool_path, attach, self._on_message, self._on_end)
        self._link.start()

    @property
    def is_connected(self) -> bool:
        """Whether the pool is there now."""
        return self._link.connected

    @property
    def takes_stores(self) -> bool:
        """Whether the pool is there, and has answered when it was asked last."""
        return self._link.connected and time.monotonic() >= self._paused_until_s

    def close(self) -> None:
        self._link.close()

    # Loads

    def memory(self) -> SpaceMemory | None:
        """The memory with the pool's blocks, or that of the last pool if it has just gone. Returns
        None if there was no pool."""
        self._memory = self._link.memory or self._memory
        return self._memory

    def parts(self, spec: LoadSpec) -> tuple[Places, Places, np.ndarray]:
        """What a load needs of this kind: indices (from `spec.first` on) of the blocks that vLLM
        wants, their places in the pool's memory, and the sums of their slices. Raises ValueError if
        the pool does not name a wanted block."""
        memory = self.memory()
        if memory is None:
            raise ValueError("the pool's memory has not been mapped")
        wanted = np.flatnonzero(self.group_ids(spec.block_ids).all(axis=0))
        mine = spec.ranks[self._rank]
        ids = np.frombuffer(mine.block_ids, "<i8")
        sums = np.frombuffer(mine.checksums, "<u8").reshape(-1, self.kind.num_slices)
        # The pool names the prefix's last blocks.
        rows = wanted + spec.first - (spec.num_found - len(ids))
        if len(rows) and (rows.min() < 0 or rows.max() >= len(ids)):
            raise ValueError("the pool does not have a block of the window")
        chosen = ids[rows]
        if chosen.size and (chosen.min() < 0 or chosen.max() >= memory.num_blocks):
            raise ValueError("the pool named a block outside its memory")
        return wanted, memory.address + chosen * self.block_bytes, sums[rows]

    def group_ids(self, table: Sequence[Sequence[int]]) -> np.ndarray:
        """The block ids of the kind's groups (groups, blocks)."""
        return np.asarray([table[group.index] for group in self.kind.groups], np.int64)

    def tell_damaged(self, keys: tuple[bytes, ...]) -> None:
        """Reports blocks that differ from their checksums."""
        self._link.send(Damaged(keys=keys))

    # Stores

    def reserve(self, keys: tuple[bytes, ...], first: int) -> Reservation | None:
        """Asks for places, the first key's at index `first` of its prompt. Waits `RESERVE_S` at
        most, and reads no block of vLLM. Returns None without a pool, or if the pool does not
        answer in that time. Raises ValueError if the pool's answer is invalid. A call of `fill` or
        `abandon` ends the reservation."""
        memory = self._link.memory
        if memory is None or not self.takes_stores:
            return None
        with self._lock:
            self.num_reservations += 1
            number = self.num_reservations
            self._reserved[number] = None
        asked = Reserve(number=number, keys=keys, first_depth=first)
        sent = self._link.send(asked, memory)
        with self._lock:
            if sent:
                ended = self._lock.wait_for(
                    lambda: self._reserved.get(number) is not None or number not in self._reserved,
                    RESERVE_S,
                )
                self._paused_until_s = 0.0 if ended else time.monotonic() + PAUSE_S
            answer = self._reserved.pop(number, None)
        if answer is None:
            return None
        found = Reservation(number, np.frombuffer(answer.block_ids, "<i8"), memory)
        if len(found.rows) == len(keys) and found.rows.max(initial=-1) < memory.num_blocks:
            return found
        self.abandon(found)
        raise ValueError("the pool named blocks outside its memory, or too few")

    def fill(self, reservation: Reservation, ids: np.ndarray) -> None:
        """Copies blocks, `ids` for each group of the kind, to their places."""
        chosen = np.flatnonzero(reservation.rows >= 0)
        sums = b""
        try:
            if len(chosen):
                where = reservation.rows[chosen]
                targets = reservation.memory.address + where * self.block_bytes
                groups = [np.ascontiguousarray(row[chosen]) for row in ids]
                sums = self.copier.store(groups, targets).astype("<u8").tobytes()
        finally:
            self._commit(reservation, sums)

    def abandon(self, reservation: Reservation) -> None:
        """Gives the places back."""
        self._commit(reservation, b"")

    def _commit(self, reservation: Reservation, sums: bytes) -> None:
        """Tells the pool that made the reservation; a later pool does not know it."""
        commit = Commit(number=reservation.number, checksums=sums)
        self._link.send(commit, reservation.memory)

    def _on_message(self, message: PoolMessage) -> None:
        if isinstance(message, Reserved):
            with self._lock:
                self._paused_until_s = 0.0
                if message.number in self._reserved:
                    self._reserved[message.number] = message
                    self._lock.notify_all()
                    return
            # Nobody waits for this reservation any more.
            self._link.send(Commit(number=message.number, checksums=b""))

    def _on_end(self) -> None:
        with self._lock:
            self._reserved.clear()
            self._lock.notify_all()
