"""Reads that peers make of our cached blocks.

A read: ReadRequested is posted -> the worker grants blocks (pinned from then on) -> they are sent
-> the reader releases them, or is lost, or its lease ends -> ReadEnded is posted, once, always.
A lease runs from the reader's last sign of life: a frame it took, or its word that it goes on; and
never beyond the time it asked for.
A reader that still copies after its lease ended may copy rubbish; its own checksums tell it so.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from moonpool.kvcache.transfers import PeerAddress, ReadEnded, ReadRequested
from moonpool.messenger.cut import NOWHERE, Cut, fit
from moonpool.messenger.line import Line
from moonpool.messenger.station import Station
from moonpool.messenger.transport import (
    Connection,
    DeadlineError,
    ProtocolError,
    TransportError,
)
from moonpool.messenger.wire import (
    Elsewhere,
    ReadBlocks,
    ReadGranted,
    ReadReleased,
    ReadRenewed,
    Refused,
)
from moonpool.types import BlockId


class _Read:
    def __init__(self, num_keys: int, layers: range, cut: Cut | None) -> None:
        self.num_keys = num_keys
        self.cut = cut  # what the reader keeps of slices
        self.layers = layers
        self.line = Line()
        self.answered = False
        self.waiting = threading.Lock()  # held until there is an answer, or no more need of one
        self.waiting.acquire()
        self.granted: tuple[BlockId, ...] | None = None
        self.elsewhere: tuple[PeerAddress, ...] = ()
        self.doubted = False

    def answer(self) -> None:
        if not self.answered:
            self.answered = True
            self.waiting.release()


class Reads:
    """Those in progress. `serve` runs in a connection's thread, the rest in any."""

    def __init__(self, station: Station, lease_s: float) -> None:
        self._station = station
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._reads: dict[str, _Read] = {}
        self._numbers = itertools.count(1)

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        """Ignored if the read has ended (its ReadEnded is posted then). Blocks that lie NOWHERE are
        at others. ValueError on bad ids."""
        with self._lock:
            read = self._reads.get(read_id)
            if read is None or read.answered:
                return
            if len(block_ids) > read.num_keys:
                raise ValueError(f"{len(block_ids)} blocks granted, {read.num_keys} asked for")
            for block_id in block_ids:
                if not self._station.arena.holds(block_id) and block_id != NOWHERE:
                    raise ValueError(f"granted block {block_id} is outside the arena")
            read.granted = tuple(block_ids) if any(b != NOWHERE for b in block_ids) else ()
            read.answer()

    def send_on(self, read_id: str, addresses: tuple[PeerAddress, ...]) -> None:
        """An answer too: the blocks are there, a share at each. Ignored if the read has ended."""
        with self._lock:
            read = self._reads.get(read_id)
            if read is not None and not read.answered:
                read.elsewhere = addresses
                read.answer()

    def serve(self, connection: Connection, request: ReadBlocks) -> bool:
        """True if the connection is fit for another operation."""
        layers = range(request.first_layer, self._station.arena.layout.num_layers)
        if not layers:
            raise ProtocolError(f"layer {request.first_layer} is asked for, which no block has")
        arena = self._station.arena
        cut, arena = request.cut, self._station.arena
        if cut is not None and arena.cut is None and not cut.fits(arena.slice_bytes):
            raise ProtocolError("the reader keeps a share of slices that are not ours")
        read = _Read(len(request.keys), layers, cut)
        read.line.hold(connection)
        with self._lock:
            read_id = f"{connection.peer}/{next(self._numbers)}"
            self._reads[read_id] = read
        self._station.post(ReadRequested(read_id=read_id, keys=request.keys))
        error = "failed unexpectedly; see the log"
        try:
            self._lend(connection, read, time.monotonic() + request.timeout_s)
            error = ""
        except DeadlineError as failure:
            error = f"the lease of {connection.peer} ran out: {failure}"
        except TransportError as failure:
            error = f"read by {connection.peer}: {read.line.explain(failure)}"
        finally:
            with self._lock:
                del self._reads[read_id]
            read.line.let_go()
            if error:
                self._station.counters.failed()
            corrupt = self._changed(read.granted or ()) if read.doubted else ()
            self._station.post(ReadEnded(read_id=read_id, corrupt=corrupt, error=error))
        return not error

    def close(self, reason: str) -> None:
        with self._lock:
            for read in self._reads.values():
                read.line.break_off(reason)
                read.answer()

    def _changed(self, block_ids: Sequence[BlockId]) -> tuple[BlockId, ...]:
        """Those whose bytes are not what was summed: it was our memory, not the way to the peer."""
        arena, checksum = self._station.arena, self._station.checksum
        changed = []
        for block_id in (b for b in block_ids if b != NOWHERE):
            layers = range(arena.layout.num_layers)
            wrong = sum(
                arena.sums.get(block_id, layer) not in (0, checksum(arena.slice(block_id, layer)))
                for layer in layers
            )
            if wrong:
                self._station.counters.found_corrupt(wrong)
                changed.append(block_id)
        return tuple(changed)

    def _lend(self, connection: Connection, read: _Read, end_s: float) -> None:
        def deadline_s() -> float:
            return min(time.monotonic() + self._lease_s, end_s)

        if not read.waiting.acquire(timeout=max(0.0, deadline_s() - time.monotonic())):
            with self._lock:
                read.answered = True  # a grant that comes from now on is too late, and ignored
        with self._lock:
            granted, elsewhere = read.granted, read.elsewhere
        if elsewhere:
            there = Elsewhere(address=elsewhere[0], others=elsewhere[1:])
            connection.send(there, deadline_s())
            return
        if granted is None:
            connection.send(
                Refused(reason="the source gave no answer by the deadline"), time.monotonic() + 1.0
            )
            raise DeadlineError("the worker granted nothing in time")
        cut = self._station.arena.cut
        if not fit(cut, read.cut):
            granted = ()  # what the reader keeps is at others
        answer = ReadGranted(
            num_blocks=len(granted),
            lease_s=self._lease_s,
            absent=tuple(i for i, block in enumerate(granted) if block == NOWHERE),
            cut=cut,
        )
        if not granted:
            connection.send(answer, deadline_s())
        else:
            connection.hold(answer)
            # Layer by layer, so that the reader can compute with the first ones already.
            slices = [
                (index, block, layer)
                for layer in read.layers
                for index, block in enumerate(granted)
                if block != NOWHERE
            ]
            self._station.offer(connection, slices, deadline_s, mark_last=True, cut=read.cut)
        while isinstance(released := connection.receive(deadline_s()), ReadRenewed):
            pass
        if not isinstance(released, ReadReleased):
            raise ProtocolError(f"unexpected {type(released).__name__} instead of a release")
        if released.corrupt_slices:
            read.doubted = True
            raise TransportError(f"the reader found {released.corrupt_slices} slices corrupt")
