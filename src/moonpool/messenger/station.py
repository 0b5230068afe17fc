"""This end of every operation: what each of them needs to know about its own instance."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.kvcache.transfers import MessengerEvent
from moonpool.messenger.arena import Arena
from moonpool.messenger.counters import Counters
from moonpool.messenger.landing import Checksum, checksum_slice, group_slices
from moonpool.messenger.transport import Connection
from moonpool.messenger.wire import SliceOffer
from moonpool.types import BlockId, InstanceId

_log = logging.getLogger(__name__)


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
        deadline_s: float,
    ) -> int:
        """Sends slices, each (index, block id, layer), in groups; returns their bytes."""
        step = group_slices(self.arena.layout.slice_bytes)
        total_bytes = 0
        for start in range(0, len(slices), step):
            views, offers = [], []
            for index, block_id, layer in slices[start : start + step]:
                view = self.arena.slice(block_id, layer)
                views.append(view)
                offers.append(SliceOffer(index, layer, block_id, self.checksum(view)))
            connection.offer(offers, views, deadline_s)
            num_bytes = sum(map(len, views))
            total_bytes += num_bytes
            self.counters.sent(connection.transport, len(views), num_bytes)
        return total_bytes
