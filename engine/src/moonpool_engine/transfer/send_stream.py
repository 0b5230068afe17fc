"""An outgoing layer stream, which sends slices as the engine completes them.

    connecting -> sending -> (finished and all sent) waiting for the receiver -> ended
    any state -> ended with an error, by abort, deadline or failure

A stream runs in the thread of a pooled connection. The engine calls `send` between two layers,
which only appends to a list and wakes that thread.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, TypeVar

from moonpool.link.auth import AuthError
from moonpool.protocol.transfer_events import PeerAddress, SendEnded
from moonpool.types import InstanceId
from moonpool_engine.transfer.arena import DeferredChecksums
from moonpool_engine.transfer.connection import CancellableConnection, Connection
from moonpool_engine.transfer.connection_pool import Completion, ConnectionPool, Connector
from moonpool_engine.transfer.context import SliceRef, TransferContext
from moonpool_engine.transfer.errors import (
    DeadlineError,
    PeerGoneError,
    ProtocolError,
    TransportError,
)
from moonpool_engine.transfer.wire import (
    OpenStream,
    Redirect,
    Refused,
    SlicesEnd,
    StreamExpected,
    StreamReceived,
)

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class SendStream:
    """`on_end` is called once, when no thread uses the stream's blocks any more. If the target
    redirects the stream to several peers, one share per peer sends the same slices to it."""

    def __init__(
        self,
        context: TransferContext,
        pool: ConnectionPool,
        stream_id: str,
        target: InstanceId,
        deadline_s: float,
        on_end: Callable[[SendEnded], None],
        is_share: bool = False,
    ) -> None:
        self._context = context
        self._pool = pool
        self._stream_id = stream_id
        self._target = target
        self._deadline_s = deadline_s
        self._on_end = on_end
        self._redirected = is_share
        self._started_s = time.monotonic()
        self._connection = CancellableConnection()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        arena = context.arena
        self._max_queued = arena.num_blocks * arena.layout.num_layers
        self._lock = threading.Lock()  # guards the fields below
        self._queue: list[SliceRef] = []
        self._finished = False
        self._overrun = False
        self._in_use = False  # whether the thread may read the stream's blocks
        self._ended = False
        self._num_bytes = 0
        self._shares: tuple[SendStream, ...] = ()
        self._ended_shares: list[SendEnded] = []

    def start(self, address: PeerAddress) -> None:
        """Connects to the receiver in the background."""
        self._pool.run(address, self._run, self._opening())

    def send(self, slices: Sequence[SliceRef]) -> None:
        """Ignored once the stream has ended: the engine may send a layer while it fails."""
        with self._lock:
            if self._ended or self._finished:
                return
            if self._shares:
                for share in self._shares:
                    share.send(slices)
                return
            self._overrun |= len(self._queue) + len(slices) > self._max_queued
            if not self._overrun:
                self._queue.extend(slices)
            os.eventfd_write(self._wake_fd, 1)

    def finish(self) -> None:
        """Notes that no more slices follow."""
        with self._lock:
            if not self._ended:
                self._finished = True
                for share in self._shares:
                    share.finish()
                os.eventfd_write(self._wake_fd, 1)

    def abort(self, reason: str) -> None:
        """Ends the stream, at once if no block is in use yet, or when its thread stops."""
        self._connection.cancel(reason)
        with self._lock:
            shares, unused = self._shares, not (self._in_use or self._shares)
        for share in shares:
            share.abort(reason)
        if unused:
            self._end(reason)

    # Redirects

    def _redirect(self, addresses: Sequence[PeerAddress]) -> None:
        if len(addresses) == 1:
            self.start(addresses[0])
            return
        for address, share in zip(addresses, self._make_shares(len(addresses)), strict=False):
            share.start(address)

    def _make_shares(self, num_shares: int) -> tuple[SendStream, ...]:
        """Makes one stream of the same slices per peer, a share; this stream ends when all shares
        have ended. Returns none if this stream has ended in the meantime."""

        def end(event: SendEnded) -> None:
            with self._lock:
                self._ended_shares.append(event)
                if len(self._ended_shares) < num_shares:
                    return
                self._num_bytes = sum(e.num_bytes for e in self._ended_shares)
            self._finish_thread(next((e.error for e in self._ended_shares if e.error), ""))

        with self._lock:
            if not self._ended:
                self._shares = tuple(
                    SendStream(
                        self._context,
                        self._pool,
                        self._stream_id,
                        self._target,
                        self._deadline_s,
                        end,
                        is_share=True,
                    )
                    for _ in range(num_shares)
                )
                queue, self._queue = self._queue, []
                for share in self._shares:
                    share.send(queue)
                    if self._finished:
                        share.finish()
        if not self._shares:
            self._finish_thread("")  # `abort` has reported its end already
        return self._shares

    # Methods in the connection's thread

    def _opening(self) -> OpenStream:
        timeout_s = max(0.001, self._deadline_s - time.monotonic())
        return OpenStream(stream_id=self._stream_id, timeout_s=timeout_s)

    def _run(self, connector: Connector) -> Completion:
        """Sends the stream. Returns a callback that reports its end or follows a redirect."""
        error = "failed unexpectedly; see the log"
        try:
            self._stream(*self._open(connector))
            error = ""
        except _StreamRedirectError as redirect:
            addresses = redirect.addresses
            return lambda: self._redirect(addresses)
        except (TransportError, AuthError) as failure:
            error = f"stream to {self._target}: {self._connection.explain(failure)}"
        except Exception:
            _log.exception("stream to %s", self._target)
        finally:
            self._connection.detach()
            if error and connector.connection is not None:
                connector.connection.close()
            with self._lock:
                self._in_use = False

        return lambda: self._finish_thread(error)

    def _finish_thread(self, error: str) -> None:
        self._end(error)
        with self._lock:
            os.close(self._wake_fd)

    def _end(self, error: str) -> None:
        with self._lock:
            if self._ended or self._in_use:
                return
            self._ended = True
            self._queue = []
        if error:
            self._context.counters.failed()
        seconds = time.monotonic() - self._started_s
        self._on_end(
            SendEnded(
                stream_id=self._stream_id,
                num_bytes=self._num_bytes,
                seconds=seconds,
                error=error,
            )
        )

    def _open(self, connector: Connector) -> tuple[Connection, StreamExpected]:
        """Opens the stream at the receiver. A kept connection may be dead: until the receiver has
        answered, the stream can be opened by another transport without loss."""
        deadline_s = self._deadline_s
        while True:
            connection = connector.connect(deadline_s)
            self._connection.attach(connection)
            try:
                if not connector.opening_sent:
                    connection.send(self._opening(), deadline_s)
                return connection, self._await_expected(connection)
            except PeerGoneError:
                self._connection.detach()
                if self._connection.cancelled or not connector.fail(answered=False):
                    raise

    def _await_expected(self, connection: Connection) -> StreamExpected:
        answer = _receive(connection, StreamExpected | Redirect, self._deadline_s)
        if isinstance(answer, StreamExpected):
            return answer
        if self._redirected:
            raise ProtocolError("the stream was redirected twice")
        self._redirected = True
        raise _StreamRedirectError(answer.addresses)

    def _stream(self, connection: Connection, expected: StreamExpected) -> None:
        deadline_s = self._deadline_s
        with self._lock:
            if self._ended:
                raise TransportError("the stream was aborted")
            self._in_use = True
        view, arena = expected.shard_view, self._context.arena
        if view is not None and (arena.shard_view is not None or not view.fits(arena.slice_bytes)):
            raise ProtocolError("the receiver stores parts of slices of another size")
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        finished, deferred = False, DeferredChecksums(arena.checksums)
        while not finished:
            batch, finished = self._next_batch(connection, poll)
            wanted = self._select(batch, expected)
            self._num_bytes += self._context.send_slices(
                connection, wanted, lambda: deadline_s, finished, view, deferred
            )
        if not wanted:
            connection.send(SlicesEnd(), deadline_s)
        received = _receive(connection, StreamReceived, deadline_s)
        if received.corrupt:
            raise TransportError(f"{len(received.corrupt)} blocks arrived corrupt or incomplete")
        deferred.apply(received.checksums)

    def _next_batch(self, connection: Connection, poll: select.poll) -> tuple[list[SliceRef], bool]:
        """Waits for slices or the finish. Raises TransportError if the peer hangs up meanwhile."""
        while True:
            with self._lock:
                batch, self._queue = self._queue, []
                finished, overrun = self._finished, self._overrun
            if overrun:
                raise TransportError(f"more than {self._max_queued} slices were waiting")
            if batch or finished:
                return batch, finished
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError("the stream was not finished by its deadline")
            if connection.has_input():
                _receive(connection, StreamReceived, self._deadline_s)
                raise ProtocolError("the receiver ended a stream that was not finished")
            for fd, _ in poll.poll(left_s * 1000):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)

    def _select(self, batch: list[SliceRef], expected: StreamExpected) -> list[SliceRef]:
        """Drops slices that the receiver has cached or that other peers receive. Raises
        TransportError on a slice that does not exist on either side."""
        arena = self._context.arena
        end = expected.first_index + expected.num_indices
        for index, block_id, layer in batch:
            if not (
                0 <= index < end and 0 <= layer < arena.layout.num_layers and arena.holds(block_id)
            ):
                raise TransportError(
                    f"slice (index {index}, block {block_id}, layer {layer}) is outside the"
                    f" {end} blocks the receiver has room for, or outside the arena"
                )
        first, absent = expected.first_index, frozenset(expected.absent)
        return [item for item in batch if item[0] >= first and item[0] not in absent]


class _StreamRedirectError(Exception):
    """Raised because other peers receive the stream."""

    def __init__(self, addresses: tuple[PeerAddress, ...]) -> None:
        super().__init__()
        self.addresses = addresses


def _receive(connection: Connection, kind: type[_T] | UnionType, deadline_s: float) -> Any:
    message = connection.receive(deadline_s)
    if isinstance(message, Refused):
        raise TransportError(f"refused: {message.reason}")
    if not isinstance(message, kind):
        raise ProtocolError(f"unexpected {type(message).__name__}")
    return message
