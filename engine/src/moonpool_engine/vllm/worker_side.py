"""The workers' side of the connector: moves blocks between vLLM's KVCache and the pool's memory.

Loads copy in a thread beside a step, for requests that a later step computes. The checksum of every
copy is computed while copying, and compared with the one that the pool keeps with the block: a
request whose block differs is computed as if nothing had been found.

Stores copy in another thread, with the lowest priority. Blocks that do not fit into its queue are
not stored. A preempted request's blocks are overwritten at once, so copies of these blocks end
before that; nobody waits for the messages between the thread of stores and the pool.
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

import numpy as np

from moonpool_engine.vllm.block_kinds import Places
from moonpool_engine.vllm.space_client import SpaceClient
from moonpool_engine.vllm.step_waits import StepWaits
from moonpool_engine.vllm.thread_cores import leave_bound_core
from moonpool_engine.vllm.transfers import LoadSpec, StepTransfers, StoreSpec, TransfersEnded

log = logging.getLogger("moonpool.vllm_connector")

MAX_QUEUED_BYTES = 256 << 20
GROUP_BYTES = 8 << 20
"""The most bytes of a store that a preemption waits for."""
STORE_NICE = 10
IDLE_S = 0.04
"""How long a step that computes nothing waits for stores, so that others find the blocks."""
SAY_S = 60.0


class WorkerSide:
    """Lives in one of vLLM's workers. `spaces`: a space for each kind of KVCache."""

    def __init__(self, spaces: Sequence[SpaceClient]) -> None:
        self.spaces = spaces
        self._block_bytes = sum(space.block_bytes for space in spaces)
        self._loads = ThreadPoolExecutor(1, "moonpool-load", leave_bound_core)
        self._loading: Future[None] | None = None
        self._lock = threading.Condition()  # guards the fields below
        self._loaded: set[str] = set()  # requests whose loads have finished
        self._failed: set[str] = set()  # requests among these whose loads have failed
        self._ended = TransfersEnded()
        self._queue: deque[StoreSpec] = deque()
        self._queued_bytes = 0
        self._pending: dict[str, int] = {}
        self._storing: StoreSpec | None = None  # the store that the storing thread has taken
        self._is_copying = False  # whether the storing thread reads vLLM's blocks now
        self._is_given_up = False  # whether the storing thread must not begin to copy it
        self._finished: set[str] = set()
        self._closing = False
        self.counts = {"stored": 0, "dropped": 0, "spared": 0, "loaded": 0, "wrong": 0}
        self._said = dict(self.counts)
        self._said_s = time.monotonic()
        self.waits = StepWaits(IDLE_S)
        threading.Thread(target=self._store_all, name="moonpool-store", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Whether the pool is there now."""
        return all(space.is_connected for space in self.spaces)

    @property
    def is_storing(self) -> bool:
        """Whether the thread of stores has taken a store from the queue."""
        return self._storing is not None

    @property
    def takes_stores(self) -> bool:
        """Whether the pool is there and answers."""
        return all(space.takes_stores for space in self.spaces)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        for space in self.spaces:
            space.close()
        self._loads.shutdown(wait=False)

    # Methods of a step

    def begin_step(self, transfers: StepTransfers) -> None:
        """Starts the loads of a step, and queues its stores."""
        self.waits.begin_step()
        for space in self.spaces:
            space.copier.mark()
        self._queue_stores(transfers)
        if transfers.loads:
            self._loading = self._loads.submit(self._load_all, transfers.loads)

    def end_step(self) -> None:
        """Waits for the loads that the step began."""
        if self._loading is not None:
            with self.waits.copying():
                self._loading.result()
            self._loading = None
            for space in self.spaces:
                for name in space.layers:
                    space.copier.wait(name)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Returns the requests whose loads have ended, and which of them have failed."""
        with self._lock:
            taken = self._loaded, self._failed
            self._loaded, self._failed = set(), set()
        return taken

    def take_ended(self) -> TransfersEnded | None:
        """The loads and stores that have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, TransfersEnded()
        return ended if ended.ended or ended.stored else None

    # Loads

    def _load_all(self, specs: Sequence[LoadSpec]) -> None:
        """Copies all layers. Requests whose load fails are computed. `end_step` raises unexpected
        errors of this thread."""
        try:
            wrong = self._copy_layers(specs)
            self._tell_damaged(specs, wrong)
        except Exception as error:
            said = " ".join(str(error).split())[:300]
            text = "a load from the KVCache pool failed, its blocks are computed: %s"
            log.warning(text, said)
            wrong = [np.ones(len(spec.keys), bool) for spec in specs]
        for spec, bad in zip(specs, wrong, strict=True):
            self._end(spec, np.flatnonzero(bad))

    def _copy_layers(self, specs: Sequence[LoadSpec]) -> list[np.ndarray]:
        """Returns which blocks of each load are wrong."""
        wrong = [np.zeros(len(spec.keys), bool) for spec in specs]
        for space in self.spaces:
            parts = [space.parts(spec) for spec in specs]
            tables = [space.group_ids(spec.block_ids) for spec in specs]
            groups = enumerate(space.kind.groups)
            rows = {name: row for row, group in groups for name in group.layers}
            for name, slices in space.layers.items():
                for index, (wanted, places, sums) in enumerate(parts):
                    if len(wanted):
                        targets = tables[index][rows[name]][wanted]
                        found = space.copier.load(name, targets, places)
                        wrong[index][wanted] |= (found != sums[:, slices]).any(axis=1)
        return wrong

    def _tell_damaged(self, specs: Sequence[LoadSpec], wrong: Sequence[np.ndarray]) -> None:
        """Makes the pool forget blocks that have changed, in all spaces."""
        for spec, bad in zip(specs, wrong, strict=True):
            keys = tuple(spec.keys[index] for index in np.flatnonzero(bad))
            if not keys:
                continue
            for space in self.spaces:
                space.tell_damaged(keys)
            log.warning(
                "%d blocks of the KVCache pool have changed since they were stored: computed again",
                len(keys),
            )

    def _end(self, spec: LoadSpec, bad: Places) -> None:
        self.counts["loaded"] += len(spec.keys) - len(bad)
        self.counts["wrong"] += len(bad)
        with self._lock:  # all results are reported together
            self._ended.ended[spec.owner] = 1
            if len(bad):
                self._ended.wrong[spec.owner] = spec.first + int(bad[0])
            self._loaded.add(spec.req_id)
            self._failed.update([spec.req_id] if len(bad) else [])

    # Stores

    def _queue_stores(self, transfers: StepTransfers) -> None:
        with self._lock:
            self._finished.update(transfers.finished)
            for spec in transfers.stores:
                num_bytes = len(spec.keys) * self._block_bytes
                if self._queued_bytes + num_bytes > MAX_QUEUED_BYTES or not self.takes_stores:
                    self.counts["dropped"] += len(spec.keys)
                    self._ended.stored[spec.number] = 1
                    continue
                self._queue.append(spec)
                self._queued_bytes += num_bytes
                self._pending[spec.req_id] = self._pending.get(spec.req_id, 0) + 1
            if self._queue:
                self._lock.notify_all()

    def preempt(self, req_ids: Sequence[str]) -> None:
        """Returns when no block of these requests, which lose their blocks, is read any more."""
        if not req_ids:
            return
        gone = set(req_ids)
        with self._lock:
            for spec in [one for one in self._queue if one.req_id in gone]:
                self._queue.remove(spec)
                self._leave_queue(spec)
                self.counts["dropped"] += len(spec.keys)
            if self._storing is not None and self._storing.req_id in gone:
                self._is_given_up = True
                with self.waits.copying():  # a piece; what asks the pool is not waited for
                    self._lock.wait_for(lambda: not self._is_copying)

    def end_stores(self) -> None:
        """Returns when no block of vLLM is read any more. Blocks that were not stored are
        dropped."""
        with self._lock:
            reading = {spec.req_id for spec in self._queue}
            reading |= set() if self._storing is None else {self._storing.req_id}
        self.preempt(sorted(reading))

    def take_finished(self, has_work: bool) -> set[str]:
        """Requests that have ended and whose stores have, too."""
        with self._lock:
            if not has_work and self._finished and self.takes_stores:
                self.waits.wait(
                    self._lock,
                    lambda: not any(one in self._pending for one in self._finished),
                    IDLE_S,
                )
            done = {one for one in self._finished if one not in self._pending}
            self._finished -= done
        self._say()
        return done

    def _leave_queue(self, spec: StoreSpec) -> None:
        """The caller must hold the lock."""
        self._ended.stored[spec.number] = 1
        self._queued_bytes -= len(spec.keys) * self._block_bytes
        self._pending[spec.req_id] -= 1
        if not self._pending[spec.req_id]:
            del self._pending[spec.req_id]

    def _store_all(self) -> None:
        leave_bound_core()
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), STORE_NICE)
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._queue) or self._closing)
                if self._closing:
                    return
                spec = self._queue.popleft()
                self._storing, self._is_given_up = spec, False
            try:
                self._store(spec)
            except Exception:
                log.exception("a store to the KVCache pool failed")
            with self._lock:
                self._storing = None
                self._leave_queue(spec)
                self._lock.notify_all()

    def _store(self, spec: StoreSpec) -> None:
        """Stores in pieces, so that a preemption does not wait long."""
        step = max(1, GROUP_BYTES // self._block_bytes)
        for start in range(0, len(spec.keys), step):
            for space in self.spaces:
                if not self._store_piece(space, spec, start, start + step):
                    self.counts["dropped"] += len(spec.keys) - start
                    return

    def _store_piece(self, space: SpaceClient, spec: StoreSpec, start: int, end: int) -> bool:
        """Stores some blocks in one space. Returns False if the remaining pieces are dropped,
        because there is no pool, or the request was preempted."""
        ids = space.group_ids(spec.block_ids)[:, start:end]
        there = np.flatnonzero(ids.all(axis=0))
        # Blocks that follow one another are stored together: the pool counts their depth.
        for run in np.split(there, np.flatnonzero(np.diff(there) > 1) + 1):
            if not len(run):
                continue
            first = start + int(run[0])
            keys = spec.keys[first : first + len(run)]
            places = space.reserve(keys, spec.first + first)
            if places is None:
                return False
            if not self._begin_copy():
                space.abandon(places)
                return False
            try:
                space.fill(places, ids[:, run])
            finally:
                self._end_copy()
            if space is self.spaces[0]:
                self.counts["stored"] += places.num_wanted
                self.counts["spared"] += len(keys) - places.num_wanted
        return True

    def _begin_copy(self) -> bool:
        """Returns False if the blocks may be another request's by now."""
        with self._lock:
            self._is_copying = not self._is_given_up
            return self._is_copying

    def _end_copy(self) -> None:
        with self._lock:
            self._is_copying = False
            self._lock.notify_all()

    def _say(self) -> None:
        """Logs what was moved, now and then."""
        if time.monotonic() - self._said_s < SAY_S or self.counts == self._said:
            return
        self._said, self._said_s = dict(self.counts), time.monotonic()
        parts = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        text = "KVCache pool, blocks so far: %s; longest wait of a step %.0f ms, for copies %.0f ms"
        log.info(text, parts, 1e3 * self.waits.longest_s, 1e3 * self.waits.longest_copy_s)
