"""Keeps answers in the process of the test."""

from __future__ import annotations

import os

from moonpool.api.connection.kept_stream import accepted_bytes


class Shelf:
    """Implements `StreamKeeper`. Keeps the log of the last answer, even after its end."""

    def __init__(self, limit_bytes: int = 1 << 20) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0
        self.dropped: list[int] = []
        self.was_cut: list[int] = []
        self.log_fd = -1
        self.sent: list[tuple[int, int]] = []
        """For each entry, the bytes of the log before the entry, and the bytes that its connection
        had sent by then."""
        self._socket_fd = -1
        self._number = 6

    def keep(self, socket_fd: int, log_fd: int, party: str) -> int | None:
        self.close()
        self._socket_fd, self.log_fd = os.dup(socket_fd), os.dup(log_fd)
        self.sent.clear()  # forgets what was sent of an earlier log
        self._number += 1
        return self._number

    def keep_cut(self, log_fd: int, party: str) -> int | None:
        self.close()
        self.log_fd = os.dup(log_fd)
        self._number += 1
        return self._number

    def cut(self, number: int) -> None:
        self.was_cut.append(number)
        self._close_socket()

    def drop(self, number: int) -> None:
        self.dropped.append(number)
        if number == self._number:
            self._close_socket()

    def take_memory(self, num_bytes: int, party: str) -> bool:
        if self._socket_fd >= 0:
            self.sent.append((os.fstat(self.log_fd).st_size, accepted_bytes(self._socket_fd)))
        if self.taken_bytes + num_bytes > self.limit_bytes:
            return False
        self.taken_bytes += num_bytes
        return True

    def release_memory(self, num_bytes: int, party: str) -> None:
        self.taken_bytes -= num_bytes

    def log(self) -> bytes:
        return os.pread(self.log_fd, 1 << 24, 0)

    def close(self) -> None:
        self._close_socket()
        if self.log_fd >= 0:
            os.close(self.log_fd)
        self.log_fd = -1

    def _close_socket(self) -> None:
        if self._socket_fd >= 0:
            os.close(self._socket_fd)
        self._socket_fd = -1
