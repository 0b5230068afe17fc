"""This end of every operation: what each of them needs to know about its own instance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.kvcache.transfers import MessengerEvent
from moonpool.messenger.arena import Arena
from moonpool.messenger.counters import Counters
from moonpool.messenger.cut import Cut
from moonpool.messenger.landing_table import Checksum, checksum_slice
from moonpool.messenger.mover import Mover
from moonpool.messenger.transport import Connection
from moonpool.messenger.unnamed import Unnamed
from moonpool.messenger.wire import MAX_SLICES_PER_FRAME, OFFER, Slices, pack_offers
from moonpool.types import BlockId, InstanceId

_log = logging.getLogger(__name__)
FRAME_BYTES = 4 << 20
"""Offered at most at a time: each frame that a slow peer takes is a sign of its life."""
FIRST_BYTES = 256 << 10
"""Hashed before the first frame leaves, if that must be; twice as much before each of the next."""


@dataclass(frozen=True, slots=True)
class Station:
    """Immutable but for the counters. `checksum` is what the mover computes."""

    instance_id: InstanceId
    arena: Arena
    deliver: Callable[[MessengerEvent], None]
    mover: Mover
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
        cut: Cut | None = None,
        unnamed: Unnamed | None = None,
    ) -> int:
        """Sends slices, each (index, block id, layer), and returns their bytes. `deadline_s` is
        asked anew for each frame. `cut`: what the peer keeps. `unnamed`: those without a sum may go
        so, and are noted there."""
        if cut is not None and cut != self.arena.cut:
            return self._offer_cut(connection, slices, deadline_s, mark_last, cut)
        arena = self.arena
        size, count, start = arena.slice_bytes, len(slices), 0
        most = max(1, min(MAX_SLICES_PER_FRAME, FRAME_BYTES // size))
        offers = bytearray(pack_offers((i, layer, block, 0) for i, block, layer in slices))
        if not connection.takes_unnamed:
            unnamed = None
        most_hashed = FIRST_BYTES if unnamed is None else 0
        while start < count:
            # What had to be hashed goes out early: the peer copies while the rest is hashed.
            limit = min(count, start + most)
            end = self.mover.name(arena, offers, start, limit, most_hashed)
            part = bytes(offers[start * OFFER.size : end * OFFER.size])
            last = mark_last and end == count
            if unnamed is not None:
                unnamed.sent(part)
            connection.offer(Slices(offers=part, last=last), arena, deadline_s())
            self.counters.sent(connection.transport, end - start, size * (end - start))
            start, most_hashed = end, 2 * most_hashed
        return size * count

    def _offer_cut(
        self,
        connection: Connection,
        slices: Sequence[tuple[int, BlockId, int]],
        deadline_s: Callable[[], float],
        mark_last: bool,
        cut: Cut,
    ) -> int:
        """The same of whole slices, of which the peer keeps a share."""
        arena = self.arena
        most = max(1, min(MAX_SLICES_PER_FRAME, FIRST_BYTES // cut.num_bytes))
        for first in range(0, len(slices), most):
            group = slices[first : first + most]
            named = []
            for index, block_id, layer in group:
                whole = arena.slice(block_id, layer)
                checksum = self.checksum(memoryview(b"".join(cut.of(whole))))
                known = arena.sums.get(block_id, layer)
                if known and self.checksum(whole) != known:
                    checksum ^= 1  # our memory has changed: the peer must see that it is wrong
                named.append((index, layer, block_id, checksum))
            last = mark_last and first + most >= len(slices)
            offer = Slices(offers=pack_offers(named), last=last)
            connection.offer(offer, arena, deadline_s(), cut)
            num_bytes = cut.num_bytes * len(group)
            self.counters.sent(connection.transport, len(group), num_bytes)
        return cut.num_bytes * len(slices)
