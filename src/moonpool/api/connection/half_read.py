"""What another head needs to go on with reading a request: the bytes that have arrived so far.

A request that arrives in one piece needs none of this: its call is kept before its head does
anything else. The log has the form of `kept_stream`; here its records are bytes of the connection.
"""

from __future__ import annotations

import os
import struct
from typing import Self

from moonpool.api.connection.kept_stream import (
    MAX_FRUITLESS,
    StreamKeeper,
    append_record,
    log,
    read_records,
)

_START = struct.Struct("<Q")
_MARK = b"half-read"
"""Begins the first record. No opening of a kept call begins so: it is a map in msgpack."""


class HalfRead:
    """The log of one request that is arriving. After `drop` it records nothing."""

    def __init__(self, keeper: StreamKeeper, number: int, log_fd: int, base: int) -> None:
        """`base`: as in `Opening`."""
        self.base = base
        self.pieces: list[bytes] = []  # read by earlier heads
        self._keeper = keeper
        self._number = number
        self._fd = log_fd
        self._num_bytes = 0
        self._is_kept = True

    @classmethod
    def begin(cls, keeper: StreamKeeper, socket_fd: int, base: int) -> Self | None:
        """Keeps a request of which nothing is logged yet; None: there is no room for it."""
        first = _MARK + _START.pack(base)
        log_fd = number = None
        try:
            log_fd = os.memfd_create("moonpool request", os.MFD_CLOEXEC)
            append_record(log_fd, first)
            number = keeper.keep(socket_fd, log_fd)
        except OSError as error:
            log.warning("a request would not outlive the head: %s", error)
        if number is None or log_fd is None:
            if log_fd is not None:
                os.close(log_fd)
            return None
        return cls(keeper, number, log_fd, base)

    @classmethod
    def take_over(cls, keeper: StreamKeeper, number: int, log_fd: int) -> Self | None:
        """Reads the log of an earlier head. Returns None if it is that of a call that has arrived.
        Raises ValueError if too many heads have died of it."""
        records, num_bytes = read_records(log_fd)
        if not records or not records[0].startswith(_MARK):
            return None
        if len(records[0]) != len(_MARK) + _START.size:
            raise ValueError("the log of a request is damaged")
        half = cls(keeper, number, log_fd, _START.unpack_from(records[0], len(_MARK))[0])
        half.pieces = [record for record in records[1:] if record]
        num_heads = len(records) - len(half.pieces)
        if num_heads > MAX_FRUITLESS:
            raise ValueError(f"{num_heads} heads ended while they read this request")
        os.ftruncate(log_fd, num_bytes)
        os.lseek(log_fd, num_bytes, os.SEEK_SET)
        half._num_bytes = num_bytes if keeper.take_memory(num_bytes) else 0
        half._append(b"")  # stands for a further head
        return half

    def note(self, data: bytes) -> None:
        """Logs bytes. Call it before they are parsed."""
        if data:
            self._append(data)

    def drop(self) -> None:
        """The call is kept by itself from now on, or needs it no more."""
        if self._is_kept:
            self._is_kept = False
            self._keeper.drop(self._number)
            self._keeper.release_memory(self._num_bytes)
            os.close(self._fd)

    def _append(self, data: bytes) -> None:
        if not self._is_kept:
            return
        try:
            if self._keeper.take_memory(len(data)):
                self._num_bytes += len(data)
                append_record(self._fd, data)
                return
            error = "the logs of all answers are full"
        except OSError as failure:
            error = str(failure)
        log.warning("a request would not outlive the head any more: %s", error)
        self.drop()
