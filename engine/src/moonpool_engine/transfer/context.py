"""The state that all transfers of one instance share: its arena, copier, counters and event
callback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.protocol.transfer_events import MessengerEvent
from moonpool.types import BlockId, InstanceId
from moonpool_engine.transfer.arena import Arena, DeferredChecksums
from moonpool_engine.transfer.connection import Connection
from moonpool_engine.transfer.counters import Counters
from moonpool_engine.transfer.reshard import ShardView
from moonpool_engine.transfer.slice_copier import SliceCopier
from moonpool_engine.transfer.slice_receiver import SliceReceiver
from moonpool_engine.transfer.wire import MAX_SLICES_PER_FRAME, OFFER, Slices, pack_offers

_log = logging.getLogger(__name__)
FRAME_BYTES = 4 << 20
"""The most slice bytes offered per frame: each frame that a slow peer accepts proves it alive."""
FIRST_BYTES = 256 << 10
"""The most bytes hashed before the first frame is sent. Doubles with each frame."""

SliceRef = tuple[int, BlockId, int]
"""Identifies a slice to send: (index at the receiver, block id, layer)."""


@dataclass(frozen=True, slots=True)
class TransferContext:
    """Immutable, except for the counters."""

    instance_id: InstanceId
    arena: Arena
    deliver: Callable[[MessengerEvent], None]
    slice_copier: SliceCopier
    counters: Counters = field(default_factory=Counters)

    def post(self, event: MessengerEvent) -> None:
        """Delivers the event to the worker. Never raises: the worker may have ended before the
        thread that reports to it."""
        try:
            self.deliver(event)
        except Exception as error:
            _log.warning("%s did not accept %s: %s", self.instance_id, type(event).__name__, error)

    def slice_receiver(
        self, block_ids: Sequence[BlockId], first_index: int = 0, accepts_deferred: bool = False
    ) -> SliceReceiver:
        """Returns a receiver of slices of index `first_index + i` into `block_ids[i]`."""
        return SliceReceiver(
            self.arena,
            block_ids,
            first_index,
            self.counters,
            self.slice_copier.group_bytes,
            accepts_deferred,
        )

    def send_slices(
        self,
        connection: Connection,
        slices: Sequence[SliceRef],
        deadline_s: Callable[[], float],
        mark_last: bool = False,
        target_view: ShardView | None = None,
        deferred: DeferredChecksums | None = None,
    ) -> int:
        """Sends slices and returns their bytes. `deadline_s` is called again for each frame.
        `target_view`: the part of each slice that the peer stores. `deferred`: notes slices without
        known checksum, which may be sent without it."""
        if target_view is not None and target_view != self.arena.shard_view:
            return self._send_shards(connection, slices, deadline_s, mark_last, target_view)
        arena = self.arena
        size, count, start = arena.slice_bytes, len(slices), 0
        most = max(1, min(MAX_SLICES_PER_FRAME, FRAME_BYTES // size))
        offers = bytearray(pack_offers((i, layer, block, 0) for i, block, layer in slices))
        if not connection.defers_checksums:
            deferred = None
        most_hashed = FIRST_BYTES if deferred is None else 0
        while start < count:
            # Slices that had to be hashed are sent early, so that the peer copies while other
            # slices are hashed.
            limit = min(count, start + most)
            end = self.slice_copier.fill_checksums(arena, offers, start, limit, most_hashed)
            part = bytes(offers[start * OFFER.size : end * OFFER.size])
            last = mark_last and end == count
            if deferred is not None:
                deferred.note_sent(part)
            connection.send_slices(Slices(offers=part, last=last), arena, deadline_s())
            self.counters.sent(connection.transport, end - start, size * (end - start))
            start, most_hashed = end, 2 * most_hashed
        return size * count

    def _send_shards(
        self,
        connection: Connection,
        slices: Sequence[SliceRef],
        deadline_s: Callable[[], float],
        mark_last: bool,
        target_view: ShardView,
    ) -> int:
        """Sends the part of each whole slice that the peer stores."""
        arena = self.arena
        most = max(1, min(MAX_SLICES_PER_FRAME, FIRST_BYTES // target_view.num_bytes))
        for first in range(0, len(slices), most):
            group = slices[first : first + most]
            offers = []
            for index, block_id, layer in group:
                whole = arena.slice(block_id, layer)
                checksum = self.slice_copier.checksum(memoryview(b"".join(target_view.of(whole))))
                known = arena.checksums.get(block_id, layer)
                if known and self.slice_copier.checksum(whole) != known:
                    checksum ^= 1  # the memory has changed, so the peer must find the slice corrupt
                offers.append((index, layer, block_id, checksum))
            last = mark_last and first + most >= len(slices)
            offer = Slices(offers=pack_offers(offers), last=last)
            connection.send_slices(offer, arena, deadline_s(), target_view)
            num_bytes = target_view.num_bytes * len(group)
            self.counters.sent(connection.transport, len(group), num_bytes)
        return target_view.num_bytes * len(slices)
