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
import time
from collections.abc import Callable

from moonpool.kvcache.transfers import PeerAddress
from moonpool.messenger.peering import Credentials, Route, by_memory, by_nixl
from moonpool.messenger.transport import Connection, TransportError
from moonpool.messenger.wire import Message

IDLE_S = 30.0
MAX_IDLE_PER_PEER = 4
DETOUR_S = 10.0
"""So long a connection is kept that a better way gave way to; then that is tried again."""
_OPEN_S = 0.1  # an idle connection has room for a first word; who begins must not block

_LINGER_S = 1e-3

Tell = Callable[[], None]
Operation = Callable[[Route], Tell]
"""Does all there is to do, and returns what then tells of it: by that time the link is free."""


class _Link:
    def __init__(self, peer: PeerAddress) -> None:
        self.peer = peer
        self.operation: Operation | None = None
        self.connection: Connection | None = None
        self.opening = threading.Lock()  # held by who opens an operation from another thread
        self.opened = False
        self.until_s = float("inf")  # it is not kept beyond that
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.poll()

    def keep(self, connection: Connection | None, is_detour: bool) -> None:
        if connection is not self.connection:
            self.connection = connection
            self.until_s = time.monotonic() + DETOUR_S if is_detour else float("inf")
            self._poll = select.poll()
            self._poll.register(self.wake_fd, select.POLLIN)
            if connection is not None and not connection.closed:
                self._poll.register(connection.fileno(), select.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Until there may be something to do. True if nothing came, or the connection has ended or
        said what nobody asked for: an idle link is of no more use then."""
        ready = [fd for fd, _ in self._poll.poll(timeout_s * 1000)]
        if self.wake_fd in ready:
            os.eventfd_read(self.wake_fd)
        return ready != [self.wake_fd]

    def settle(self, may_linger: bool) -> None:
        """Sends the last word of the operation that has ended, if it holds one: soon, so that it
        may go out with the first word of the next. The link may have been given that by now."""
        connection = self.connection
        if connection is None or not connection.holds:
            return
        if may_linger:
            ready = [fd for fd, _ in self._poll.poll(_LINGER_S * 1000)]
            # A wake-up alone may be that of the operation before, late: nobody else would send it.
            if ready and (ready != [self.wake_fd] or self.operation is not None):
                return  # what came is for `wait`
        with self.opening:
            try:
                if connection.holds:
                    connection.flush(time.monotonic() + _OPEN_S)
            except TransportError:
                connection.interrupt()  # what it had to give is here

    def open(self, message: Message) -> None:
        """Says the operation's first word from the thread that begins it, so that the peer starts
        while the link's thread is still waking up. A failure is for the operation to find."""
        assert self.connection is not None
        try:
            self.connection.send(message, time.monotonic() + _OPEN_S)
            self.opened = True
        except TransportError:
            self.connection.interrupt()

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

    def run(self, peer: PeerAddress, operation: Operation, opening: Message) -> None:
        """In the thread of an idle link to the peer, or of a new one. Returns at once. The route
        that the operation gets tells whether `opening` has been sent."""
        with self._lock:
            idle = self._idle.get(peer)
            link = idle.pop() if idle else _Link(peer)
            link.operation = operation
            link.opening.acquire()
        try:
            if link.connection is None:
                self._spawn("link", lambda: self._live(link))
            else:
                link.open(opening)
                os.eventfd_write(link.wake_fd, 1)
        finally:
            link.opening.release()

    def only_tcp(self, peer: PeerAddress) -> bool:
        """Whether there is no better way to it."""
        return not by_memory(self._own, peer) and not by_nixl(self._own, peer)

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
                    with link.opening:
                        opened, link.opened = link.opened, False
                    route = Route(link.peer, self._own, link.connection, opened)
                    tell = operation(route)
                    link.keep(route.connection, route.is_detour)
                    parked = self._park(link)
                    tell()
                    link.settle(may_linger=parked)
                    if not parked:
                        return
                if self._leave(link, link.wait(self._idle_s)):
                    return
        finally:
            link.release()

    def _park(self, link: _Link) -> bool:
        """The link is idle from now on, and may be given an operation. False: it is not wanted."""
        if link.connection is None or link.connection.closed or time.monotonic() > link.until_s:
            return False
        with self._lock:
            idle = self._idle.setdefault(link.peer, [])
            if self._closing or len(idle) >= MAX_IDLE_PER_PEER:
                return False
            idle.append(link)
            return True

    def _leave(self, link: _Link, useless: bool) -> bool:
        """False if the link has been given something to do, or was woken for what it did already:
        the peer's answer may come before the wake-up that goes with the question."""
        with self._lock:
            idle = self._idle.get(link.peer, [])
            if link not in idle or not (useless or self._closing):
                return False
            idle.remove(link)
            if not idle:
                del self._idle[link.peer]
            return True
