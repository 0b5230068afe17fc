"""What another head needs to go on with reading a request: the bytes that have arrived so far.

A request that arrives in one piece needs none of this: its call is kept before its head does
anything else.
"""

from __future__ import annotations

import struct

from moonpool.api.connection.call_log import CallLog, StreamKeeper
from moonpool.api.connection.kept_stream import MAX_FRUITLESS

_START = struct.Struct("<9sQ")
_MARK = b"half-read"
"""Begins the first record. No opening of a kept call begins so: it is a map in msgpack."""


class HalfRead:
    """The log of one request that is arriving: each record is a piece of it."""

    def __init__(self, call_log: CallLog, base: int) -> None:
        """`base`: as in `Opening`."""
        self.base = base
        self.received: list[bytes] = []  # by earlier heads
        self.num_ended = 0
        """Heads that the request has ended."""
        self._log = call_log

    @classmethod
    def begin(
        cls, keeper: StreamKeeper, socket_fd: int, base: int, party: str = ""
    ) -> HalfRead | None:
        """Keeps a request of which nothing is logged yet. Returns None if there is no room for
        it."""
        call_log = CallLog.begin(keeper, socket_fd, _START.pack(_MARK, base), party)
        return None if call_log is None else cls(call_log, base)

    @staticmethod
    def is_in(call_log: CallLog) -> bool:
        """Whether the log of an earlier head is that of a request that was arriving."""
        return bool(call_log.records) and call_log.records[0].startswith(_MARK)

    @classmethod
    def take_over(
        cls, call_log: CallLog, party: str = "", num_ended: int = 0, num_killed: int = 0
    ) -> HalfRead:
        """`num_ended`, `num_killed`: as in `kept_stream.TakenOver`. Raises ValueError if the log is
        damaged, or too many heads have died with the request."""
        first, *records = call_log.records
        if len(first) != _START.size:
            raise ValueError("the log of a request is damaged")
        half_read = cls(call_log, _START.unpack(first)[1])
        half_read.num_ended = num_ended + num_killed
        half_read.received = [record for record in records if record]
        num_heads = 1 + len(records) - len(half_read.received)
        if num_heads > MAX_FRUITLESS:
            raise ValueError(f"{num_heads} heads ended while they read this request")
        call_log.belong_to(party)
        call_log.append(b"")  # stands for a further head
        return half_read

    @property
    def party(self) -> str:
        """Who has the room that the log takes."""
        return self._log.party

    @property
    def number(self) -> int:
        """The keeper's number of this log."""
        return self._log.number

    def note(self, data: bytes) -> None:
        """Logs bytes. Call it before they are parsed."""
        if data:
            self._log.append(data)

    def drop(self) -> None:
        """The call is kept by itself from now on, or needs it no more."""
        self._log.drop()
