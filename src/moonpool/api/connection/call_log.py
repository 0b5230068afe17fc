"""A log in anonymous memory, which the supervisor holds together with a client's socket.

The content of the log outlives this process: another head reads it and continues. A record is 4
bytes of length and its body.
"""

from __future__ import annotations

import logging
import os
from typing import Protocol, Self

from moonpool.framing import Framing
from moonpool.link.packets import anonymous_file

log = logging.getLogger("moonpool.head")

RECORDS = Framing("<")


class StreamKeeper(Protocol):
    """The party that outlives this head and holds what its successor needs. Parties share the
    keeper's room like that of a `SharedBuffer`."""

    def keep(self, socket_fd: int, log_fd: int, party: str) -> int | None:
        """Holds duplicates of the socket and of the log. Returns the number of the held pair, or
        None if there is no room."""
        ...

    def keep_cut(self, log_fd: int, party: str) -> int | None:
        """Keeps, as `keep` does, a call whose connection ends with this process."""
        ...

    def cut(self, number: int) -> None:
        """Notes that the connection has ended, so that only the log is kept."""
        ...

    def drop(self, number: int) -> None: ...

    def take_memory(self, num_bytes: int, party: str) -> bool:
        """Counts bytes of logs as used. Returns False if the bytes would exceed the limit."""
        ...

    def release_memory(self, num_bytes: int, party: str) -> None: ...


class CallLog:
    """The records of one call. After `drop` the log takes no more records, and no other head reads
    it."""

    def __init__(
        self, keeper: StreamKeeper, number: int, fd: int, num_bytes: int = 0, party: str = ""
    ) -> None:
        """`num_bytes`: the bytes that the keeper has counted for the party. The log owns `fd`."""
        self.records: list[bytes] = []  # records that earlier heads wrote
        self.number = number
        self.party = party
        self.is_kept = True
        self._keeper = keeper
        self.num_first_bytes = 0
        """Length of the log's first record."""
        self._fd = fd
        self._num_bytes = num_bytes
        self._num_read_bytes = 0

    @classmethod
    def begin(
        cls, keeper: StreamKeeper, socket_fd: int | None, first: bytes, party: str
    ) -> Self | None:
        """Starts a log with its first record. Returns None if there is no room for it. Without a
        socket, another head reads the log only when the client comes back."""
        if not keeper.take_memory(len(first), party):
            return None
        number = fd = None
        try:
            fd = anonymous_file("moonpool call")
            _append(fd, first)
            if socket_fd is None:
                number = keeper.keep_cut(fd, party)
            else:
                number = keeper.keep(socket_fd, fd, party)
        except OSError as error:
            log.warning("a call would not outlive the head: %s", error)
        if number is None or fd is None:
            keeper.release_memory(len(first), party)
            if fd is not None:
                os.close(fd)
            return None
        begun = cls(keeper, number, fd, len(first), party)
        begun.num_first_bytes = RECORDS.NUM_LENGTH_BYTES + len(first)
        return begun

    def read(self) -> None:
        """Reads the records of an earlier head and removes an unfinished last record. Raises
        OSError."""
        self.records, num_bytes = _read(self._fd)
        if self.records:
            self.num_first_bytes = RECORDS.NUM_LENGTH_BYTES + len(self.records[0])
        os.ftruncate(self._fd, num_bytes)
        os.lseek(self._fd, num_bytes, os.SEEK_SET)
        self._num_read_bytes = num_bytes

    def belong_to(self, party: str) -> None:
        """Counts the bytes that were read for a party, if there is room."""
        self.party = party
        taken = self._keeper.take_memory(self._num_read_bytes, party)
        self._num_bytes = self._num_read_bytes if taken else 0

    def append(self, body: bytes) -> None:
        """Adds a record. If there is no room for the record, the log is dropped."""
        if not self.is_kept:
            return
        try:
            if self._keeper.take_memory(len(body), self.party):
                self._num_bytes += len(body)
                _append(self._fd, body)
                return
            error = "the logs of calls are full, or those of its tenant"
        except OSError as failure:
            error = str(failure)
        log.warning("a call would not outlive the head any more: %s", error)
        self.drop()

    def read_again(self) -> list[bytes]:
        """Returns all complete records. Raises OSError."""
        return _read(self._fd)[0] if self.is_kept else []

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._fd).st_size if self.is_kept else 0

    def read_from(self, offset: int, most: int) -> bytes:
        """Returns bytes of the log. Raises OSError."""
        return os.pread(self._fd, most, offset) if self.is_kept else b""

    def cut(self) -> None:
        """Notes that the call's connection has ended."""
        if self.is_kept:
            self._keeper.cut(self.number)

    def drop(self) -> None:
        """Notes that the call no longer needs its log."""
        if self.is_kept:
            self.is_kept = False
            self._keeper.drop(self.number)
            self._keeper.release_memory(self._num_bytes, self.party)
            os.close(self._fd)


def _append(fd: int, body: bytes) -> None:
    record = RECORDS.framed(body)
    if os.write(fd, record) != len(record):
        raise OSError("no memory for the log of a call")


def _read(fd: int) -> tuple[list[bytes], int]:
    """Returns the complete records, and the number of their bytes."""
    rest = bytearray(os.pread(fd, os.fstat(fd).st_size, 0))
    num_bytes = len(rest)
    records = list(RECORDS.pop_all(rest))
    return records, num_bytes - len(rest)
