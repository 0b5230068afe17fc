"""Incoming layer streams: the worker expects one, its sender connects, in either order.

    expected -> receiving -> ended
    expected -> ended (cancelled, or no sender came by the deadline)

A sender that comes first is parked for a few seconds, then refused. ReceiveEnded is posted once per
`expect`, when no thread writes the stream's blocks any more. Streams that others receive for this
instance are only told where to go (`expect_at`).
"""

from __future__ import annotations

import threading
import time

from moonpool.kvcache.transfers import PeerAddress, ReceiveEnded
from moonpool.messenger.landing import Landing
from moonpool.messenger.line import Line
from moonpool.messenger.station import Station
from moonpool.messenger.transport import Connection, ProtocolError, TransportError
from moonpool.messenger.wire import (
    Elsewhere,
    OpenStream,
    Refused,
    Slices,
    SlicesEnd,
    StreamExpected,
    StreamReceived,
)


class _Reception:
    def __init__(self, landing: Landing, deadline_s: float) -> None:
        self.landing = landing
        self.deadline_s = deadline_s
        self.started_s = time.monotonic()
        self.line = Line()
        self.claimed = False


class Receptions:
    """Those expected or in progress. `serve` runs in a connection's thread, the rest in any."""

    def __init__(self, station: Station, park_s: float) -> None:
        self._station = station
        self._park_s = park_s
        self._changed = threading.Condition()  # guards what follows
        self._receptions: dict[str, _Reception] = {}
        self._elsewhere: dict[str, tuple[PeerAddress, ...]] = {}
        self._closing = False

    def expect(self, stream_id: str, landing: Landing, deadline_s: float) -> None:
        """ValueError if the stream is expected already."""
        with self._changed:
            if stream_id in self._receptions:
                raise ValueError(f"stream {stream_id!r} is expected already")
            self._receptions[stream_id] = _Reception(landing, deadline_s)
            self._changed.notify_all()

    def expect_at(self, stream_id: str, addresses: tuple[PeerAddress, ...]) -> None:
        """A sender is sent there, to all of them, until `forget`."""
        assert addresses
        with self._changed:
            self._elsewhere[stream_id] = addresses
            self._changed.notify_all()

    def forget(self, stream_id: str) -> None:
        with self._changed:
            self._elsewhere.pop(stream_id, None)

    def cancel(self, stream_id: str, reason: str) -> None:
        """Ends the stream at once, or as soon as its thread has let go. No such stream: nothing."""
        with self._changed:
            reception = self._receptions.get(stream_id)
            if reception is None:
                return
            if reception.claimed:
                reception.line.break_off(reason)
                return
            del self._receptions[stream_id]
        self._post_end(stream_id, reception, reason)

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do. Streams in progress see to their own deadline."""
        with self._changed:
            waiting = [r.deadline_s for r in self._receptions.values() if not r.claimed]
        return min(waiting, default=None)

    def expire(self, now_s: float) -> None:
        with self._changed:
            late = [
                stream_id
                for stream_id, reception in self._receptions.items()
                if not reception.claimed and reception.deadline_s <= now_s
            ]
        for stream_id in late:
            self.cancel(stream_id, "no sender came by the deadline")

    def close(self, reason: str) -> None:
        with self._changed:
            self._closing = True
            stream_ids = list(self._receptions)
            self._changed.notify_all()
        for stream_id in stream_ids:
            self.cancel(stream_id, reason)

    def serve(self, connection: Connection, opening: OpenStream) -> bool:
        """True if the connection is fit for another operation."""
        stream_id = opening.stream_id
        park_s = min(self._park_s, opening.timeout_s)
        reception, refusal = self._claim(stream_id, connection, park_s)
        if isinstance(refusal, tuple):
            elsewhere = Elsewhere(address=refusal[0], others=refusal[1:])
            connection.send(elsewhere, time.monotonic() + 1.0)
            return True
        if reception is None:
            connection.send(Refused(reason=refusal), time.monotonic() + 1.0)
            return False
        error = "failed unexpectedly; see the log"
        try:
            self._receive(connection, reception)
            error = ""
        except TransportError as failure:
            error = f"stream from {connection.peer}: {reception.line.explain(failure)}"
        finally:
            with self._changed:
                del self._receptions[stream_id]
            reception.line.let_go()
            self._post_end(stream_id, reception, error)
        return not error

    def _claim(
        self, stream_id: str, connection: Connection, park_s: float
    ) -> tuple[_Reception | None, str | tuple[PeerAddress, ...]]:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closing or stream_id in self._receptions or stream_id in self._elsewhere
                ),
                timeout=park_s,
            )
            elsewhere = self._elsewhere.get(stream_id)
            if elsewhere is not None and not self._closing:
                return None, elsewhere
            reception = self._receptions.get(stream_id)
            if self._closing or reception is None:
                return None, f"stream {stream_id!r} is not expected here"
            if reception.claimed:
                return None, f"stream {stream_id!r} has a sender already"
            if connection.has_input():  # it must not take the place of a sender that lives
                return None, "the sender did not wait to be told what is expected"
            reception.claimed = True
            reception.line.hold(connection)
            return reception, ""

    def _receive(self, connection: Connection, reception: _Reception) -> None:
        landing, deadline_s = reception.landing, reception.deadline_s
        landing.come_from(None)  # who hands a prefill over has whole slices
        expected = StreamExpected(
            first_index=landing.first_index,
            num_indices=landing.num_indices,
            absent=landing.absent,
            cut=self._station.arena.cut,
        )
        connection.send(expected, deadline_s)
        while True:
            message = connection.receive(deadline_s)
            if isinstance(message, SlicesEnd):
                break
            if not isinstance(message, Slices):
                raise ProtocolError(f"unexpected {type(message).__name__} in a stream")
            landing.land(connection, message.offers, deadline_s)
            if message.last:
                break
        received = StreamReceived(corrupt=landing.incomplete(), sums=landing.unnamed.sums())
        connection.send(received, deadline_s)

    def _post_end(self, stream_id: str, reception: _Reception, error: str) -> None:
        landing = reception.landing
        if error:
            self._station.counters.failed()
        self._station.post(
            ReceiveEnded(
                stream_id=stream_id,
                corrupt=landing.incomplete(),
                num_bytes=landing.num_bytes,
                seconds=time.monotonic() - reception.started_s,
                error=error,
            )
        )
