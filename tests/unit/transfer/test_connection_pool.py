"""Tests that a pooled connection sends its last message even if a wake-up comes late."""

from __future__ import annotations

import os
import socket

from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId
from moonpool_engine.transfer.connection_pool import PooledConnection


class QueueingConnection:
    """Makes a connection with one queued message."""

    closed = False

    def __init__(self) -> None:
        self.has_queued = True
        self._ends = socket.socketpair()

    def fileno(self) -> int:
        return self._ends[0].fileno()

    def flush(self, deadline_s: float) -> None:
        self.has_queued = False

    def close(self) -> None:
        for end in self._ends:
            end.close()


def test_a_late_wake_up_does_not_delay_the_last_message() -> None:
    pooled = PooledConnection(PeerAddress(InstanceId("peer"), "", "", "127.0.0.1", 1))
    connection = QueueingConnection()
    pooled.set_connection(connection, False)  # type: ignore[arg-type]
    os.eventfd_write(pooled.wake_fd, 1)  # a late wake-up of the operation that has ended
    pooled.flush_queued(linger=True)
    assert not connection.has_queued
    connection.has_queued = True
    pooled.operation = lambda _: lambda: None  # the next wake-up: both go out together
    pooled.flush_queued(linger=True)
    assert connection.has_queued
    pooled.close()
