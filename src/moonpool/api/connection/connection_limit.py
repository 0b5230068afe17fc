"""What the connections of one server share: descriptors, and memory that clients fill."""

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
"""Most bytes of responses that clients have not read, where one has more than fits its buffers."""
MAX_LINGERING = 32
"""Connections above the limit that may wait at a time until their clients have read why."""
RESERVED_FILES = 192
"""Descriptors kept for workers, files and the process itself."""
MOST_CONNECTIONS = 16_384

log = limited_logger("moonpool.http")


class PlacedConnection(Protocol):
    """What the limit needs to know of a connection."""

    def give_back(self) -> None:
        """Ends at once: another one needs the place."""
        ...


class ConnectionLimit:
    """The open connections of one server, at most `largest`.

    A connection waits while nothing is computed for it: before a request, within one, and after
    the response. When all places are taken, a new connection ends the one that waits longest among
    those of the party with the most connections. So neither connections that only wait, nor one
    address alone, lock others out.
    """

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.num_open = 0
        self.num_lingering = 0
        self.calls = SharedBuffer(largest)
        """Calls under way, by tenant: each takes a connection that nobody can end."""
        self.half_read = SharedBuffer(min(MAX_HALF_READ, largest // 20))  # others are for answers
        self.half_headers: ReclaimedBuffer[PlacedConnection] = ReclaimedBuffer(
            MAX_HALF_HEADER_BYTES
        )
        self.unread: ReclaimedBuffer[PlacedConnection] = ReclaimedBuffer(MAX_UNREAD_BYTES)
        self._num_of: dict[str, int] = {}  # open ones by party
        self._waiting: dict[str, dict[PlacedConnection, None]] = {}  # by party, longest first

    def enter(self, party: str) -> bool:
        """Makes room for one more connection. Returns False if all of them are in use."""
        if self.num_open >= self.largest and not self._end_one(party):
            log.warning("all %d connections are in use: new ones get 503", self.largest)
            return False
        self.num_open += 1
        self._num_of[party] = self._num_of.get(party, 0) + 1
        return True

    def leave(self, connection: PlacedConnection, party: str) -> None:
        """Frees a place; called even for a connection that has made room for another."""
        self.work(connection, party)
        self.num_open -= 1
        self._num_of[party] -= 1
        if not self._num_of[party]:
            del self._num_of[party]

    def wait(self, connection: PlacedConnection, party: str) -> None:
        self._waiting.setdefault(party, {})[connection] = None

    def work(self, connection: PlacedConnection, party: str) -> None:
        """Notes that the connection no longer waits."""
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
    """Returns how many connections the descriptors suffice for, after raising their limit.

    `keeps`: answers have logs, which take descriptors too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + RESERVED_FILES
    if soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
        except ValueError:  # macOS has a limit that `hard` does not tell
            pass
    if keeps:
        soft -= soft // MAX_KEPT_SHARE
    return max(soft - RESERVED_FILES, min(soft // 2, 64))
