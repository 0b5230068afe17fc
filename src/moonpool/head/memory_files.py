"""Memory files that a process holds for the workers that it starts, without opening them as an
arena.

The supervisor imports this module, so it must import no numpy: numpy starts threads, and a process
with threads cannot open a fork server (`head.fork_server`).
"""

from __future__ import annotations

import os


class KeptMemoryFiles:
    """Empty memory files without names, for the successive processes of one instance. The files
    exist as long as this process, or another process that has opened them."""

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        """`fds`: file descriptors of an earlier program of this process."""
        self.fds = fds or (_new_file("moonpool-arena"), _new_file("moonpool-ledger"))
        self.paths = tuple(f"/proc/{os.getpid()}/fd/{fd}" for fd in self.fds)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def _new_file(name: str) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return fd
