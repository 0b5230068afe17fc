"""The SSD tier's bytes: puts blocks of the arena into numbered slots on disk and gets them back.

Which block goes where, and when, is decided elsewhere (`kvcache.tiers`). Here: a store or load ends
with exactly one terminal event, until then the operation's blocks may be touched, afterwards never;
what is loaded has been verified slice by slice; whatever goes wrong is an error in that event. If
the folder itself fails, `StoreLost` is posted once and every later operation ends at once; while
the disk hangs (`watch`), everything ends with an error, and what it still holds is told.

All methods return at once. Blocks move straight between arena and disk, in this store's threads,
without the GIL. Format and crash safety: see `format`.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from moonpool.kvcache.transfers import (
    LoadReturned,
    MessengerEvent,
    StoreLost,
    StoreReturned,
    TierPaused,
    TierResumed,
)
from moonpool.messenger.arena import Arena
from moonpool.messenger.gate import LayerGate
from moonpool.messenger.store.counters import StoreCounters, StoreCounts
from moonpool.messenger.store.folder import (
    FolderLock,
    StoreError,
    explain,
    instance_folder,
    make_folder,
    read_geometry,
)
from moonpool.messenger.store.format import (
    SEGMENT_BYTES,
    FormatError,
    Geometry,
    SlotHeader,
    encode_header,
    make_geometry,
)
from moonpool.messenger.store.index import SlotIndex, header_of, open_index
from moonpool.messenger.store.job import Job, Outcome
from moonpool.messenger.store.lane import Lane, Task
from moonpool.messenger.store.layered import Layers, Part, Told, cut
from moonpool.messenger.store.probe import Disk, probe_disk
from moonpool.messenger.store.segments import Segments
from moonpool.messenger.store.slices import Slices
from moonpool.messenger.store.watch import HANG_S, Watch
from moonpool.types import BlockId, BlockKey

GROUP_BYTES = 4 << 20
"""Neighbouring slots are moved with one call, up to so much: larger ones are no faster."""
MAX_GROUP_BLOCKS = 256  # of three buffers each, a call takes 1,024
WRITE_THREADS = 2
"""One hashes while the other waits for the disk."""
READ_THREADS = 4
"""A part of a block is a small read: more of them under way keep the disk busy."""
MAX_GROUPS_WAITING = 4096
WRITE_NICE = 10
"""Nobody waits for a write, but for every step that decodes somebody does."""
FULL_PAUSE_S = 10.0
"""After the disk was found full, so long no more is written to it."""
MAX_READ_FAILURES = 3
_CLOSE_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)

Move = Callable[[Job, int, int], None]


class BlockStore:
    """One instance's slots 0 ... num_slots - 1, as `TierStore` has them. `post` is called from this
    store's threads, or by the caller's own, and must not block."""

    name = "SSD"
    shared = False

    def __init__(
        self,
        arena: Arena,
        folder: Path,
        lock: FolderLock,
        segments: Segments,
        index: SlotIndex,
        disk: Disk,
        num_slots: int,
        post: Callable[[MessengerEvent], None],
        hang_s: float = HANG_S,
    ) -> None:
        self.folder = folder
        self.geometry = segments.geometry
        self.disk = disk
        self.num_slots = num_slots
        self.stored = index.held()
        self._arena = arena
        self._folder_lock = lock
        self._slices = Slices(arena, segments.geometry)
        self._segments = segments
        self._index = index
        self._post = post
        self._counters = StoreCounters()
        self._scratch = threading.local()
        self._padding = bytes(self.geometry.padding_bytes)
        self._state_lock = threading.Lock()  # guards what follows
        self._lost = ""
        self._full_until_s = 0.0
        self._read_failures = 0
        self._writing = Lane("store-write", WRITE_THREADS, MAX_GROUPS_WAITING, WRITE_NICE)
        self._reading = Lane("store-read", READ_THREADS, MAX_GROUPS_WAITING)
        self._watch = Watch(self._pause, self._resume, hang_s)

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
        """Writes `block_ids[i]`, whose content is named `keys[i]`, to `slots[i]`. Ends with
        StoreEnded."""

        def end(outcome: Outcome) -> None:
            self._deliver(outcome.of_store(store_id))

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
        With a `gate`, layer by layer."""

        def end(outcome: Outcome) -> None:
            self._deliver(outcome.of_load(load_id))
            if gate is not None:
                gate.end(not outcome.hung and outcome.num_blocks == len(keys))

        returned = partial(self._deliver, LoadReturned(load_id=load_id))
        groups = self._checked_groups(keys, slots, block_ids)
        parts = cut(self.geometry) if gate is not None else ()
        if gate is None or len(parts) < 2:
            job = Job(keys, slots, block_ids, len(groups), end, returned)
            self._submit(self._reading, self._read_group, job, groups)
            return
        told = Told(load_id, parts, gate, self._deliver)
        job = Job(keys, slots, block_ids, len(groups), end, returned, len(parts), told)
        layers = Layers(len(keys), [start for start, _ in groups])
        self._arena.sums.forget(block_ids)
        tasks: list[Task] = [
            partial(
                self._run_group, partial(self._read_part, layers, number, part), job, *group, number
            )
            for number, part in enumerate(parts)
            for group in groups
        ]
        self._begin(self._reading, job, tasks)

    def forget(self, slots: Sequence[int]) -> None:
        """What lies there shall not be found again after a restart."""
        self._index.void(slots)
        self._writing.submit([self._flush])

    def close(self) -> None:
        """Every operation under way ends first, those that still wait with an error."""
        with self._state_lock:
            self._lost = self._lost or "the SSD tier was closed"
        self._watch.close()
        timeout_s = 0.0 if self._watch.error else _CLOSE_TIMEOUT_S
        idle = [lane.close(timeout_s) for lane in (self._reading, self._writing)]
        if not all(idle):
            _log.warning("the disk of %s does not answer; it is left alone", self.folder)
            return
        self._flush()
        self._index.close()
        self._segments.close()
        self._folder_lock.release()

    # Groups of neighbouring slots

    def _checked_groups(
        self, keys: Sequence[BlockKey], slots: Sequence[int], block_ids: Sequence[BlockId]
    ) -> list[tuple[int, int]]:
        if not len(keys) == len(slots) == len(block_ids):
            raise ValueError(f"{len(keys)} keys, {len(slots)} slots, {len(block_ids)} blocks")
        for slot, block_id in zip(slots, block_ids, strict=True):
            if not 0 <= slot < self.num_slots or not self._arena.holds(block_id):
                raise ValueError(f"slot {slot} or block {block_id} does not exist")
        return list(self._groups(slots))

    def _submit(self, lane: Lane, move: Move, job: Job, groups: Sequence[tuple[int, int]]) -> None:
        self._begin(lane, job, [partial(self._run_group, move, job, *group) for group in groups])

    def _begin(self, lane: Lane, job: Job, tasks: list[Task]) -> None:
        error = self._lost
        if not error and not self._watch.add(job):
            error = self._watch.error or "the disk did not answer just now"
        elif not error and not lane.submit(tasks):
            self._watch.remove(job)
            error = "the disk is too slow: too many blocks wait for it"
        if error:
            self._counters.add(StoreCounts(failed_operations=1))
        if error or not tasks:
            job.refuse(error)

    def _groups(self, slots: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Index ranges of consecutive slots of one segment."""
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
            except Exception as error:  # no operation may stay without an end
                _log.exception("the SSD tier failed")
                text = f"{type(error).__name__}: {error}"
                job.group_done(start, 0, end - start, error=text, part=part)
        if job.ended and job.moving_since_s() is None:
            self._watch.remove(job)

    def _write_group(self, job: Job, start: int, end: int) -> None:
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
            block, sums = self._slices.block(block_id), self._slices.sums(block_id)
            header = SlotHeader(self.geometry, job.keys[i], job.slots[i], sequence, sums)
            place = headers[i - start]
            place[:] = encode_header(header)
            buffers += [place, block]
            if self._padding:
                buffers.append(self._padding)
        try:
            self._index.flush()  # void first, then written: see `format`
            self._segments.write(job.slots[start], buffers)
            if job.ended:  # it was given up: the blocks may have been another's meanwhile
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
        self._arena.sums.forget(job.block_ids[start:end])
        for i in range(start, end):
            buffers += [headers[i - start], self._slices.block(job.block_ids[i])]
            if self._padding:
                buffers.append(self._scratch.padding)
        try:
            got_bytes = self._segments.read(job.slots[start], buffers)
        except OSError as failure:
            job.group_done(start, 0, end - start, error=self._read_failed(failure))
            return
        self._read_failures = 0
        num_right = corrupt = 0
        bad: list[int] = []
        for i in range(start, end):
            arrived = got_bytes >= (i - start + 1) * geometry.slot_bytes
            header = header_of(headers[i - start], geometry, job.slots[i]) if arrived else None
            wrong = self._slices.count_wrong(job.block_ids[i], job.keys[i], header)
            if wrong:
                bad.append(job.slots[i])
                corrupt += wrong
            elif not bad:
                num_right += 1
        self._note_read(job.slots[start : start + num_right], bad)
        num_bytes = num_right * geometry.block_bytes
        self._counters.add(
            StoreCounts(
                read_blocks=num_right,
                read_bytes=num_bytes,
                read_seconds=time.monotonic() - began_s,
                corrupt_slices=corrupt,
            )
        )
        job.group_done(start, num_right, end - start, num_bytes, corrupt, _damaged(bad))

    def _read_part(
        self, layers: Layers, number: int, part: Part, job: Job, start: int, end: int
    ) -> None:
        """Some layers of neighbouring slots; with the first of them come the headers."""
        began_s = time.monotonic()
        geometry, headers = self.geometry, self._headers()
        first_bytes = geometry.header_bytes + part.first * geometry.slice_bytes
        num_right = corrupt = 0
        bad: list[int] = []
        try:
            for i in range(start, end):
                layer_bytes = self._slices.layers(job.block_ids[i], part.first, part.end)
                if number:
                    self._segments.read(job.slots[i], [layer_bytes], first_bytes)
                else:
                    header = headers[i - start]
                    got_bytes = self._segments.read(job.slots[i], [header, layer_bytes])
                    if got_bytes >= geometry.header_bytes:
                        layers.headers[i] = header_of(header, geometry, job.slots[i])
        except OSError as failure:
            job.group_done(start, 0, end - start, error=self._read_failed(failure), part=number)
            return
        finally:
            if not number:
                layers.headers_read(start)
        layers.await_headers(start, job)
        self._read_failures = 0
        for i in range(start, end):
            wrong = self._slices.count_wrong(
                job.block_ids[i], job.keys[i], layers.headers[i], part.first, part.end
            )
            if wrong:
                bad.append(job.slots[i])
                corrupt += wrong
            elif not bad:
                num_right += 1
        last = part.end == geometry.num_layers
        num_bytes = num_right * (part.end - part.first) * geometry.slice_bytes
        self._note_read(job.slots[start : start + num_right] if last else (), bad)
        self._counters.add(
            StoreCounts(
                read_blocks=num_right if last else 0,
                read_bytes=num_bytes,
                read_seconds=time.monotonic() - began_s,
                corrupt_slices=corrupt,
            )
        )
        error = _damaged(bad)
        job.group_done(start, num_right, end - start, num_bytes, corrupt, error, number)

    def _note_read(self, used: Sequence[int], bad: Sequence[int]) -> None:
        """What was used, and what must not be found again."""
        if used or bad:
            self._index.use(used)
            self._index.void(bad)
            self._writing.submit([self._flush])

    def _headers(self) -> list[memoryview]:
        """This thread's buffers for the headers of a group, each of whole pages."""
        scratch = self._scratch
        if not hasattr(scratch, "headers"):
            size = self.geometry.header_bytes
            count = max(1, min(MAX_GROUP_BLOCKS, GROUP_BYTES // self.geometry.slot_bytes))
            pages = memoryview(mmap.mmap(-1, count * size))
            scratch.headers = [pages[i * size : (i + 1) * size] for i in range(count)]
            scratch.padding = memoryview(bytearray(self.geometry.padding_bytes))
        headers: list[memoryview] = scratch.headers
        return headers

    # What goes wrong

    def _flush(self) -> None:
        try:
            self._index.flush()
        except OSError as error:
            if not self._lost:
                self._write_failed(error)

    def _write_refusal(self) -> str:
        """Why nothing can be written now; "" if it can."""
        if self._index.vanished():
            return self._lose(OSError(errno.ENOENT, "its index was deleted"))
        if time.monotonic() < self._full_until_s:
            return explain(self.folder, OSError(errno.ENOSPC, "full"))
        return ""

    def _write_failed(self, error: OSError) -> str:
        """A full disk can still be read from; anything else is the end."""
        self._counters.add(StoreCounts(failed_operations=1))
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return self._lose(error)
        text = explain(self.folder, error)
        with self._state_lock:
            news = time.monotonic() >= self._full_until_s
            self._full_until_s = time.monotonic() + FULL_PAUSE_S
        if news:
            _log.warning("%s; what is there is still read", text)
        return text

    def _read_failed(self, error: OSError) -> str:
        """One bad place of a disk is a miss; when nothing can be read any more, it is the end."""
        self._counters.add(StoreCounts(failed_operations=1))
        with self._state_lock:
            self._read_failures += 1
            often = self._read_failures >= MAX_READ_FAILURES
        return self._lose(error) if often else explain(self.folder, error)

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
        text = f"{self.folder}: {error}; it is left alone until it does"
        _log.warning("serving goes on without the SSD tier: %s", text)
        self._counters.add(StoreCounts(failed_operations=1))
        self._deliver(TierPaused(error=text))

    def _resume(self) -> None:
        _log.warning("the disk of %s answers again", self.folder)
        self._deliver(TierResumed())

    def _deliver(self, event: MessengerEvent) -> None:
        """Never raises: a worker that is already gone must not break the thread that tells it."""
        try:
            self._post(event)
        except Exception as error:
            _log.warning("nobody took a %s: %s", type(event).__name__, error)


def _damaged(bad: Sequence[int]) -> str:
    return f"{len(bad)} blocks on the disk are damaged" if bad else ""


def open_store(
    root: Path,
    instance_id: str,
    arena: Arena,
    num_slots: int,
    post: Callable[[MessengerEvent], None],
    segment_bytes: int = SEGMENT_BYTES,
    hang_s: float = HANG_S,
) -> BlockStore:
    """Takes over the instance's folder below `root`, and what lies in it. Raises StoreError."""
    folder = instance_folder(root, instance_id)
    make_folder(folder)
    lock = FolderLock(folder)
    try:
        geometry = make_geometry(arena.layout, segment_bytes)
        _check_same(folder, geometry)
        disk = probe_disk(folder, geometry.block_bytes)
        segments = Segments(folder, geometry, num_slots, disk.direct)
        segments.trim()
        _check_space(folder, segments, geometry, num_slots)
        index, rebuilt = open_index(folder, geometry, num_slots)
    except OSError as error:
        lock.release()
        raise StoreError(explain(folder, error)) from None
    except BaseException:
        lock.release()
        raise
    store = BlockStore(arena, folder, lock, segments, index, disk, num_slots, post, hang_s)
    if rebuilt and store.stored:
        _log.warning("%s had no readable index; it was made anew from the slots", folder)
    return store


def _check_same(folder: Path, geometry: Geometry) -> None:
    try:
        found = read_geometry(folder)
    except FormatError as error:
        text = f"{folder} is not ours to read: {error}"
    else:
        if found is None or found == geometry:
            return
        text = f"{folder} holds blocks of another model, dtype or layout"
    raise StoreError(
        f"{text}; name another folder, or clear it with `moonpool pool clear {folder}`"
    )


def _check_space(folder: Path, segments: Segments, geometry: Geometry, num_slots: int) -> None:
    missing_bytes = segments.missing_bytes()
    status = os.statvfs(folder)
    free_bytes = status.f_bavail * status.f_frsize
    if missing_bytes > free_bytes:
        gib = float(1 << 30)
        fit = num_slots - -(-(missing_bytes - free_bytes) // geometry.slot_bytes)
        raise StoreError(
            f"the disk of {folder} is full: the SSD tier needs {missing_bytes / gib:.2f} GiB more"
            f" and only {free_bytes / gib:.2f} GiB are free; free some space, or lower"
            f" pool.ssd_tokens_per_instance to {fit / num_slots:.0%} of what it is"
        )
