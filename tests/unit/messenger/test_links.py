"""A link sends its last word also when a wake-up comes late."""

from __future__ import annotations

import os
import socket

from moonpool.kvcache.transfers import PeerAddress
from moonpool.messenger.links import _Link
from moonpool.types import InstanceId


class Holding:
    """A connection that holds one word."""

    closed = False

    def __init__(self) -> None:
        self.holds = True
        self._ends = socket.socketpair()

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def flush(self, deadline_s: float) -> None:
        self.holds = False

    def close(self) -> None:
        for end in self._ends:
            end.close()


def test_a_late_wake_up_does_not_keep_the_last_word_back() -> None:
    link = _Link(PeerAddress(InstanceId("peer"), "", "", "127.0.0.1", 1))
    connection = Holding()
    link.keep(connection, False)  # type: ignore[arg-type]
    os.eventfd_write(link.wake_fd, 1)  # of the operation that has ended
    link.settle(may_linger=True)
    assert not connection.holds
    connection.holds = True
    link.operation = lambda _: lambda: None  # this wake-up is of the next: they go out together
    link.settle(may_linger=True)
    assert connection.holds
    link.release()
