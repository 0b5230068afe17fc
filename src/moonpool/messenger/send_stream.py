"""One outgoing layer stream: sends slices as the engine completes them. Runs in a link's thread.

    connecting -> sending -> (finished and all sent) awaiting the receiver's word -> ended
    any of them -> ended with an error, by abort, deadline or failure

`send` is called by the engine between two layers: it only appends to a list and wakes the thread.
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

from moonpool.kvcache.transfers import PeerAddress, SendEnded
from moonpool.messenger.auth import AuthError
from moonpool.messenger.line import Line
from moonpool.messenger.peering import Route
from moonpool.messenger.station import Station
from moonpool.messenger.transport import (
    Connection,
    DeadlineError,
    PeerGoneError,
    ProtocolError,
    TransportError,
)
from moonpool.messenger.unnamed import Unnamed
from moonpool.messenger.wire import (
    Elsewhere,
    OpenStream,
    Refused,
    SlicesEnd,
    StreamExpected,
    StreamReceived,
)
from moonpool.types import BlockId, InstanceId

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
SliceRef = tuple[int, BlockId, int]  # index, block id, layer


class SendStream:
    """`on_end` is called once, when no thread touches the stream's blocks any more. `follow` runs
    the stream anew with the peer to which the target has sent it on, or its shares with several."""

    def __init__(
        self,
        station: Station,
        stream_id: str,
        target: InstanceId,
        deadline_s: float,
        on_end: Callable[[SendEnded], None],
        follow: Callable[[tuple[PeerAddress, ...]], None],
    ) -> None:
        self._station = station
        self._stream_id = stream_id
        self._target = target
        self._deadline_s = deadline_s
        self._on_end = on_end
        self._follow = follow
        self._sent_on = False
        self._started_s = time.monotonic()
        self._line = Line()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        arena = station.arena
        self._max_queued = arena.num_blocks * arena.layout.num_layers
        self._lock = threading.Lock()  # guards what follows
        self._queue: list[SliceRef] = []
        self._finished = False
        self._overrun = False
        self._touching = False
        self._ended = False
        self._num_bytes = 0
        self._shares: tuple[SendStream, ...] = ()
        self._shares_ended: list[SendEnded] = []

    def send(self, slices: Sequence[SliceRef]) -> None:
        """Ignored once the stream has ended: its failure and the engine's next layer may cross."""
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
        with self._lock:
            if not self._ended:
                self._finished = True
                for share in self._shares:
                    share.finish()
                os.eventfd_write(self._wake_fd, 1)

    def abort(self, reason: str) -> None:
        """Ends at once if no block is in use yet; else as soon as the thread has let go."""
        self._line.break_off(reason)
        with self._lock:
            shares, untouched = self._shares, not (self._touching or self._shares)
        for share in shares:
            share.abort(reason)
        if untouched:
            self._end(reason)

    def divide(self, num_shares: int) -> tuple[SendStream, ...]:
        """Streams of the same slices to several peers, each of which takes its share; this one ends
        when all of them have. Empty if it has ended meanwhile."""

        def end(event: SendEnded) -> None:
            with self._lock:
                self._shares_ended.append(event)
                if len(self._shares_ended) < num_shares:
                    return
                self._num_bytes = sum(e.num_bytes for e in self._shares_ended)
            self._tell(next((e.error for e in self._shares_ended if e.error), ""))

        with self._lock:
            if not self._ended:
                self._shares = tuple(self._share(end) for _ in range(num_shares))
                queue, self._queue = self._queue, []
                for share in self._shares:
                    share.send(queue)
                    if self._finished:
                        share.finish()
        if not self._shares:
            self._tell("")  # which is known already
        return self._shares

    def _share(self, end: Callable[[SendEnded], None]) -> SendStream:
        def nowhere(addresses: tuple[PeerAddress, ...]) -> None:
            raise AssertionError("a share is not sent on")

        share = SendStream(
            self._station, self._stream_id, self._target, self._deadline_s, end, nowhere
        )
        share._sent_on = True
        return share

    def opening(self) -> OpenStream:
        timeout_s = max(0.001, self._deadline_s - time.monotonic())
        return OpenStream(stream_id=self._stream_id, timeout_s=timeout_s)

    def run(self, route: Route) -> Callable[[], None]:
        """Returns what tells of the end."""
        error = "failed unexpectedly; see the log"
        try:
            self._stream(*self._open(route))
            error = ""
        except _SentOnError as elsewhere:
            addresses = elsewhere.addresses
            return lambda: self._follow(addresses)
        except (TransportError, AuthError) as failure:
            error = f"stream to {self._target}: {self._line.explain(failure)}"
        except Exception:
            _log.exception("stream to %s", self._target)
        finally:
            self._line.let_go()
            if error and route.connection is not None:
                route.connection.close()
            with self._lock:
                self._touching = False

        return lambda: self._tell(error)

    def _tell(self, error: str) -> None:
        self._end(error)
        with self._lock:
            os.close(self._wake_fd)

    def _end(self, error: str) -> None:
        with self._lock:
            if self._ended or self._touching:
                return
            self._ended = True
            self._queue = []
        if error:
            self._station.counters.failed()
        seconds = time.monotonic() - self._started_s
        self._on_end(
            SendEnded(
                stream_id=self._stream_id,
                num_bytes=self._num_bytes,
                seconds=seconds,
                error=error,
            )
        )

    def _open(self, route: Route) -> tuple[Connection, StreamExpected]:
        """A connection that was kept may have gone meanwhile: until the receiver has answered,
        nothing is lost by opening the stream by another way."""
        deadline_s = self._deadline_s
        while True:
            connection = route.connect(deadline_s)
            self._line.hold(connection)
            try:
                if not route.opened:
                    connection.send(self.opening(), deadline_s)
                return connection, self._expected(connection)
            except PeerGoneError:
                self._line.let_go()
                if self._line.broken or not route.fail(answered=False):
                    raise

    def _expected(self, connection: Connection) -> StreamExpected:
        answer = _expect(connection, StreamExpected | Elsewhere, self._deadline_s)
        if isinstance(answer, StreamExpected):
            return answer
        if self._sent_on:
            raise ProtocolError("the stream was sent on twice")
        self._sent_on = True
        raise _SentOnError(answer.addresses)

    def _stream(self, connection: Connection, expected: StreamExpected) -> None:
        deadline_s = self._deadline_s
        with self._lock:
            if self._ended:
                raise TransportError("the stream was aborted")
            self._touching = True
        cut, arena = expected.cut, self._station.arena
        if cut is not None and (arena.cut is not None or not cut.fits(arena.slice_bytes)):
            raise ProtocolError("the receiver keeps a share of slices that are not ours")
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        finished, unnamed = False, Unnamed(arena)
        while not finished:
            batch, finished = self._next_batch(connection, poll)
            wanted = self._wanted(batch, expected)
            self._num_bytes += self._station.offer(
                connection, wanted, lambda: deadline_s, finished, expected.cut, unnamed
            )
        if not wanted:
            connection.send(SlicesEnd(), deadline_s)
        received = _expect(connection, StreamReceived, deadline_s)
        if received.corrupt:
            raise TransportError(f"{len(received.corrupt)} blocks arrived corrupt or incomplete")
        unnamed.told(received.sums)

    def _next_batch(self, connection: Connection, poll: select.poll) -> tuple[list[SliceRef], bool]:
        """Waits for slices or the finish; fails when the peer hangs up meanwhile."""
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
                _expect(connection, StreamReceived, self._deadline_s)
                raise ProtocolError("the receiver ended a stream that was not finished")
            for fd, _ in poll.poll(left_s * 1000):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)

    def _wanted(self, batch: list[SliceRef], expected: StreamExpected) -> list[SliceRef]:
        """Drops what the receiver has cached already; TransportError on what cannot be meant."""
        arena = self._station.arena
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


class _SentOnError(Exception):
    """Not here: there."""

    def __init__(self, addresses: tuple[PeerAddress, ...]) -> None:
        super().__init__()
        self.addresses = addresses


def _expect(connection: Connection, kind: type[_T] | UnionType, deadline_s: float) -> Any:
    message = connection.receive(deadline_s)
    if isinstance(message, Refused):
        raise TransportError(f"refused: {message.reason}")
    if not isinstance(message, kind):
        raise ProtocolError(f"unexpected {type(message).__name__}")
    return message
