"""The workers' side of the connector: copies blocks between vLLM's KVCache and the pool's memory.

Loads copy one layer after the other, in a thread; a layer's attention waits for its own layer only.
Every copy is summed as it is made, and compared with the checksum that the pool keeps with the
block: what differs is computed again, and never reaches an answer.

Stores copy in another thread, with the lowest priority. What does not fit into its queue is not
stored. A preempted request's blocks are overwritten at once, so its stores end before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from moonpool_engine.vllm.block_copier import BlockCopier, slices_by_layer
from moonpool_engine.vllm.cache_layout import CacheLayout
from moonpool_engine.vllm.pool_link import PoolLink, SpaceMemory
from moonpool_engine.vllm.transfers import LoadsEnded, LoadSpec, StepTransfers, StoreSpec

log = logging.getLogger("moonpool.vllm_connector")

MAX_QUEUED_BYTES = 256 << 20
GROUP_BYTES = 8 << 20
"""The most bytes of a store that a preemption waits for."""
RESERVE_S = 1.0
STORE_NICE = 10
IDLE_S = 0.05
"""How long a step that computes nothing waits for stores, so that others find the blocks."""
SAY_S = 60.0


class LayerLoads:
    """The loads of one step, layer by layer."""

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._condition = threading.Condition()
        self._num_done = 0

    def note(self, num_done: int) -> None:
        with self._condition:
            self._num_done = num_done
            self._condition.notify_all()

    def wait(self, name: str) -> None:
        """Returns when the layer has been copied, or will not be."""
        number = self._numbers.get(name)
        if number is None or self._num_done > number:
            return
        with self._condition:
            self._condition.wait_for(lambda: self._num_done > number)

    def end(self) -> None:
        self.note(len(self._numbers))


class WorkerSide:
    """Lives in one of vLLM's workers. `rank` is its number among `attach.num_ranks`."""

    def __init__(
        self, pool_path: Path, attach: AttachRank, layout: CacheLayout, copier: BlockCopier
    ) -> None:
        self._layout = layout
        self._copier = copier
        self._rank = attach.rank
        self._block_bytes = layout.num_slices * layout.slice_bytes
        self._names = [name for group in layout.groups for name in group.layers]
        self._slices_of = slices_by_layer(layout)
        self._loads = ThreadPoolExecutor(1, "moonpool-load")
        self._load: LayerLoads | None = None
        self._loading: Future[None] | None = None
        self._ended = LoadsEnded()
        self._wrong_blocks: set[int] = set()
        self._memory: SpaceMemory | None = None  # of the last connection: stays readable
        self._lock = threading.Condition()  # guards what follows
        self._queue: deque[StoreSpec] = deque()
        self._queued_bytes = 0
        self._pending: dict[str, int] = {}
        self._storing = ""  # the request whose blocks are being copied
        self._preempted: set[str] = set()
        self._finished: set[str] = set()
        self._reserved: dict[int, Reserved | None] = {}
        self._num_reservations = 0
        self._closing = False
        self.counts = {"stored": 0, "dropped": 0, "spared": 0, "loaded": 0, "wrong": 0}
        self._said = dict(self.counts)
        self._said_s = time.monotonic()
        self._link = PoolLink(pool_path, attach, self._on_message, self._on_end)
        self._link.start()
        threading.Thread(target=self._store_all, name="moonpool-store", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Whether the pool is there now."""
        return self._link.connected

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._link.close()
        self._loads.shutdown(wait=False)

    # Of a step

    def begin_step(self, transfers: StepTransfers) -> None:
        """Starts the loads of a step, and queues its stores."""
        self._copier.mark()
        self._queue_stores(transfers)
        memory = self._link.memory or self._memory
        self._memory = memory
        if not transfers.loads:
            return
        load = self._load = LayerLoads(self._names)
        if memory is None:
            self._fail(transfers.loads)
            load.end()
            return
        self._loading = self._loads.submit(self._load_all, load, transfers.loads, memory)

    def wait_for_layer(self, name: str) -> None:
        if self._load is not None:
            self._load.wait(name)
            self._copier.wait(name)

    def end_step(self) -> None:
        """Waits for the step's loads, which its layers have waited for."""
        if self._loading is not None:
            self._loading.result()
            self._loading = None
        self._load = None

    def take_wrong_blocks(self) -> set[int]:
        """vLLM's blocks that did not arrive as they were stored."""
        wrong, self._wrong_blocks = self._wrong_blocks, set()
        return wrong

    def take_ended(self) -> LoadsEnded | None:
        """The loads that have ended since the last call."""
        ended, self._ended = self._ended, LoadsEnded()
        return ended if ended.ended else None

    # Loads

    def _load_all(self, load: LayerLoads, specs: Sequence[LoadSpec], memory: SpaceMemory) -> None:
        """Copies all layers. Never raises: what fails is computed."""
        try:
            wrong = self._copy_layers(load, specs, memory)
        except Exception:
            log.exception("a load from the KVCache pool failed")
            self._fail(specs)
        else:
            for spec, bad in zip(specs, wrong, strict=True):
                self._end(spec, bad)
        finally:
            load.end()

    def _copy_layers(
        self, load: LayerLoads, specs: Sequence[LoadSpec], memory: SpaceMemory
    ) -> list[np.ndarray]:
        """Returns which blocks of each load are wrong."""
        num_slices = self._layout.num_slices
        targets, places, expected, wrong = [], [], [], []
        for spec in specs:
            ids, sums = _places(spec, self._rank, num_slices)
            if ids.size and (ids.min() < 0 or ids.max() >= memory.num_blocks):
                raise ValueError("the pool named a block outside its memory")
            targets.append(np.asarray(spec.block_ids, np.int64))
            places.append(memory.address + ids * self._block_bytes)
            expected.append(sums)
            wrong.append(np.zeros(len(ids), bool))
        for number, name in enumerate(self._names):
            slices = self._slices_of[name]
            for index in range(len(specs)):
                found = self._copier.load(name, targets[index], places[index])
                wrong[index] |= (found != expected[index][:, slices]).any(axis=1)
            load.note(number + 1)
        return wrong

    def _end(self, spec: LoadSpec, wrong: np.ndarray) -> None:
        self._ended.ended[spec.owner] = 1
        self.counts["loaded"] += len(wrong) - int(wrong.sum())
        if not wrong.any():
            return
        bad = np.flatnonzero(wrong)
        self.counts["wrong"] += len(bad)
        self._wrong_blocks.update(spec.block_ids[index] for index in bad)
        self._ended.wrong[spec.owner] = spec.first + int(bad[0])
        self._link.send(Damaged(keys=tuple(spec.keys[index] for index in bad)))
        log.warning(
            "%d blocks of the KVCache pool have changed since they were stored: they are computed",
            len(bad),
        )

    def _fail(self, specs: Sequence[LoadSpec]) -> None:
        """None of these blocks came."""
        for spec in specs:
            self._ended.ended[spec.owner] = 1
            self._ended.wrong[spec.owner] = spec.first
            self._wrong_blocks.update(spec.block_ids)

    # Stores

    def _queue_stores(self, transfers: StepTransfers) -> None:
        with self._lock:
            self._finished.update(transfers.finished)
            for spec in transfers.stores:
                num_bytes = len(spec.keys) * self._block_bytes
                if self._queued_bytes + num_bytes > MAX_QUEUED_BYTES or not self._link.connected:
                    self.counts["dropped"] += len(spec.keys)
                    continue
                self._queue.append(spec)
                self._queued_bytes += num_bytes
                self._pending[spec.req_id] = self._pending.get(spec.req_id, 0) + 1
            self._lock.notify_all()

    def preempt(self, req_ids: Sequence[str]) -> None:
        """These requests lose their blocks: returns when none of them is read any more."""
        if not req_ids:
            return
        gone = set(req_ids)
        with self._lock:
            for spec in [one for one in self._queue if one.req_id in gone]:
                self._queue.remove(spec)
                self._leave_queue(spec)
                self.counts["dropped"] += len(spec.keys)
            if self._storing in gone:
                self._preempted.add(self._storing)
                self._lock.wait_for(lambda: self._storing not in gone)
                self._preempted -= gone

    def end_stores(self) -> None:
        """Returns when no block of vLLM is read any more. What was not stored is dropped."""
        with self._lock:
            reading = {spec.req_id for spec in self._queue} | {self._storing}
        self.preempt(sorted(reading - {""}))

    def take_finished(self, has_work: bool) -> set[str]:
        """Requests that have ended and whose stores have, too."""
        with self._lock:
            if not has_work and self._finished:
                self._lock.wait_for(
                    lambda: not any(one in self._pending for one in self._finished), IDLE_S
                )
            done = {one for one in self._finished if one not in self._pending}
            self._finished -= done
        self._say()
        return done

    def _leave_queue(self, spec: StoreSpec) -> None:
        """Must hold the lock."""
        self._queued_bytes -= len(spec.keys) * self._block_bytes
        self._pending[spec.req_id] -= 1
        if not self._pending[spec.req_id]:
            del self._pending[spec.req_id]

    def _store_all(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), STORE_NICE)
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._queue) or self._closing)
                if self._closing:
                    return
                spec = self._queue.popleft()
                self._storing = spec.req_id
            try:
                self._store(spec)
            except Exception:
                log.exception("a store to the KVCache pool failed")
            with self._lock:
                self._storing = ""
                self._leave_queue(spec)
                self._lock.notify_all()

    def _store(self, spec: StoreSpec) -> None:
        """Stores in groups, so that a preemption does not wait long."""
        step = max(1, GROUP_BYTES // self._block_bytes)
        for start in range(0, len(spec.keys), step):
            keys = spec.keys[start : start + step]
            memory = self._link.memory
            places = self._reserve(keys, spec.first + start)
            if memory is None or places is None:
                self.counts["dropped"] += len(spec.keys) - start
                return
            number, ids = places
            chosen = np.flatnonzero(ids >= 0)
            self.counts["spared"] += len(keys) - len(chosen)
            blocks = np.asarray(spec.block_ids[start : start + step], np.int64)[chosen]
            sums = b""
            if len(chosen) and spec.req_id not in self._preempted:
                sums = self._copy_out(blocks, ids[chosen], memory)
                self.counts["stored"] += len(chosen)
            self._link.send(Commit(number=number, checksums=sums))
            if spec.req_id in self._preempted:
                return

    def _copy_out(self, blocks: np.ndarray, places: np.ndarray, memory: SpaceMemory) -> bytes:
        """Copies whole blocks, and returns the checksums of their slices."""
        if places.max() >= memory.num_blocks:
            raise ValueError("the pool named a block outside its memory")
        sums = self._copier.store(blocks, memory.address + places * self._block_bytes)
        return sums.astype("<u8").tobytes()

    def _reserve(self, keys: tuple[bytes, ...], first: int) -> tuple[int, np.ndarray] | None:
        """Returns the number of the reservation and the place of each key; None: no pool."""
        with self._lock:
            self._num_reservations += 1
            number = self._num_reservations
            self._reserved[number] = None
        sent = self._link.send(Reserve(number=number, keys=keys, first_depth=first))
        with self._lock:
            if sent:
                self._lock.wait_for(
                    lambda: self._reserved.get(number) is not None or number not in self._reserved,
                    RESERVE_S,
                )
            answer = self._reserved.pop(number, None)
        if answer is None:
            return None
        ids = np.frombuffer(answer.block_ids, "<i8")
        return (number, ids) if len(ids) == len(keys) else None

    def _on_message(self, message: PoolMessage) -> None:
        if isinstance(message, Reserved):
            with self._lock:
                if message.number in self._reserved:
                    self._reserved[message.number] = message
                    self._lock.notify_all()
                    return
            # Nobody waits for it any more.
            self._link.send(Commit(number=message.number, checksums=b""))

    def _on_end(self) -> None:
        with self._lock:
            self._reserved.clear()
            self._lock.notify_all()

    def _say(self) -> None:
        """Logs what was moved, now and then."""
        if time.monotonic() - self._said_s < SAY_S or self.counts == self._said:
            return
        self._said, self._said_s = dict(self.counts), time.monotonic()
        parts = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        log.info("KVCache pool, blocks so far: %s", parts)


def _places(spec: LoadSpec, rank: int, num_slices: int) -> tuple[np.ndarray, np.ndarray]:
    """The pool's blocks of a load (i64), and the checksums of their slices (blocks, slices)."""
    mine = spec.ranks[rank]
    count = len(spec.block_ids)
    ids = np.frombuffer(mine.block_ids, "<i8")[spec.first : spec.first + count]
    sums = np.frombuffer(mine.checksums, "<u8").reshape(-1, num_slices)
    return ids, sums[spec.first : spec.first + count]
