"""Reads that peers make of our cached blocks.

A read: ReadRequested is posted -> the worker grants blocks (pinned from then on) -> they are sent
-> the reader releases them, or is lost, or its lease ends -> ReadEnded is posted, once, always.
A reader that still copies after its lease ended may copy rubbish; its own checksums tell it so.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from moonpool.kvcache.transfers import ReadEnded, ReadRequested
from moonpool.messenger.line import Line
from moonpool.messenger.station import Station
from moonpool.messenger.transport import (
    Connection,
    DeadlineError,
    ProtocolError,
    TransportError,
)
from moonpool.messenger.wire import (
    ReadBlocks,
    ReadGranted,
    ReadReleased,
    Refused,
    SlicesEnd,
)
from moonpool.types import BlockId


class _Read:
    def __init__(self, num_keys: int) -> None:
        self.num_keys = num_keys
        self.line = Line()
        self.answered = threading.Event()
        self.granted: tuple[BlockId, ...] | None = None


class Reads:
    """Those in progress. `serve` runs in a connection's thread, the rest in any."""

    def __init__(self, station: Station, lease_s: float) -> None:
        self._station = station
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._reads: dict[str, _Read] = {}
        self._numbers = itertools.count(1)

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        """Ignored if the read has ended (its ReadEnded is posted then). ValueError on bad ids."""
        with self._lock:
            read = self._reads.get(read_id)
            if read is None or read.answered.is_set():
                return
            if len(block_ids) > read.num_keys:
                raise ValueError(f"{len(block_ids)} blocks granted, {read.num_keys} asked for")
            for block_id in block_ids:
                if not self._station.arena.holds(block_id):
                    raise ValueError(f"granted block {block_id} is outside the arena")
            read.granted = tuple(block_ids)
            read.answered.set()

    def serve(self, connection: Connection, request: ReadBlocks) -> None:
        read = _Read(len(request.keys))
        read.line.hold(connection)
        with self._lock:
            read_id = f"{connection.peer}/{next(self._numbers)}"
            self._reads[read_id] = read
        self._station.post(ReadRequested(read_id=read_id, keys=request.keys))
        error = "failed unexpectedly; see the log"
        try:
            deadline_s = time.monotonic() + min(self._lease_s, request.timeout_s)
            self._lend(connection, read, deadline_s)
            error = ""
        except DeadlineError as failure:
            error = f"the lease of {connection.peer} ran out: {failure}"
        except TransportError as failure:
            error = f"read by {connection.peer}: {read.line.explain(failure)}"
        finally:
            with self._lock:
                del self._reads[read_id]
            if error:
                self._station.counters.failed()
            self._station.post(ReadEnded(read_id=read_id, error=error))

    def close(self, reason: str) -> None:
        with self._lock:
            for read in self._reads.values():
                read.line.break_off(reason)
                read.answered.set()

    def _lend(self, connection: Connection, read: _Read, deadline_s: float) -> None:
        read.answered.wait(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            read.answered.set()  # a grant that comes from now on is too late, and ignored
            granted = read.granted
        if granted is None:
            connection.send(Refused(reason="no answer in time"), time.monotonic() + 1.0)
            raise DeadlineError("the worker granted nothing in time")
        connection.send(ReadGranted(num_blocks=len(granted)), deadline_s)
        num_layers = self._station.arena.layout.num_layers
        for index, block_id in enumerate(granted):
            block = [(index, block_id, layer) for layer in range(num_layers)]
            self._station.offer(connection, block, deadline_s)
        connection.send(SlicesEnd(), deadline_s)
        released = connection.receive(deadline_s)
        if not isinstance(released, ReadReleased):
            raise ProtocolError(f"unexpected {type(released).__name__} instead of a release")
        if released.corrupt_slices:
            raise TransportError(f"the reader found {released.corrupt_slices} slices corrupt")
