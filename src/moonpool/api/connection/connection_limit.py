"""Divides a server's resources among its connections: file descriptors, and memory that clients
fill."""

from __future__ import annotations

import resource
from typing import Protocol

from moonpool.api.connection.kept_stream import MAX_KEPT_SHARE
from moonpool.api.sharing.shared_buffer import ReclaimedBuffer, SharedBuffer
from moonpool.log_limit import limited_logger

MAX_HALF_READ = 512
"""Most requests at a time that are kept for another head before they have arrived."""
MAX_HALF_HEADER_BYTES = 64 << 20
"""Most bytes of headers that have begun and not ended."""
MAX_UNREAD_BYTES = 512 << 20
"""Most bytes of responses that clients have not read, counting responses that exceed the socket
buffers."""
MAX_LINGERING = 32
"""Most connections above the limit that wait at a time until their clients have read the
refusal."""
RESERVED_FILES = 192
"""Descriptors kept for workers, files and the process itself."""
MOST_CONNECTIONS = 16_384

log = limited_logger("moonpool.http")


class PlacedConnection(Protocol):
    """A connection as the limit sees it."""

    def give_back(self) -> None:
        """Ends the connection at once, because another connection needs its place."""
        ...


class ConnectionLimit:
    """The open connections of one server, at most `largest`.

    A connection counts as waiting while nothing is computed for it: before a request, within one,
    and after the response. When all places are taken, a new connection ends the longest-waiting
    connection of the party with the most connections. So neither waiting connections, nor a single
    address, lock other clients out.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.num_open = 0
        self.num_lingering = 0
        self.calls = SharedBuffer(largest)
        """Calls under way, by tenant: each takes a connection that cannot be ended."""
        # leaves the other places for answers
        self.half_read = SharedBuffer(min(MAX_HALF_READ, largest // 20))
        self.half_headers: ReclaimedBuffer[PlacedConnection] = ReclaimedBuffer(
            MAX_HALF_HEADER_BYTES
        )
        self.unread: ReclaimedBuffer[PlacedConnection] = ReclaimedBuffer(MAX_UNREAD_BYTES)
        self._num_of: dict[str, int] = {}  # number of open connections by party
        # waiting connections by party, those that wait longest first
        self._waiting: dict[str, dict[PlacedConnection, None]] = {}

    def enter(self, party: str) -> bool:
        """Makes room for one more connection. Returns False if all of them are in use."""
        if self.num_open >= self.largest and not self._end_one(party):
            log.warning("all %d connections are in use: new ones get 503", self.largest)
            return False
        self.num_open += 1
        self._num_of[party] = self._num_of.get(party, 0) + 1
        return True

    def leave(self, connection: PlacedConnection, party: str) -> None:
        """Frees a place; called even for a connection that another one has replaced."""
        self.work(connection, party)
        self.num_open -= 1
        self._num_of[party] -= 1
        if not self._num_of[party]:
            del self._num_of[party]

    def wait(self, connection: PlacedConnection, party: str) -> None:
        self._waiting.setdefault(party, {})[connection] = None

    def work(self, connection: PlacedConnection, party: str) -> None:
        """Notes that the connection no longer waits for anything."""
        waiting = self._waiting.get(party)
        if waiting is not None:
            waiting.pop(connection, None)
            if not waiting:
                del self._waiting[party]

    def _end_one(self, newcomer: str) -> bool:
        found = max(self._waiting, key=self._num_of.__getitem__, default=None)
        if found is None or self._num_of[found] < self._num_of.get(newcomer, 0):
            return False
        log.warning(
            "%d connections are open, as many as the limit of file descriptors allows: the one"
            " idle longest ends for each new one",
            self.largest,
        )
        longest = next(iter(self._waiting[found]))
        self.work(longest, found)
        longest.give_back()
        return True


def most_connections(keeps: bool) -> int:
    """Returns how many connections the file descriptors suffice for, after raising their limit.

    `keeps`: whether answers have logs, which take descriptors too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + RESERVED_FILES
    if soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
        except ValueError:  # macOS has a limit below `hard` that cannot be read
            pass
    if keeps:
        soft -= soft // MAX_KEPT_SHARE
    return max(soft - RESERVED_FILES, min(soft // 2, 64))
