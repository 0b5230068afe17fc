"""The threads that carry out this instance's operations, each with a connection to one peer, which
it keeps for the next operation with that peer.

    working -> idle -> working ...
    idle -> ended (nothing to do for IDLE_S, the peer hung up, too many are idle, or `close`)

Connecting and authenticating take ten times as long as moving a small block does. An idle link
waits on its connection, so a peer that went away is noticed at once.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from moonpool.kvcache.transfers import PeerAddress
from moonpool.messenger.peering import Credentials, Route
from moonpool.messenger.transport import Connection

IDLE_S = 30.0
MAX_IDLE_PER_PEER = 4

Tell = Callable[[], None]
Operation = Callable[[Route], Tell]
"""Does all there is to do, and returns what then tells of it: by that time the link is free."""


class _Link:
    def __init__(self, peer: PeerAddress, operation: Operation) -> None:
        self.peer = peer
        self.operation: Operation | None = operation
        self.connection: Connection | None = None
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()

    def keep(self, connection: Connection | None) -> None:
        if connection is not self.connection:
            self.connection = connection
            self._poll = select.poll()
            self._poll.register(self.wake_fd, select.POLLIN)
            if connection is not None and not connection.closed:
                self._poll.register(connection.fileno(), select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Until there is an operation or an end of the connection, or `timeout_s` have passed."""
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if fd == self.wake_fd:
                os.eventfd_read(fd)
            elif self.connection is not None:
                self.connection.close()  # it hung up, or said what nobody asked for
                self.keep(None)

    def release(self) -> None:
        if self.connection is not None:
            self.connection.close()
        os.close(self.wake_fd)


class Links:
    """`spawn` starts a thread. Thread-safe."""

    def __init__(
        self, own: Credentials, spawn: Callable[[str, Tell], object], idle_s: float = IDLE_S
    ) -> None:
        self._own = own
        self._spawn = spawn
        self._idle_s = idle_s
        self._lock = threading.Lock()  # guards what follows, and who may end an idle link
        self._idle: dict[PeerAddress, list[_Link]] = {}
        self._closing = False

    def run(self, peer: PeerAddress, operation: Operation) -> None:
        """In the thread of an idle link to the peer, or of a new one. Returns at once."""
        with self._lock:
            idle = self._idle.get(peer)
            if idle:
                link = idle.pop()
                link.operation = operation
                os.eventfd_write(link.wake_fd, 1)
                return
        link = _Link(peer, operation)
        self._spawn("link", lambda: self._live(link))

    def close(self) -> None:
        """Ends the idle links, and the others as soon as their operation has ended."""
        with self._lock:
            self._closing = True
            for links in self._idle.values():
                for link in links:
                    os.eventfd_write(link.wake_fd, 1)

    def _live(self, link: _Link) -> None:
        try:
            while True:
                operation, link.operation = link.operation, None
                if operation is not None:
                    route = Route(link.peer, self._own, link.connection)
                    tell = operation(route)
                    link.keep(route.connection)
                    parked = self._park(link)
                    tell()
                    if not parked:
                        return
                link.wait(self._idle_s)
                if self._leave(link):
                    return
        finally:
            link.release()

    def _park(self, link: _Link) -> bool:
        """The link is idle from now on, and may be given an operation. False: it is not wanted."""
        if link.connection is None or link.connection.closed:
            return False
        with self._lock:
            idle = self._idle.setdefault(link.peer, [])
            if self._closing or len(idle) >= MAX_IDLE_PER_PEER:
                return False
            idle.append(link)
            return True

    def _leave(self, link: _Link) -> bool:
        """Called when the wait is over. False if it has been given something to do."""
        with self._lock:
            idle = self._idle.get(link.peer, [])
            if link not in idle:
                return False
            idle.remove(link)
            if not idle:
                del self._idle[link.peer]
            return True
