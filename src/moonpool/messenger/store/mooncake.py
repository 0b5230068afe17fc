"""A Mooncake Store in the place of the SSD: blocks go to machines that lend it their memory, and
every instance of every cluster that uses the same one finds them.

A block is an object named by layout and content, `moonpool-<fingerprint>-<key>`. Its bytes are a
slot's, as on the SSD (`format`): a header with the layout's fingerprint, the key and a checksum of
each layer's slice, then the block. What comes back is checked against all three where it lies in
the arena; what is wrong is a miss, is counted, and is deleted there, so that the block is put anew.
The store evicts as it likes; a block that is gone is a miss as well. Slots mean nothing here.

The store's client runs in a process of its own (`mooncake_child`, `helper`), which sees the staging
memory of this file and never the arena. Every call has a deadline; with the master gone, all that
is asked ends at once, and is computed.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from moonpool.config import MooncakeConfig
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import LookUpEnded, MessengerEvent
from moonpool.messenger.arena import Arena
from moonpool.messenger.store.counters import StoreCounters, StoreCounts
from moonpool.messenger.store.folder import StoreError
from moonpool.messenger.store.format import Geometry, SlotHeader, encode_header
from moonpool.messenger.store.helper import Helper, HelperError
from moonpool.messenger.store.index import header_of
from moonpool.messenger.store.job import Job, Outcome
from moonpool.messenger.store.lane import Lane, Task
from moonpool.messenger.store.mooncake_child import Ask
from moonpool.messenger.store.slices import Slices
from moonpool.types import BlockId, BlockKey

KNOWN_BLOCKS = 1 << 18
"""Of what is there, an instance remembers so many names; of others it asks again."""
STAGING_BYTES = 16 << 20
"""Of each direction: so much is moved with one call, or one block if that is larger."""
MAX_GROUP_BLOCKS = 64
MAX_GROUPS_WAITING = 4096
MAX_NAMES = 512  # of one look-up: its answer and question fit a message
LOOK_UP_S = 1.0
"""A prefill waits for a look-up."""
MOVE_S = 5.0
SLOWEST_BYTES_PER_S = 20e6
USUAL_BYTES_PER_S = 1e9  # until something was read
_CLOSE_TIMEOUT_S = 10.0
_WRITE, _READ, _ASK = range(3)
_CODES = {
    -200: "it is full: nobody lends it memory (mooncake_client), or too little",
    -704: "it has let go of a block",
}
_log = logging.getLogger(__name__)

Move = Callable[[Job, int, int], None]


class MooncakeStore:
    """As `TierStore` has it. `post` is called from this store's threads, or by the caller's own,
    and must not block."""

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
        """Raises StoreError if the store is not there."""
        layout = arena.layout
        self._config = config
        self._arena = arena
        self._geometry = _object_geometry(layout)
        self._slices = Slices(arena, self._geometry)
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
        self._helper = Helper(config, local_hostname, self._fd, staging_bytes, num_lanes=3)
        try:
            self._helper.start()
        except HelperError as error:
            self._helper.close()
            os.close(self._fd)
            raise StoreError(str(error)) from None
        self.read_bytes_per_s = self._probe()
        self._lanes = [
            Lane(f"mooncake-{what}", 1, MAX_GROUPS_WAITING) for what in ("write", "read", "ask")
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
        def end(outcome: Outcome) -> None:
            self._deliver(outcome.of_store(store_id))

        self._submit(_WRITE, self._write_group, keys, slots, block_ids, end)

    def load(
        self,
        load_id: str,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        block_ids: Sequence[BlockId],
    ) -> None:
        def end(outcome: Outcome) -> None:
            self._deliver(outcome.of_load(load_id))

        self._submit(_READ, self._read_group, keys, slots, block_ids, end)

    def look_up(self, lookup_id: str, keys: Sequence[BlockKey]) -> None:
        if self._closed or not self._lanes[_ASK].submit([partial(self._ask, lookup_id, keys)]):
            error = "it was closed" if self._closed else "too many look-ups wait"
            self._end_look_up(lookup_id, 0, error)

    def forget(self, slots: Sequence[int]) -> None:
        """Others may want what is there: the store itself evicts."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        idle = [lane.close(_CLOSE_TIMEOUT_S) for lane in self._lanes]
        self._helper.close()
        if all(idle):
            os.close(self._fd)

    def _submit(
        self,
        lane: int,
        move: Move,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        block_ids: Sequence[BlockId],
        end: Callable[[Outcome], None],
    ) -> None:
        if not len(keys) == len(slots) == len(block_ids):
            raise ValueError(f"{len(keys)} keys, {len(slots)} slots, {len(block_ids)} blocks")
        for slot, block_id in zip(slots, block_ids, strict=True):
            if not 0 <= slot < self.num_slots or not self._arena.holds(block_id):
                raise ValueError(f"slot {slot} or block {block_id} does not exist")
        starts = range(0, len(keys), self._group)
        job = Job(keys, slots, block_ids, len(starts), end)
        tasks: list[Task] = [
            partial(self._run_group, move, job, start, min(start + self._group, len(keys)))
            for start in starts
        ]
        error = "it was closed" if self._closed else ""
        if not error and not self._lanes[lane].submit(tasks):
            error = "the Mooncake Store is too slow: too many blocks wait for it"
        if error:
            self._counters.add(StoreCounts(failed_operations=1))
        if error or not tasks:
            end(Outcome(0, 0, 0, 0.0, error))

    def _run_group(self, move: Move, job: Job, start: int, end: int) -> None:
        error = "it was closed" if self._closed else ""
        if error or not job.begin_group(start):
            job.group_done(start, 0, end - start, error=error)
            return
        try:
            move(job, start, end)
            return
        except HelperError as failure:
            error = str(failure)
        except Exception as failure:  # no operation may stay without an end
            _log.exception("the Mooncake Store failed")
            error = f"{type(failure).__name__}: {failure}"
        self._counters.add(StoreCounts(failed_operations=1))
        job.group_done(start, 0, end - start, error=error)

    def _write_group(self, job: Job, start: int, end: int) -> None:
        began_s = time.monotonic()
        geometry, head = self._geometry, self._geometry.header_bytes
        for i in range(start, end):
            block_id, place = job.block_ids[i], self._staging[_WRITE, i - start]
            header = SlotHeader(geometry, job.keys[i], 0, 0, self._slices.sums(block_id))
            place[:head] = np.frombuffer(encode_header(header), np.uint8)
            block = np.frombuffer(self._slices.block(block_id), np.uint8)
            place[head : head + geometry.block_bytes] = block
        codes = self._call(_WRITE, "put", job.keys[start:end])
        num_blocks = _run_of(codes, 0)
        num_bytes = num_blocks * geometry.block_bytes
        seconds = time.monotonic() - began_s
        self._counters.add(
            StoreCounts(
                written_blocks=num_blocks,
                written_bytes=num_bytes,
                write_seconds=seconds,
                failed_operations=int(num_blocks < len(codes)),
            )
        )
        job.group_done(start, num_blocks, end - start, num_bytes, 0, _explain(codes, num_blocks))

    def _read_group(self, job: Job, start: int, end: int) -> None:
        began_s = time.monotonic()
        geometry, head = self._geometry, self._geometry.header_bytes
        block_ids = job.block_ids[start:end]
        self._arena.sums.forget(block_ids)
        codes = self._call(_READ, "get", job.keys[start:end])
        num_right, corrupt = _run_of(codes, geometry.slot_bytes), 0
        error = _explain(codes, num_right)
        for number, block_id in enumerate(block_ids[:num_right]):
            place, key = self._staging[_READ, number], job.keys[start + number]
            block = np.frombuffer(self._slices.block(block_id), np.uint8)
            block[:] = place[head : head + geometry.block_bytes]
            header = header_of(place[:head].tobytes(), geometry, 0)
            corrupt = self._slices.count_wrong(block_id, key, header)
            if corrupt:
                num_right, error = number, "a block of the Mooncake Store is damaged"
                self._call(_READ, "remove", [key])
                break
        num_bytes = num_right * geometry.block_bytes
        self._counters.add(
            StoreCounts(
                read_blocks=num_right,
                read_bytes=num_bytes,
                read_seconds=time.monotonic() - began_s,
                corrupt_slices=corrupt,
            )
        )
        job.group_done(start, num_right, end - start, num_bytes, corrupt, error)

    def _ask(self, lookup_id: str, keys: Sequence[BlockKey]) -> None:
        by_s = time.monotonic() + LOOK_UP_S
        num_blocks, error = 0, ""
        try:
            for start in range(0, len(keys), MAX_NAMES):
                asked = keys[start : start + MAX_NAMES]
                left_s = max(by_s - time.monotonic(), 0.01)
                found = _run_of(self._call(_ASK, "exist", asked, left_s), 1)
                num_blocks += found
                if found < len(asked):
                    break
        except HelperError as failure:
            error = str(failure)
            self._counters.add(StoreCounts(failed_operations=1))
        self._end_look_up(lookup_id, num_blocks, error)

    def _end_look_up(self, lookup_id: str, num_blocks: int, error: str) -> None:
        self._deliver(LookUpEnded(lookup_id=lookup_id, num_blocks=num_blocks, error=error))

    def _call(
        self, lane: int, what: str, keys: Sequence[BlockKey], timeout_s: float = 0.0
    ) -> list[int]:
        """Of objects that lie, or shall lie, in the lane's staging memory. Raises HelperError."""
        names = [object_name(self._arena.layout, key) for key in keys]
        return self._call_names(lane, what, names, timeout_s)

    def _call_names(
        self, lane: int, what: str, names: list[str], timeout_s: float = 0.0
    ) -> list[int]:
        size = self._geometry.slot_bytes
        first = lane * self._group
        offsets = [(first + number) * size for number in range(len(names))]
        if what in ("exist", "remove"):
            offsets, size = [], 0
        timeout_s = timeout_s or MOVE_S + size * len(names) / SLOWEST_BYTES_PER_S
        return self._helper.call(lane, Ask(what, names, offsets, size), timeout_s)  # type: ignore[arg-type]

    def _probe(self) -> float:
        """Bytes per second of a read of some blocks, which stay there for the next who asks."""
        size = self._geometry.slot_bytes
        names = [f"moonpool-probe-{size}-{number}" for number in range(self._group)]
        try:
            self._call_names(_READ, "put", names)
            best = 0.0
            for _ in range(3):
                began_s = time.monotonic()
                if _run_of(self._call_names(_READ, "get", names), size) == len(names):
                    best = max(best, size * len(names) / (time.monotonic() - began_s))
        except HelperError:
            best = 0.0
        return best or USUAL_BYTES_PER_S

    def _deliver(self, event: MessengerEvent) -> None:
        """Never raises: a worker that is already gone must not break the thread that tells it."""
        try:
            self._post(event)
        except Exception as error:
            _log.warning("nobody took a %s: %s", type(event).__name__, error)


def object_name(layout: BlockLayout, key: BlockKey) -> str:
    """The name of a block in the store."""
    return f"moonpool-{layout.fingerprint[:8].hex()}-{key.hex()}"


def _object_geometry(layout: BlockLayout) -> Geometry:
    return Geometry(layout.fingerprint, layout.num_layers, layout.slice_bytes, 1)


def _run_of(codes: Sequence[int], right: int) -> int:
    """How many from the first on are as they should be."""
    return next((i for i, code in enumerate(codes) if code != right), len(codes))


def _explain(codes: Sequence[int], num_right: int) -> str:
    if num_right == len(codes):
        return ""
    code = codes[num_right]
    return f"the Mooncake Store: {_CODES.get(code, f'error {code}')}"
