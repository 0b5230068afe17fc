"""The SSD tier, which writes blocks of the arena to numbered slots on disk and reads them back.

`scheduler.ssd_tiering` decides when a block is written, and `kvcache.ssd_tier` to which slot. A
store or load ends as `TierStore` says. If the folder itself fails, `StoreLost` is posted once, and
every later operation ends at once. While the disk hangs (`io_threads`), every operation ends with
an error that shows whether the disk may still access its blocks.

All methods return immediately. Blocks are moved directly between arena and disk, in this store's
threads, without the GIL. See `format` for the file format and for crash safety.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from moonpool.log_limit import limited_logger
from moonpool.protocol.transfer_events import (
    LoadReturned,
    MessengerEvent,
    StoreLost,
    StoreReturned,
    TierPaused,
    TierResumed,
)
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.folder import explain, segment_path
from moonpool_engine.storage.format import SEGMENT_BYTES, SlotHeader, encode_header
from moonpool_engine.storage.index import header_of
from moonpool_engine.storage.io_threads import (
    HANG_S,
    IoThreadPool,
    IoWatchdog,
    ReadsFirst,
    Task,
)
from moonpool_engine.storage.job import (
    Job,
    JobOutcome,
    LayeredLoad,
    LayerRange,
    LoadProgressReporter,
    split_layers,
)
from moonpool_engine.storage.store_folder import StoreFolder, open_store_folder
from moonpool_engine.storage.tier_store import ArenaBlocks, StoreCounters, StoreCounts
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.gate import LayerGate

GROUP_BYTES = 4 << 20
"""Most bytes of adjacent slots per system call, because larger calls are no faster."""
MAX_GROUP_BLOCKS = 256  # each block needs three buffers, and a system call accepts 1,024
WRITE_THREADS = 2
"""One thread hashes while the other waits for the disk."""
READ_THREADS = 4
"""Reads of parts of blocks are small, so several at once keep the disk busy."""
MAX_GROUPS_WAITING = 4096
WRITE_NICE = 10
"""No request waits for a write, but requests wait for every decode step."""
READS_FIRST_S = 0.05
"""How long the write of a group waits for reads that are under way."""
READS_PAUSE_S = 0.002
"""A read that comes so soon after another one finds no write in between."""
FULL_PAUSE_S = 10.0
"""How long nothing is written after the disk was found full."""
MAX_READ_FAILURES = 3
_CLOSE_TIMEOUT_S = 10.0
_log = limited_logger(__name__)

Move = Callable[[Job, int, int], None]


class BlockStore:
    """One instance's slots 0 ... num_slots - 1; a `TierStore`. `post` is called from this store's
    threads or the caller's, and must not block."""

    name = "SSD"
    shared = False

    def __init__(
        self,
        arena: Arena,
        slots: StoreFolder,
        post: Callable[[MessengerEvent], None],
        hang_s: float = HANG_S,
    ) -> None:
        """Closing the store closes `slots`, unless the disk hangs. `hang_s`: how long a disk may
        take before it counts as hung."""
        self.folder = slots.path
        self.geometry = slots.geometry
        self.disk = slots.disk
        self.num_slots = slots.num_slots
        self.stored = slots.index.held()
        self._arena = arena
        self._slots = slots
        self._blocks = ArenaBlocks(arena, slots.geometry)
        self.segments = slots.segments
        self._index = slots.index
        self._post = post
        self._counters = StoreCounters()
        self._scratch = threading.local()
        self._padding = bytes(self.geometry.padding_bytes)
        self._state_lock = threading.Lock()  # guards the fields below
        self._lost = ""
        self._full_until_s = 0.0
        self._read_failures = 0
        self._flush_waits = False
        self._reads_first = ReadsFirst(READS_FIRST_S, READS_PAUSE_S)
        self._writing = IoThreadPool("store-write", WRITE_THREADS, MAX_GROUPS_WAITING, WRITE_NICE)
        self._reading = IoThreadPool("store-read", READ_THREADS, MAX_GROUPS_WAITING)
        self._watch = IoWatchdog(self._pause, self._resume, hang_s)

    @property
    def read_bytes_per_s(self) -> float:
        return self.disk.read_bytes_per_s

    def describe(self) -> str:
        way = "direct I/O" if self.disk.direct else "through the page cache"
        return f"{self.folder}, {way}"

    def counts(self) -> StoreCounts:
        return self._counters.counts()

    def store(
        self,
        store_id: str,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        slots: Sequence[int],
    ) -> None:
        """Writes block `block_ids[i]`, whose key is `keys[i]`, to `slots[i]`. Ends with
        StoreEnded."""

        def end(outcome: JobOutcome) -> None:
            self._deliver(outcome.as_store_ended(store_id))

        returned = partial(self._deliver, StoreReturned(store_id=store_id))
        groups = self._checked_groups(keys, slots, block_ids)
        job = Job(keys, slots, block_ids, len(groups), end, returned)
        self._submit(self._writing, self._write_group, job, groups)

    def load(
        self,
        load_id: str,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        block_ids: Sequence[BlockId],
        gate: LayerGate | None = None,
    ) -> None:
        """Reads `slots[i]`, which should hold `keys[i]`, into `block_ids[i]`. Ends with LoadEnded.
        With a `gate`, the store reads layer by layer."""

        def end(outcome: JobOutcome) -> None:
            self._reads_first.end()
            self._deliver(outcome.as_load_ended(load_id))
            if gate is not None:
                gate.end(not outcome.hung and outcome.num_blocks == len(keys))

        returned = partial(self._deliver, LoadReturned(load_id=load_id))
        groups = self._checked_groups(keys, slots, block_ids)
        self._reads_first.begin()
        parts = split_layers(self.geometry) if gate is not None else ()
        if gate is None or len(parts) < 2:
            job = Job(keys, slots, block_ids, len(groups), end, returned)
            self._submit(self._reading, self._read_group, job, groups)
            return
        reporter = LoadProgressReporter(load_id, parts, gate, self._deliver)
        job = Job(keys, slots, block_ids, len(groups), end, returned, len(parts), reporter)
        layers = LayeredLoad(len(keys), [start for start, _ in groups])
        self._arena.checksums.forget(block_ids)
        tasks: list[Task] = [
            partial(
                self._run_group, partial(self._read_part, layers, number, part), job, *group, number
            )
            for number, part in enumerate(parts)
            for group in groups
        ]
        self._begin(self._reading, job, tasks)

    def forget(self, slots: Sequence[int]) -> None:
        """Voids the slots: their blocks must not be found after a restart."""
        self._index.void(slots)
        self._flush_soon()

    def close(self) -> None:
        """Waits for the running operations. Waiting operations end with an error."""
        with self._state_lock:
            self._lost = self._lost or "the SSD tier was closed"
        self._watch.close()
        timeout_s = 0.0 if self._watch.error else _CLOSE_TIMEOUT_S
        idle = [pool.close(timeout_s) for pool in (self._reading, self._writing)]
        if not all(idle):
            _log.warning("the disk of %s does not respond; the folder stays locked", self.folder)
            return
        self._flush()
        self._slots.close()

    # Groups of adjacent slots

    def _checked_groups(
        self, keys: Sequence[BlockKey], slots: Sequence[int], block_ids: Sequence[BlockId]
    ) -> list[tuple[int, int]]:
        if not len(keys) == len(slots) == len(block_ids):
            raise ValueError(f"{len(keys)} keys, {len(slots)} slots, {len(block_ids)} blocks")
        for slot, block_id in zip(slots, block_ids, strict=True):
            if not 0 <= slot < self.num_slots or not self._arena.holds(block_id):
                raise ValueError(f"slot {slot} or block {block_id} does not exist")
        return list(self._groups(slots))

    def _submit(
        self, pool: IoThreadPool, move: Move, job: Job, groups: Sequence[tuple[int, int]]
    ) -> None:
        self._begin(pool, job, [partial(self._run_group, move, job, *group) for group in groups])

    def _begin(self, pool: IoThreadPool, job: Job, tasks: list[Task]) -> None:
        error = self._lost
        if not error and not self._watch.add(job):
            error = self._watch.error or "the disk did not respond a moment ago"
        elif not error and not pool.submit(tasks):
            self._watch.remove(job)
            error = "the disk is too slow: too many blocks wait for it"
            _log.warning("%s: %s", self.folder, error)
        if error:
            self._counters.add(StoreCounts(failed_operations=1))
        if error or not tasks:
            job.refuse(error)

    def _groups(self, slots: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields index ranges of adjacent slots of one segment."""
        geometry = self.geometry
        most = max(1, min(MAX_GROUP_BLOCKS, GROUP_BYTES // geometry.slot_bytes))
        start = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots) and end - start < most:
                follows = slots[end] == slots[end - 1] + 1
                if follows and slots[end] % geometry.slots_per_segment:
                    continue
            yield start, end
            start = end

    def _run_group(self, move: Move, job: Job, start: int, end: int, part: int = 0) -> None:
        if self._lost:
            job.group_done(start, 0, end - start, error=self._lost, part=part)
        elif not job.begin_group(start, part):
            job.group_done(start, 0, end - start, part=part)
        else:
            try:
                move(job, start, end)
            except Exception as error:  # every operation must end, whatever the error
                _log.exception("the SSD tier failed")
                text = f"{type(error).__name__}: {error}"
                job.group_done(start, 0, end - start, error=text, part=part)
        if job.ended and job.moving_since_s() is None:
            self._watch.remove(job)

    def _write_group(self, job: Job, start: int, end: int) -> None:
        self._reads_first.wait()
        error = self._write_refusal()
        if error:
            job.group_done(start, 0, end - start, error=error)
            return
        began_s = time.monotonic()
        buffers: list[bytes | memoryview] = []
        headers = self._headers()
        sequences = [self._index.begin(job.slots[i]) for i in range(start, end)]
        for i, sequence in zip(range(start, end), sequences, strict=True):
            block_id = job.block_ids[i]
            block, checksums = self._blocks.block(block_id), self._blocks.checksums(block_id)
            header = SlotHeader(self.geometry, job.keys[i], job.slots[i], sequence, checksums)
            place = headers[i - start]
            place[:] = encode_header(header)
            buffers += [place, block]
            if self._padding:
                buffers.append(self._padding)
        try:
            self._index.flush()  # the slots are void before the write (see `format`)
            self.segments.write(job.slots[start], buffers)
            if job.ended:  # the job was abandoned, so the blocks may have been reused
                job.group_done(start, 0, end - start)
                return
            for i, sequence in zip(range(start, end), sequences, strict=True):
                self._index.hold(job.slots[i], job.keys[i], sequence)
            self._index.flush()
        except OSError as failure:
            job.group_done(start, 0, end - start, error=self._write_failed(failure))
            return
        num_blocks = end - start
        num_bytes = num_blocks * self.geometry.block_bytes
        seconds = time.monotonic() - began_s
        self._counters.add(
            StoreCounts(written_blocks=num_blocks, written_bytes=num_bytes, write_seconds=seconds)
        )
        job.group_done(start, num_blocks, num_blocks, num_bytes)

    def _read_group(self, job: Job, start: int, end: int) -> None:
        began_s = time.monotonic()
        geometry = self.geometry
        headers = self._headers()
        buffers: list[memoryview] = []
        self._arena.checksums.forget(job.block_ids[start:end])
        for i in range(start, end):
            buffers += [headers[i - start], self._blocks.block(job.block_ids[i])]
            if self._padding:
                buffers.append(self._scratch.padding)
        try:
            got_bytes = self.segments.read(job.slots[start], buffers)
        except OSError as failure:
            job.group_done(start, 0, end - start, error=self._read_failed(failure))
            return
        found: list[SlotHeader | None] = []
        for i in range(start, end):
            arrived = got_bytes >= (i - start + 1) * geometry.slot_bytes
            header = headers[i - start]
            found.append(header_of(header, geometry, job.slots[i]) if arrived else None)
        self._end_read(job, start, end, found, LayerRange(0, geometry.num_layers), 0, began_s)

    def _read_part(
        self, layers: LayeredLoad, number: int, part: LayerRange, job: Job, start: int, end: int
    ) -> None:
        """Reads some layers of adjacent slots, with the headers if these are the first layers."""
        began_s = time.monotonic()
        geometry, headers = self.geometry, self._headers()
        first_bytes = geometry.header_bytes + part.first * geometry.slice_bytes
        try:
            for i in range(start, end):
                layer_bytes = self._blocks.layers(job.block_ids[i], part.first, part.end)
                if number:
                    self.segments.read(job.slots[i], [layer_bytes], first_bytes)
                else:
                    header = headers[i - start]
                    got_bytes = self.segments.read(job.slots[i], [header, layer_bytes])
                    if got_bytes >= geometry.header_bytes:
                        layers.headers[i] = header_of(header, geometry, job.slots[i])
        except OSError as failure:
            job.group_done(start, 0, end - start, error=self._read_failed(failure), part=number)
            return
        finally:
            if not number:
                layers.mark_headers_read(start)
        layers.await_headers(start, job)
        self._end_read(job, start, end, layers.headers[start:end], part, number, began_s)

    def _end_read(
        self,
        job: Job,
        start: int,
        end: int,
        headers: Sequence[SlotHeader | None],
        part: LayerRange,
        number: int,
        began_s: float,
    ) -> None:
        """Verifies these layers of a group that was read, and ends the group's part."""
        self._read_failures = 0
        num_right = corrupt = 0
        bad: list[int] = []
        for i, header in zip(range(start, end), headers, strict=True):
            block_id, key = job.block_ids[i], job.keys[i]
            wrong = self._blocks.count_wrong(block_id, key, header, part.first, part.end)
            if wrong:
                bad.append(job.slots[i])
                corrupt += wrong
            elif not bad:
                num_right += 1
        last = part.end == self.geometry.num_layers
        num_bytes = num_right * (part.end - part.first) * self.geometry.slice_bytes
        used = job.slots[start : start + num_right] if last else ()
        damaged_blocks = self._note_read(used, bad)
        self._counters.add(
            StoreCounts(
                read_blocks=num_right if last else 0,
                read_bytes=num_bytes,
                read_seconds=time.monotonic() - began_s,
                corrupt_slices=corrupt,
                damaged_blocks=damaged_blocks,
            )
        )
        error = f"{len(bad)} blocks on the disk are damaged" if bad else ""
        job.group_done(start, num_right, end - start, num_bytes, corrupt, error, number)

    def _note_read(self, used: Sequence[int], bad: Sequence[int]) -> int:
        """Records which slots of a segment were used, and voids the damaged ones. Returns how many
        were not known to be damaged."""
        if not used and not bad:
            return 0
        self._index.use(used)
        num_damaged = self._index.void(bad)
        self._flush_soon()
        if num_damaged:
            path = segment_path(self.folder, bad[0] // self.geometry.slots_per_segment)
            blocks = "block was" if num_damaged == 1 else "blocks were"
            _log.warning(
                "%d %s damaged on disk, in %s; answers are not affected, but the disk is not to be"
                " trusted",
                num_damaged,
                blocks,
                path,
            )
        return num_damaged

    def _headers(self) -> list[memoryview]:
        """Returns this thread's buffers for the headers of a group, each of whole pages."""
        scratch = self._scratch
        if not hasattr(scratch, "headers"):
            size = self.geometry.header_bytes
            count = max(1, min(MAX_GROUP_BLOCKS, GROUP_BYTES // self.geometry.slot_bytes))
            pages = memoryview(mmap.mmap(-1, count * size))
            scratch.headers = [pages[i * size : (i + 1) * size] for i in range(count)]
            scratch.padding = memoryview(bytearray(self.geometry.padding_bytes))
        headers: list[memoryview] = scratch.headers
        return headers

    # Failures

    def _flush_soon(self) -> None:
        """Queues a write of the index on a thread, unless one is queued: that write will include
        all changes until it begins."""
        with self._state_lock:
            waits, self._flush_waits = self._flush_waits, True
        if not waits and not self._writing.submit([self._flush]):
            self._flush_waits = False  # the next change tries again

    def _flush(self) -> None:
        self._flush_waits = False
        try:
            self._index.flush()
        except OSError as error:
            if not self._lost:
                self._write_failed(error)

    def _write_refusal(self) -> str:
        """Returns why nothing can be written now, or "" if writing is possible."""
        if self._index.vanished():
            return self._lose(OSError(errno.ENOENT, "its index was deleted"))
        if time.monotonic() < self._full_until_s:
            return explain(self.folder, OSError(errno.ENOSPC, "full"))
        return ""

    def _write_failed(self, error: OSError) -> str:
        """Handles a failed write. A full disk is still read from; any other error ends the tier."""
        self._counters.add(StoreCounts(failed_operations=1))
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return self._lose(error)
        text = explain(self.folder, error)
        with self._state_lock:
            first = time.monotonic() >= self._full_until_s
            self._full_until_s = time.monotonic() + FULL_PAUSE_S
        if first:
            _log.warning("%s; the stored blocks are still read", text)
        return text

    def _read_failed(self, error: OSError) -> str:
        """Handles a failed read. One failure is a miss; MAX_READ_FAILURES in a row end the tier."""
        self._counters.add(StoreCounts(failed_operations=1))
        with self._state_lock:
            self._read_failures += 1
            often = self._read_failures >= MAX_READ_FAILURES
        if often:
            return self._lose(error)
        text = explain(self.folder, error)
        _log.warning("a read of the SSD tier failed, and its blocks are computed: %s", text)
        return text

    def _lose(self, error: OSError) -> str:
        text = explain(self.folder, error)
        with self._state_lock:
            if self._lost:
                return self._lost
            self._lost = text
        _log.warning("serving goes on without the SSD tier: %s", text)
        self._deliver(StoreLost(error=text))
        return text

    def _pause(self, error: str) -> None:
        text = f"{self.folder}: {error}; it is not used until it responds"
        _log.warning("serving goes on without the SSD tier: %s", text)
        self._counters.add(StoreCounts(failed_operations=1))
        self._deliver(TierPaused(error=text))

    def _resume(self) -> None:
        _log.warning("the disk of %s responds again", self.folder)
        self._deliver(TierResumed())

    def _deliver(self, event: MessengerEvent) -> None:
        """Posts the event. Never raises: the worker may have ended before this thread."""
        try:
            self._post(event)
        except Exception as error:
            _log.warning("the worker did not accept a %s: %s", type(event).__name__, error)


def open_store(
    root: Path,
    instance_id: str,
    arena: Arena,
    num_slots: int,
    post: Callable[[MessengerEvent], None],
    segment_bytes: int = SEGMENT_BYTES,
    hang_s: float = HANG_S,
) -> BlockStore:
    """Opens the instance's folder below `root` with the blocks in it. Raises StoreError."""
    slots = open_store_folder(root, instance_id, arena.layout, num_slots, segment_bytes)
    store = BlockStore(arena, slots, post, hang_s)
    if slots.was_rebuilt and store.stored:
        _log.warning("%s had no readable index; it was rebuilt from the slots", slots.path)
    return store
