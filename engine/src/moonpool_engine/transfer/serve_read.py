"""Serves reads that peers make of our cached blocks.

A read: ReadRequested is posted -> the worker grants blocks, which stay pinned -> they are sent ->
the reader releases them, or is lost, or its lease ends -> ReadEnded is posted, exactly once.
A lease runs from the reader's last sign of life (a frame it accepted, or ReadRenewed) and never
beyond the timeout it asked for. A reader that still copies after its lease ended may copy changed
bytes; its own checksums detect that.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from moonpool.log_limit import limited_logger
from moonpool.protocol.transfer_events import PeerAddress, ReadEnded, ReadRequested
from moonpool.types import BlockId
from moonpool_engine.transfer.connection import CancellableConnection, Connection
from moonpool_engine.transfer.context import TransferContext
from moonpool_engine.transfer.errors import DeadlineError, ProtocolError, TransportError
from moonpool_engine.transfer.reshard import NOWHERE, ShardView, compatible
from moonpool_engine.transfer.wire import (
    ReadBlocks,
    ReadGranted,
    ReadReleased,
    ReadRenewed,
    Redirect,
    Refused,
)

_log = limited_logger(__name__)


class _Read:
    def __init__(self, num_keys: int, layers: range, reader_view: ShardView | None) -> None:
        self.num_keys = num_keys
        self.layers = layers
        self.reader_view = reader_view  # the part of each slice that the reader's arena stores
        self.connection = CancellableConnection()
        self.answered = False
        self.waiting = threading.Lock()  # held until the worker answers or the read is cancelled
        self.waiting.acquire()
        self.granted: tuple[BlockId, ...] | None = None
        self.redirect: tuple[PeerAddress, ...] = ()
        self.reported_corrupt = False

    def answer(self) -> None:
        if not self.answered:
            self.answered = True
            self.waiting.release()


class IncomingReads:
    """The reads in progress. `serve` runs in a connection's thread, other methods in any thread."""

    def __init__(self, context: TransferContext, lease_s: float) -> None:
        self._context = context
        self._lease_s = lease_s
        self._lock = threading.Lock()
        self._reads: dict[str, _Read] = {}
        self._numbers = itertools.count(1)

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None:
        """Grants a block per key, up to the number granted; other peers store a block that is
        NOWHERE. Ignored if the read has ended: its ReadEnded is posted. Raises ValueError on
        invalid ids."""
        with self._lock:
            read = self._reads.get(read_id)
            if read is None or read.answered:
                return
            if len(block_ids) > read.num_keys:
                raise ValueError(f"{len(block_ids)} blocks granted, {read.num_keys} requested")
            for block_id in block_ids:
                if not self._context.arena.holds(block_id) and block_id != NOWHERE:
                    raise ValueError(f"granted block {block_id} is outside the arena")
            read.granted = tuple(block_ids) if any(b != NOWHERE for b in block_ids) else ()
            read.answer()

    def redirect(self, read_id: str, addresses: tuple[PeerAddress, ...]) -> None:
        """Redirects the reader to peers that store a share each. Ignored if the read has ended."""
        with self._lock:
            read = self._reads.get(read_id)
            if read is not None and not read.answered:
                read.redirect = addresses
                read.answer()

    def serve(self, connection: Connection, request: ReadBlocks) -> bool:
        """Serves one read. Returns whether the connection can serve another operation.

        Raises ProtocolError.
        """
        arena, view = self._context.arena, request.shard_view
        layers = range(request.first_layer, arena.layout.num_layers)
        if not layers:
            raise ProtocolError(f"layer {request.first_layer} was requested, which no block has")
        if view is not None and arena.shard_view is None and not view.fits(arena.slice_bytes):
            raise ProtocolError("the reader stores parts of slices of another size")
        read = _Read(len(request.keys), layers, view)
        read.connection.attach(connection)
        with self._lock:
            read_id = f"{connection.peer}/{next(self._numbers)}"
            self._reads[read_id] = read
        self._context.post(ReadRequested(read_id=read_id, keys=request.keys))
        error = "failed unexpectedly; see the log"
        try:
            self._send_blocks(connection, read, time.monotonic() + request.timeout_s)
            error = ""
        except DeadlineError as failure:
            error = f"the lease of {connection.peer} expired: {failure}"
        except TransportError as failure:
            error = f"read by {connection.peer}: {read.connection.explain(failure)}"
        finally:
            with self._lock:
                del self._reads[read_id]
            read.connection.detach()
            if error:
                # closed before the blocks are reused, so that the peer trusts no copy
                connection.close()
                self._context.counters.failed()
            corrupt = self._find_corrupt(read.granted or ()) if read.reported_corrupt else ()
            self._context.post(ReadEnded(read_id=read_id, corrupt=corrupt, error=error))
        return not error

    def close(self, reason: str) -> None:
        """Ends every read."""
        with self._lock:
            for read in self._reads.values():
                read.connection.cancel(reason)
                read.answer()

    def _find_corrupt(self, block_ids: Sequence[BlockId]) -> tuple[BlockId, ...]:
        """Returns the blocks whose bytes no longer match their checksums: their bytes changed in
        this instance's memory, not on the way to the peer."""
        arena, checksum = self._context.arena, self._context.slice_copier.checksum
        corrupt = []
        for block_id in (b for b in block_ids if b != NOWHERE):
            layers = range(arena.layout.num_layers)
            wrong = sum(
                arena.checksums.get(block_id, layer)
                not in (0, checksum(arena.slice(block_id, layer)))
                for layer in layers
            )
            if wrong:
                self._context.counters.found_corrupt(wrong)
                corrupt.append(block_id)
        if corrupt:
            _log.warning(
                "%s: %d cached blocks changed in memory and were dropped; check this machine's"
                " memory",
                self._context.instance_id,
                len(corrupt),
            )
        return tuple(corrupt)

    def _send_blocks(self, connection: Connection, read: _Read, end_s: float) -> None:
        def deadline_s() -> float:
            return min(time.monotonic() + self._lease_s, end_s)

        if not self._answer(connection, read, deadline_s):
            return
        while isinstance(released := connection.receive(deadline_s()), ReadRenewed):
            pass
        if not isinstance(released, ReadReleased):
            raise ProtocolError(f"unexpected {type(released).__name__} instead of a release")
        if released.corrupt_slices:
            read.reported_corrupt = True
            raise TransportError(f"the reader found {released.corrupt_slices} slices corrupt")

    def _answer(self, connection: Connection, read: _Read, deadline_s: Callable[[], float]) -> bool:
        """Waits for the worker's answer and sends it, with the granted slices. Returns False if the
        read was redirected."""
        if not read.waiting.acquire(timeout=max(0.0, deadline_s() - time.monotonic())):
            with self._lock:
                read.answered = True  # a later grant for the read is ignored
        with self._lock:
            granted, redirect = read.granted, read.redirect
        if redirect:
            connection.send(Redirect(address=redirect[0], others=redirect[1:]), deadline_s())
            return False
        if granted is None:
            connection.send(
                Refused(reason="the source did not answer by the deadline"), time.monotonic() + 1.0
            )
            raise DeadlineError("the worker did not answer in time")
        own_view = self._context.arena.shard_view
        if not compatible(own_view, read.reader_view):
            granted = ()  # other peers store the reader's part of the blocks
        answer = ReadGranted(
            num_blocks=len(granted),
            lease_s=self._lease_s,
            absent=tuple(i for i, block in enumerate(granted) if block == NOWHERE),
            shard_view=own_view,
        )
        if not granted:
            connection.send(answer, deadline_s())
            return True
        connection.queue(answer)
        # Layer-major, so that the reader can compute with the first layers early.
        slices = [
            (index, block, layer)
            for layer in read.layers
            for index, block in enumerate(granted)
            if block != NOWHERE
        ]
        self._context.send_slices(
            connection, slices, deadline_s, mark_last=True, target_view=read.reader_view
        )
        return True
