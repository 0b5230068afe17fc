"""One fetch: pulls cached blocks of another instance into blocks of our own, in its own thread."""

from __future__ import annotations

import time
from collections.abc import Callable

from moonpool.kvcache.transfers import FetchEnded
from moonpool.messenger.auth import AuthError
from moonpool.messenger.landing import Landing
from moonpool.messenger.line import Line
from moonpool.messenger.station import Station
from moonpool.messenger.transport import Connection, ProtocolError, TransportError
from moonpool.messenger.wire import (
    ReadBlocks,
    ReadGranted,
    ReadReleased,
    Refused,
    Slices,
    SlicesEnd,
)
from moonpool.types import BlockKey, InstanceId

Dial = Callable[[float], Connection]


class Fetch:
    """`run` blocks until the fetch ended, and tells how. What arrived before a failure counts."""

    def __init__(
        self,
        fetch_id: str,
        source: InstanceId,
        keys: tuple[BlockKey, ...],
        landing: Landing,
        deadline_s: float,
    ) -> None:
        self.line = Line()
        self._fetch_id = fetch_id
        self._source = source
        self._keys = keys
        self._landing = landing
        self._deadline_s = deadline_s

    def run(self, dial: Dial, station: Station) -> FetchEnded:
        started_s = time.monotonic()
        error = "failed unexpectedly; see the log"
        connection: Connection | None = None
        try:
            connection = dial(self._deadline_s)
            self.line.hold(connection)
            self._pull(connection)
            error = ""
        except (TransportError, AuthError) as failure:
            error = f"fetch from {self._source}: {self.line.explain(failure)}"
            station.counters.failed()
        finally:
            if connection is not None:
                connection.close()
        return FetchEnded(
            fetch_id=self._fetch_id,
            num_blocks=self._landing.verified_prefix(),
            corrupt_slices=self._landing.corrupt_slices,
            num_bytes=self._landing.num_bytes,
            seconds=time.monotonic() - started_s,
            error=error,
        )

    def _pull(self, connection: Connection) -> None:
        deadline_s = self._deadline_s
        timeout_s = max(0.001, deadline_s - time.monotonic())
        connection.send(ReadBlocks(keys=self._keys, timeout_s=timeout_s), deadline_s)
        granted = connection.receive(deadline_s)
        if isinstance(granted, Refused):
            raise TransportError(f"refused: {granted.reason}")
        if not isinstance(granted, ReadGranted) or granted.num_blocks > len(self._keys):
            raise ProtocolError("the answer to a read is not a grant of at most what was asked")
        while True:
            message = connection.receive(deadline_s)
            if isinstance(message, SlicesEnd):
                break
            if not isinstance(message, Slices):
                raise ProtocolError(f"unexpected {type(message).__name__} during a read")
            self._landing.land(connection, message.offers, deadline_s)
        connection.send(ReadReleased(corrupt_slices=self._landing.corrupt_slices), deadline_s)
