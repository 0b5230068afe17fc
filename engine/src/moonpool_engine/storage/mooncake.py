"""A Mooncake Store in place of the SSD tier: it keeps blocks in memory that machines lend to it,
and every instance of every cluster with the same store finds them.

A block is an object named by layout and key, `moonpool-<fingerprint>-<key>`. A large block is
several objects, `...-0`, `...-1` and so on, each some of its layers, so that a load can proceed
layer by layer (`job`). The bytes are those of a slot on the SSD (`format`): a header with the
layout's fingerprint, the key and a checksum of each layer's slice, then the block. A block that was
read is checked against all three in the arena. A damaged block is a miss. It is counted, and
deleted from the store so that it is written again. The store evicts by its own policy; an evicted
block is a miss as well. Slot numbers have no meaning here.

The store's client runs in a process of its own (`mooncake_client`), which maps the staging memory
of this module and never the arena. Every call has a deadline. If the master is lost, every
operation ends at once, and prefixes are computed.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from moonpool.config.tables import MooncakeConfig
from moonpool.log_limit import limited_logger
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import LookUpEnded, MessengerEvent
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.folder import StoreError
from moonpool_engine.storage.format import Geometry, SlotHeader, encode_header
from moonpool_engine.storage.index import header_of
from moonpool_engine.storage.io_threads import IoThreadPool, Task
from moonpool_engine.storage.job import (
    Job,
    JobOutcome,
    LayerRange,
    LoadProgressReporter,
    split_layers,
)
from moonpool_engine.storage.mooncake_client import MooncakeClient, MooncakeClientError
from moonpool_engine.storage.mooncake_client_process import StoreRequest
from moonpool_engine.storage.tier_store import ArenaBlocks, StoreCounters, StoreCounts
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.gate import LayerGate

KNOWN_BLOCKS = 1 << 18
"""Most stored blocks that an instance remembers; it looks up all others again."""
STAGING_BYTES = 16 << 20
"""Per direction: the most bytes per call, or one block if that is larger."""
MAX_GROUP_BLOCKS = 64
MAX_GROUPS_WAITING = 4096
MAX_NAMES = 512  # most names per look-up call: request and reply fit a message
LOOK_UP_S = 1.0
"""The deadline of a look-up: a prefill waits for it."""
MOVE_S = 5.0
SLOWEST_BYTES_PER_S = 20e6
USUAL_BYTES_PER_S = 1e9  # rate that is assumed if the probe fails
_CLOSE_TIMEOUT_S = 10.0
_WRITE, _READ, _LOOK_UP = range(3)
_CODES = {
    -200: "it is full: no machine lends it memory (mooncake_client), or too little",
    -704: "it has evicted a block",
}
_log = limited_logger(__name__)

Move = Callable[[Job, int, int], None]


class MooncakeStore:
    """A `SharedStore`. `post` is called from this store's threads or the caller's, and must not
    block."""

    name = "Mooncake"
    shared = True
    num_slots = KNOWN_BLOCKS
    stored: Sequence[tuple[int, BlockKey]] = ()

    def __init__(
        self,
        arena: Arena,
        config: MooncakeConfig,
        local_hostname: str,
        post: Callable[[MessengerEvent], None],
    ) -> None:
        """Raises StoreError if the store cannot be reached."""
        layout = arena.layout
        self._config = config
        self._arena = arena
        self._geometry = _object_geometry(layout)
        self._parts = split_layers(self._geometry)
        self._blocks = ArenaBlocks(arena, self._geometry)
        self._post = post
        self._counters = StoreCounters()
        self._closed = False
        size = self._geometry.slot_bytes
        self._group = max(1, min(MAX_GROUP_BLOCKS, STAGING_BYTES // size))
        staging_bytes = 2 * self._group * size
        self._fd = os.memfd_create("moonpool-mooncake", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, staging_bytes)
        self._staging = np.frombuffer(mmap.mmap(self._fd, staging_bytes), np.uint8)
        self._staging = self._staging.reshape(2, self._group, size)
        self._client = MooncakeClient(
            config, local_hostname, self._fd, staging_bytes, num_channels=3
        )
        try:
            self._client.start()
        except MooncakeClientError as error:
            self._client.close()
            os.close(self._fd)
            raise StoreError(str(error)) from None
        self.read_bytes_per_s = self._probe()
        self._pools = [
            IoThreadPool(f"mooncake-{what}", 1, MAX_GROUPS_WAITING)
            for what in ("write", "read", "look-up")
        ]

    def describe(self) -> str:
        rate = self.read_bytes_per_s / 1e9
        return f"{self._config.master_server_address}, reads {rate:.2f} GB/s"

    def counts(self) -> StoreCounts:
        return self._counters.counts()

    def store(
        self,
        store_id: str,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        slots: Sequence[int],
    ) -> None:
        def end(outcome: JobOutcome) -> None:
            self._deliver(outcome.as_store_ended(store_id))

        starts = self._checked_starts(keys, slots, block_ids)
        job = Job(keys, slots, block_ids, len(starts), end)
        self._submit(_WRITE, job, self._tasks(self._write_group, job, starts))

    def load(
        self,
        load_id: str,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        block_ids: Sequence[BlockId],
        gate: LayerGate | None = None,
    ) -> None:
        def end(outcome: JobOutcome) -> None:
            self._deliver(outcome.as_load_ended(load_id))
            if gate is not None:
                gate.end(outcome.num_blocks == len(keys))

        starts = self._checked_starts(keys, slots, block_ids)
        parts: Sequence[LayerRange] = [LayerRange(0, self._geometry.num_layers)]
        reporter: LoadProgressReporter | None = None
        if gate is not None and len(self._parts) > 1:
            parts, reporter = (
                self._parts,
                LoadProgressReporter(load_id, self._parts, gate, self._deliver),
            )
        job = Job(keys, slots, block_ids, len(starts), end, None, len(parts), reporter)
        headers: list[SlotHeader | None] = [None] * len(keys)
        self._arena.checksums.forget(block_ids)
        tasks: list[Task] = []
        for number, part in enumerate(parts):
            read = partial(self._read_group, headers, number, part)
            tasks += self._tasks(read, job, starts, number)
        self._submit(_READ, job, tasks)

    def look_up(self, lookup_id: str, keys: Sequence[BlockKey]) -> None:
        if self._closed or not self._pools[_LOOK_UP].submit([partial(self._find, lookup_id, keys)]):
            error = "it was closed" if self._closed else "too many look-ups wait"
            self._end_look_up(lookup_id, 0, error)

    def forget(self, slots: Sequence[int]) -> None:
        """Does nothing, because other instances may use the blocks, and the store itself evicts."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        idle = [pool.close(_CLOSE_TIMEOUT_S) for pool in self._pools]
        self._client.close()
        if all(idle):
            os.close(self._fd)

    def _checked_starts(
        self, keys: Sequence[BlockKey], slots: Sequence[int], block_ids: Sequence[BlockId]
    ) -> range:
        """Returns the first index of each group."""
        if not len(keys) == len(slots) == len(block_ids):
            raise ValueError(f"{len(keys)} keys, {len(slots)} slots, {len(block_ids)} blocks")
        for slot, block_id in zip(slots, block_ids, strict=True):
            if not 0 <= slot < self.num_slots or not self._arena.holds(block_id):
                raise ValueError(f"slot {slot} or block {block_id} does not exist")
        return range(0, len(keys), self._group)

    def _tasks(self, move: Move, job: Job, starts: range, part: int = 0) -> list[Task]:
        ends = [min(start + self._group, len(job.keys)) for start in starts]
        return [
            partial(self._run_group, move, job, start, end, part)
            for start, end in zip(starts, ends, strict=True)
        ]

    def _submit(self, pool: int, job: Job, tasks: list[Task]) -> None:
        error = "it was closed" if self._closed else ""
        if not error and not self._pools[pool].submit(tasks):
            error = "the Mooncake Store is too slow: too many blocks wait for it"
            _log.warning("%s", error)
        if error:
            self._counters.add(StoreCounts(failed_operations=1))
        if error or not tasks:
            job.refuse(error)

    def _run_group(self, move: Move, job: Job, start: int, end: int, part: int) -> None:
        error = "it was closed" if self._closed else ""
        if error or not job.begin_group(start, part):
            job.group_done(start, 0, end - start, error=error, part=part)
            return
        try:
            move(job, start, end)
            return
        except MooncakeClientError as failure:
            error = str(failure)
        except Exception as failure:  # every operation must end, whatever the error
            _log.exception("the Mooncake Store failed")
            error = f"{type(failure).__name__}: {failure}"
        self._counters.add(StoreCounts(failed_operations=1))
        job.group_done(start, 0, end - start, error=error, part=part)

    def _write_group(self, job: Job, start: int, end: int) -> None:
        began_s = time.monotonic()
        geometry, head = self._geometry, self._geometry.header_bytes
        for i in range(start, end):
            block_id, place = job.block_ids[i], self._staging[_WRITE, i - start]
            header = SlotHeader(geometry, job.keys[i], 0, 0, self._blocks.checksums(block_id))
            place[:head] = np.frombuffer(encode_header(header), np.uint8)
            block = np.frombuffer(self._blocks.block(block_id), np.uint8)
            place[head : head + geometry.block_bytes] = block
        codes = self._call(_WRITE, "put", job.keys[start:end], self._parts)
        num_blocks = _leading_equal(codes, 0) // len(self._parts)
        num_bytes = num_blocks * geometry.block_bytes
        seconds = time.monotonic() - began_s
        self._counters.add(
            StoreCounts(
                written_blocks=num_blocks,
                written_bytes=num_bytes,
                write_seconds=seconds,
                failed_operations=int(num_blocks < end - start),
            )
        )
        error = _explain(codes, 0)
        if num_blocks < end - start:
            _log.warning("the Mooncake Store did not take blocks: %s", error)
        job.group_done(start, num_blocks, end - start, num_bytes, 0, error)

    def _read_group(
        self,
        headers: list[SlotHeader | None],
        number: int,
        part: LayerRange,
        job: Job,
        start: int,
        end: int,
    ) -> None:
        """Reads some layers of these blocks, or all, with the headers if these are the first."""
        began_s = time.monotonic()
        geometry, head = self._geometry, self._geometry.header_bytes
        parts = [one for one in self._parts if part.first <= one.first < part.end]
        codes = self._call(_READ, "get", job.keys[start:end], parts)
        sizes = [self._piece(one)[1] for one in parts]
        num_right, corrupt = _leading_sizes(codes, sizes) // len(parts), 0
        error = _explain(codes, *sizes)
        first, last = (head + layer * geometry.slice_bytes for layer in part)
        for index in range(start, start + num_right):
            place, block_id = self._staging[_READ, index - start], job.block_ids[index]
            block = self._blocks.layers(block_id, part.first, part.end)
            np.frombuffer(block, np.uint8)[:] = place[first:last]
            if not part.first:
                headers[index] = header_of(place[:head].tobytes(), geometry, 0)
            key, header = job.keys[index], headers[index]
            corrupt = self._blocks.count_wrong(block_id, key, header, part.first, part.end)
            if corrupt:
                num_right, error = index - start, "a block of the Mooncake Store is damaged"
                name = object_name(self._arena.layout, key)
                _log.warning("%s (%s); answers are not affected, it was deleted", error, name)
                self._call(_READ, "remove", [key], self._parts)
                break
        num_bytes = num_right * (part.end - part.first) * geometry.slice_bytes
        self._counters.add(
            StoreCounts(
                read_blocks=num_right if part.end == geometry.num_layers else 0,
                read_bytes=num_bytes,
                read_seconds=time.monotonic() - began_s,
                corrupt_slices=corrupt,
                damaged_blocks=int(corrupt > 0),
            )
        )
        job.group_done(start, num_right, end - start, num_bytes, corrupt, error, number)

    def _find(self, lookup_id: str, keys: Sequence[BlockKey]) -> None:
        by_s = time.monotonic() + LOOK_UP_S
        num_blocks, error = 0, ""
        try:
            most = max(1, MAX_NAMES // len(self._parts))
            for start in range(0, len(keys), most):
                asked = keys[start : start + most]
                left_s = max(by_s - time.monotonic(), 0.01)
                codes = self._call(_LOOK_UP, "exist", asked, self._parts, left_s)
                found = _leading_equal(codes, 1) // len(self._parts)
                num_blocks += found
                if found < len(asked):
                    break
        except MooncakeClientError as failure:
            error = str(failure)
            self._counters.add(StoreCounts(failed_operations=1))
        self._end_look_up(lookup_id, num_blocks, error)

    def _end_look_up(self, lookup_id: str, num_blocks: int, error: str) -> None:
        self._deliver(LookUpEnded(lookup_id=lookup_id, num_blocks=num_blocks, error=error))

    def _call(
        self,
        pool: int,
        what: str,
        keys: Sequence[BlockKey],
        parts: Sequence[LayerRange],
        timeout_s: float = 0.0,
    ) -> list[int]:
        """Calls the store for these parts of each key's block, in order. The objects' bytes are in
        the pool's staging memory. Returns one code per object. Raises MooncakeClientError."""
        names = []
        for key in keys:
            name = object_name(self._arena.layout, key)
            if len(self._parts) == 1:
                names.append(name)
            else:
                names += [f"{name}-{self._parts.index(part)}" for part in parts]
        pieces = [self._piece(part) for part in parts]
        return self._call_names(pool, what, names, pieces, timeout_s)

    def _call_names(
        self,
        pool: int,
        what: str,
        names: list[str],
        pieces: Sequence[tuple[int, int]],
        timeout_s: float = 0.0,
    ) -> list[int]:
        """`pieces`: (offset in a block's staging memory, size) of each object of a block."""
        offsets: list[int] = []
        sizes: list[int] = []
        if what not in ("exist", "remove"):
            for number in range(len(names) // len(pieces)):
                place = (pool * self._group + number) * self._geometry.slot_bytes
                offsets += [place + offset for offset, _ in pieces]
                sizes += [size for _, size in pieces]
        timeout_s = timeout_s or MOVE_S + sum(sizes) / SLOWEST_BYTES_PER_S
        return self._client.call(pool, StoreRequest(what, names, offsets, sizes), timeout_s)  # type: ignore[arg-type]

    def _piece(self, part: LayerRange) -> tuple[int, int]:
        """Returns offset and size of an object in its slot. The first includes the header."""
        geometry = self._geometry
        begin = geometry.header_bytes + part.first * geometry.slice_bytes if part.first else 0
        end = geometry.header_bytes + part.end * geometry.slice_bytes
        if part.end == geometry.num_layers:
            end = geometry.slot_bytes
        return begin, end - begin

    def _probe(self) -> float:
        """Measures the read rate in bytes/s with a group of blocks, which stay in the store."""
        size = self._geometry.slot_bytes
        names = [f"moonpool-probe-{size}-{number}" for number in range(self._group)]
        try:
            whole = [(0, size)]
            self._call_names(_READ, "put", names, whole)
            best = 0.0
            for _ in range(3):
                began_s = time.monotonic()
                if _leading_equal(self._call_names(_READ, "get", names, whole), size) == len(names):
                    best = max(best, size * len(names) / (time.monotonic() - began_s))
        except MooncakeClientError:
            best = 0.0
        return best or USUAL_BYTES_PER_S

    def _deliver(self, event: MessengerEvent) -> None:
        """Posts the event. Never raises: the worker may have ended before this thread."""
        try:
            self._post(event)
        except Exception as error:
            _log.warning("the worker did not accept a %s: %s", type(event).__name__, error)


def object_name(layout: BlockLayout, key: BlockKey) -> str:
    """Returns the name of a block in the store."""
    return f"moonpool-{layout.fingerprint[:8].hex()}-{key.hex()}"


def _object_geometry(layout: BlockLayout) -> Geometry:
    return Geometry(layout.fingerprint, layout.num_layers, layout.slice_bytes, 1)


def _leading_equal(codes: Sequence[int], right: int) -> int:
    """Returns the number of leading codes that equal `right`."""
    return next((i for i, code in enumerate(codes) if code != right), len(codes))


def _leading_sizes(codes: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns the number of leading codes that equal `sizes`, repeated."""
    turns = itertools.cycle(sizes)
    return next(
        (i for i, (code, size) in enumerate(zip(codes, turns, strict=False)) if code != size),
        len(codes),
    )


def _explain(codes: Sequence[int], *right: int) -> str:
    num_right = _leading_sizes(codes, right)
    if num_right == len(codes):
        return ""
    code = codes[num_right]
    return f"the Mooncake Store: {_CODES.get(code, f'error {code}')}"
