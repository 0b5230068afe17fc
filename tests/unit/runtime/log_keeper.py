"""Keeps the logs of calls in place of the supervisor."""

from __future__ import annotations

import os


class LogKeeper:
    """Holds duplicates of a connection and of its log; logs without a connection get a number."""

    def __init__(self) -> None:
        # duplicates of the descriptors of connections and of their logs
        self.fds: list[tuple[int, int]] = []
        self.num_cut = 0

    def keep(self, socket_fd: int, log_fd: int, party: str) -> int | None:
        self.fds.append((os.dup(socket_fd), os.dup(log_fd)))
        return len(self.fds) - 1

    def keep_cut(self, log_fd: int, party: str) -> int | None:
        self.num_cut += 1
        return self.num_cut

    def cut(self, number: int) -> None: ...

    def drop(self, number: int) -> None: ...

    def take_memory(self, num_bytes: int, party: str) -> bool:
        return True

    def release_memory(self, num_bytes: int, party: str) -> None: ...

    def close(self) -> None:
        """Closes the duplicates."""
        for pair in self.fds:
            for fd in pair:
                os.close(fd)
