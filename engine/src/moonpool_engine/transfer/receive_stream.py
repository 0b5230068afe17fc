"""Incoming layer streams. The worker expects a stream and its sender connects, in either order.

    expected -> receiving -> ended
    expected -> ended (cancelled, or no sender connected by the deadline)

A sender that connects first waits for a few seconds (it is parked) and is then refused.
ReceiveEnded is posted once per `expect`, when no thread writes the stream's blocks any more. If
other peers receive a stream for this instance, its sender is redirected to them (`redirect`).
"""

from __future__ import annotations

import threading
import time

from moonpool.protocol.transfer_events import PeerAddress, ReceiveEnded
from moonpool_engine.transfer.connection import CancellableConnection, Connection
from moonpool_engine.transfer.context import TransferContext
from moonpool_engine.transfer.errors import ProtocolError, TransportError
from moonpool_engine.transfer.slice_receiver import SliceReceiver
from moonpool_engine.transfer.wire import (
    OpenStream,
    Redirect,
    Refused,
    Slices,
    SlicesEnd,
    StreamExpected,
    StreamReceived,
)


class _IncomingStream:
    def __init__(self, receiver: SliceReceiver, deadline_s: float) -> None:
        self.receiver = receiver
        self.deadline_s = deadline_s
        self.started_s = time.monotonic()
        self.connection = CancellableConnection()
        self.claimed = False  # whether a sender has claimed the stream


class IncomingStreams:
    """Streams expected or in progress. `serve` runs in a connection's thread, all other methods in
    any thread."""

    def __init__(self, context: TransferContext, park_s: float) -> None:
        self._context = context
        self._park_s = park_s
        self._changed = threading.Condition()  # guards the fields below
        self._streams: dict[str, _IncomingStream] = {}
        self._redirects: dict[str, tuple[PeerAddress, ...]] = {}
        self._closing = False

    def expect(self, stream_id: str, receiver: SliceReceiver, deadline_s: float) -> None:
        """Raises ValueError if the stream is expected already."""
        with self._changed:
            if stream_id in self._streams:
                raise ValueError(f"stream {stream_id!r} is expected already")
            self._streams[stream_id] = _IncomingStream(receiver, deadline_s)
            self._changed.notify_all()

    def redirect(self, stream_id: str, addresses: tuple[PeerAddress, ...]) -> None:
        """Redirects the stream's sender to all of these peers, until `forget`."""
        assert addresses
        with self._changed:
            self._redirects[stream_id] = addresses
            self._changed.notify_all()

    def forget(self, stream_id: str) -> None:
        """Ends a redirect."""
        with self._changed:
            self._redirects.pop(stream_id, None)

    def cancel(self, stream_id: str, reason: str) -> None:
        """Ends the stream, at once or when its thread stops. Ignored if there is none."""
        with self._changed:
            stream = self._streams.get(stream_id)
            if stream is None:
                return
            if stream.claimed:
                stream.connection.cancel(reason)
                return
            del self._streams[stream_id]
        self._post_end(stream_id, stream, reason)

    def next_deadline_s(self) -> float | None:
        """Returns when `expire` is due, or None without a waiting stream. A stream in progress
        checks its own deadline."""
        with self._changed:
            waiting = [s.deadline_s for s in self._streams.values() if not s.claimed]
        return min(waiting, default=None)

    def expire(self, now_s: float) -> None:
        """Ends streams whose sender did not connect by the deadline."""
        with self._changed:
            late = [
                stream_id
                for stream_id, stream in self._streams.items()
                if not stream.claimed and stream.deadline_s <= now_s
            ]
        for stream_id in late:
            self.cancel(stream_id, "no sender came by the deadline")

    def close(self, reason: str) -> None:
        """Ends every stream, and refuses new senders."""
        with self._changed:
            self._closing = True
            stream_ids = list(self._streams)
            self._changed.notify_all()
        for stream_id in stream_ids:
            self.cancel(stream_id, reason)

    def serve(self, connection: Connection, opening: OpenStream) -> bool:
        """Serves one sender. Returns whether the connection can serve another operation."""
        stream_id = opening.stream_id
        park_s = min(self._park_s, opening.timeout_s)
        claimed = self._claim(stream_id, connection, park_s)
        if isinstance(claimed, Redirect):
            connection.send(claimed, time.monotonic() + 1.0)
            return True
        if isinstance(claimed, Refused):
            connection.send(claimed, time.monotonic() + 1.0)
            return False
        error = "failed unexpectedly; see the log"
        try:
            self._receive(connection, claimed)
            error = ""
        except TransportError as failure:
            error = f"stream from {connection.peer}: {claimed.connection.explain(failure)}"
        finally:
            with self._changed:
                del self._streams[stream_id]
            claimed.connection.detach()
            self._post_end(stream_id, claimed, error)
        return not error

    def _claim(
        self, stream_id: str, connection: Connection, park_s: float
    ) -> _IncomingStream | Redirect | Refused:
        """Waits until the stream is expected or redirected. Returns the stream, which this sender
        then owns, or the answer to the sender."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or stream_id in self._streams or stream_id in self._redirects,
                timeout=park_s,
            )
            addresses = self._redirects.get(stream_id)
            if addresses is not None and not self._closing:
                return Redirect(address=addresses[0], others=addresses[1:])
            stream = self._streams.get(stream_id)
            if self._closing or stream is None:
                return Refused(reason=f"stream {stream_id!r} is not expected here")
            if stream.claimed:
                return Refused(reason=f"stream {stream_id!r} has a sender already")
            if connection.has_input():  # a dead sender must not take a live sender's place
                return Refused(reason="the sender did not wait for the answer to its opening")
            stream.claimed = True
            stream.connection.attach(connection)
            return stream

    def _receive(self, connection: Connection, stream: _IncomingStream) -> None:
        receiver, deadline_s = stream.receiver, stream.deadline_s
        receiver.set_source_view(None)  # an instance that hands over a prefill has whole slices
        expected = StreamExpected(
            first_index=receiver.first_index,
            num_indices=receiver.num_indices,
            absent=receiver.absent,
            shard_view=self._context.arena.shard_view,
        )
        connection.send(expected, deadline_s)
        while True:
            message = connection.receive(deadline_s)
            if isinstance(message, SlicesEnd):
                break
            if not isinstance(message, Slices):
                raise ProtocolError(f"unexpected {type(message).__name__} in a stream")
            receiver.receive(connection, message.offers, deadline_s)
            if message.last:
                break
        received = StreamReceived(
            corrupt=receiver.incomplete(), checksums=receiver.deferred.encode()
        )
        connection.send(received, deadline_s)

    def _post_end(self, stream_id: str, stream: _IncomingStream, error: str) -> None:
        if error:
            self._context.counters.failed()
        stream.receiver.tell_damage(f"stream {stream_id}")
        self._context.post(
            ReceiveEnded(
                stream_id=stream_id,
                incomplete=stream.receiver.incomplete(),
                corrupt_slices=stream.receiver.corrupt_slices,
                num_bytes=stream.receiver.num_bytes,
                seconds=time.monotonic() - stream.started_s,
                error=error,
            )
        )
