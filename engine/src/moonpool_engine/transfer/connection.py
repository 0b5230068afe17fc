"""The interface that a transport provides to transfers: one authenticated connection to a peer.

`Connection` is the interface. `FrameConnection` implements its messages over a FrameSocket; each
transport adds how slices are moved. `CancellableConnection` lets other threads end an operation.

A transport moves slices between two arenas and messages between two messengers. A connection knows
neither operations nor what the checksums mean. Each call ends by `deadline_s` (on
`time.monotonic`), and each failure is a TransportError.
"""

from __future__ import annotations

import threading
from typing import Protocol

from moonpool.types import InstanceId
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.reshard import ShardView
from moonpool_engine.transfer.slice_receiver import SliceReceiver, SliceSource
from moonpool_engine.transfer.wire import Message, Slices


class Connection(SliceSource, Protocol):
    """One authenticated connection, used by one thread. Only `interrupt` may be called from another
    thread."""

    transport: str
    peer: InstanceId
    defers_checksums: bool
    """Slices of a stream may be offered without checksum: the receiver computes it."""

    @property
    def closed(self) -> bool: ...

    def send(self, message: Message, deadline_s: float) -> None: ...

    def queue(self, message: Message) -> None:
        """Sends the message together with the next one, which saves the peer a wake-up."""
        ...

    @property
    def has_queued(self) -> bool:
        """Whether a queued message has not been sent."""
        ...

    def flush(self, deadline_s: float) -> None:
        """Sends the queued messages."""
        ...

    def receive(self, deadline_s: float) -> Message: ...

    def send_slices(
        self, offer: Slices, arena: Arena, deadline_s: float, target_view: ShardView | None = None
    ) -> None:
        """Sends `offer`, and either the slices' bytes or access to them. With `target_view`, the
        peer gets only that part of each whole slice."""
        ...

    def receive_slices(self, offers: bytes, receiver: SliceReceiver, deadline_s: float) -> int:
        """Copies the slices of a received Slices message, in its order, to the receiver's blocks.
        Returns how many differ from their offered checksum."""
        ...

    def fileno(self) -> int:
        """Returns a descriptor for polling. The descriptor is readable once a message, or the end
        of the connection, has arrived."""
        ...

    def has_input(self) -> bool:
        """Whether a message, or the end of the connection, has arrived."""
        ...

    def hung_up(self) -> bool:
        """Whether the peer has closed its end or died, whatever it sent before."""
        ...

    def interrupt(self) -> None:
        """Makes the thread that uses the connection fail. Ends blocking calls; safe at any time."""
        ...

    def close(self) -> None: ...


class FrameConnection:
    """The messages of a connection over a FrameSocket whose handshake has ended."""

    def __init__(self, frames: FrameSocket, peer: InstanceId) -> None:
        frames.end_handshake()
        self.peer = peer
        self._frames = frames
        self.send = frames.send
        self.queue = frames.queue
        self.flush = frames.flush
        self.fileno = frames.fileno
        self.has_input = frames.has_input
        self.hung_up = frames.hung_up
        self.interrupt = frames.interrupt

    @property
    def closed(self) -> bool:
        return self._frames.closed

    @property
    def has_queued(self) -> bool:
        return self._frames.has_queued

    def receive(self, deadline_s: float) -> Message:
        return self._frames.receive(deadline_s)

    def close(self) -> None:
        self._frames.close()


class CancellableConnection:
    """The connection of one operation, which other threads may cancel. Thread-safe.

    After `cancel`, the attached connection and any attached later fail at their next use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._reason = ""

    def attach(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self._reason:
                connection.interrupt()

    def cancel(self, reason: str) -> None:
        """Interrupts the operation. The first reason counts."""
        with self._lock:
            self._reason = self._reason or reason
            if self._connection is not None:
                self._connection.interrupt()

    def detach(self) -> None:
        """Notes that the operation has ended: its connection may serve another operation."""
        with self._lock:
            self._connection = None

    @property
    def cancelled(self) -> bool:
        with self._lock:
            return bool(self._reason)

    def explain(self, error: Exception) -> str:
        """Returns why the operation failed: the reason of the cancel, or else the error's text."""
        with self._lock:
            return self._reason or str(error)
