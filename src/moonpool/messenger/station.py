"""This end of every operation: what each of them needs to know about its own instance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.kvcache.transfers import MessengerEvent
from moonpool.messenger.arena import Arena
from moonpool.messenger.counters import Counters
from moonpool.messenger.landing import GROUP_BYTES, Checksum, checksum_slice
from moonpool.messenger.transport import Connection
from moonpool.messenger.wire import MAX_SLICES_PER_FRAME, SliceOffer, Slices
from moonpool.types import BlockId, InstanceId

_log = logging.getLogger(__name__)
_FRAME_BYTES = 4 << 20
"""Offered at most at a time: each frame that a slow peer takes is a sign of its life."""


@dataclass(frozen=True, slots=True)
class Station:
    """Immutable but for the counters. `checksum` names the slices that are sent."""

    instance_id: InstanceId
    arena: Arena
    deliver: Callable[[MessengerEvent], None]
    counters: Counters = field(default_factory=Counters)
    checksum: Checksum = checksum_slice

    def post(self, event: MessengerEvent) -> None:
        """Never raises: a worker that is already gone must not break the thread that tells it."""
        try:
            self.deliver(event)
        except Exception as error:
            _log.warning("%s took no %s: %s", self.instance_id, type(event).__name__, error)

    def offer(
        self,
        connection: Connection,
        slices: Sequence[tuple[int, BlockId, int]],
        deadline_s: Callable[[], float],
        mark_last: bool = False,
    ) -> int:
        """Sends slices, each (index, block id, layer), and returns their bytes. `deadline_s` is
        asked anew for each frame."""
        arena = self.arena
        size, block_bytes = arena.slice_bytes, arena.block_bytes
        buffer, known = arena.buffer, arena.sums.get
        most = max(1, min(MAX_SLICES_PER_FRAME, _FRAME_BYTES // size))
        most_hashed = max(1, GROUP_BYTES // size)
        views: list[memoryview] = []
        offers: list[SliceOffer] = []
        num_hashed = 0
        left = len(slices)
        for index, block_id, layer in slices:
            start = block_id * block_bytes + layer * size
            view = buffer[start : start + size]
            checksum = known(block_id, layer)
            if not checksum:
                checksum = self.checksum(view)
                arena.sums.set(block_id, layer, checksum)
                num_hashed += 1
            views.append(view)
            offers.append(SliceOffer(index, layer, block_id, checksum))
            left -= 1
            # What had to be hashed goes out early: the peer copies while the rest is hashed.
            if not left or len(offers) == most or num_hashed == most_hashed:
                last = mark_last and not left
                connection.offer(Slices(offers=offers, last=last), views, deadline_s())
                self.counters.sent(connection.transport, len(views), size * len(views))
                views, offers, num_hashed = [], [], 0
        return size * len(slices)
