"""What another head needs to go on with an answer: its request, and what its client was sent.

It is a log in anonymous memory, which the supervisor holds together with the client's socket. An
increment is logged before its bytes are sent. Everything else that a response contains follows from
the log, so a successor makes the same bytes again, and sends those that its kernel lacks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import struct
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from moonpool.api.frontend import Output, RequestRefused
from moonpool.types import MALFORMED, FinishReason, Struct, Token

log = logging.getLogger("moonpool.head")

MAX_FRUITLESS = 8
"""Heads that may die in a row without an increment of an answer. Then the answer is refused: its
request may be what ends them."""
MAX_KEPT_SHARE = 5
"""A fifth of a process's file descriptors is for the logs of answers: the supervisor has two for
each, and two more for each that it is giving to the next head."""
_LENGTH = struct.Struct("<I")


class StreamFacts(Struct, frozen=True):
    """What a response contains besides the model's output. Drawn once per call."""

    request_id: str
    seed: int  # of the sampling, if the client gave none
    created_s: int
    ids: bytes  # the seed of the ids within the response
    max_model_tokens: int

    def id_source(self, index: int) -> Callable[[], str]:
        """Returns a function that gives one unpredictable id after another, those of one choice."""
        count = 0

        def next_id() -> str:
            nonlocal count
            count += 1
            return hashlib.blake2b(
                b"%d/%d" % (index, count), key=self.ids, digest_size=12
            ).hexdigest()

        return next_id


def draw_facts(request_id: str, max_model_tokens: int) -> StreamFacts:
    return StreamFacts(
        request_id=request_id,
        seed=secrets.randbits(63),
        created_s=int(time.time()),
        ids=secrets.token_bytes(16),
        max_model_tokens=max_model_tokens,
    )


class Opening(Struct, frozen=True):
    """One call, as its head received it.

    `request`: as bytes of HTTP. `base`: the position of the response's first byte among all bytes
    that this connection sends, as `accepted_bytes` counts them. `arrived_s` is on the machine's
    monotonic clock, which all processes share.
    """

    request: bytes
    default_headers: tuple[tuple[bytes, bytes], ...]
    base: int
    arrived_s: float
    tenant: str
    is_admin: bool
    facts: StreamFacts


class Delivered(Struct, frozen=True, array_like=True, tag="d"):
    """One increment of the choice `index`."""

    index: int
    tokens: tuple[Token, ...]
    finish: FinishReason | None
    cached_tokens: int
    timings_s: dict[str, float] | None

    def output(self) -> Output:
        return Output(
            tokens=self.tokens,
            finish_reason=self.finish,
            cached_tokens=self.cached_tokens,
            timings_s=self.timings_s,
        )


class RefusedThen(Struct, frozen=True, array_like=True, tag="r"):
    """The call was refused, or broke off."""

    status: int
    reason: str
    message: str
    retry_after_s: float | None
    projection: dict[str, float] | None


class Named(Struct, frozen=True, array_like=True, tag="n"):
    """The id in the response, which differs from the client's if two calls gave the same."""

    request_id: str


class TakenOver(Struct, frozen=True, array_like=True, tag="t"):
    """A further head goes on from here."""


class ReadAhead(Struct, frozen=True, array_like=True, tag="a"):
    """Bytes of the connection's next request were read, and are lost with the head."""


Entry = Delivered | RefusedThen | Named | TakenOver | ReadAhead
_encode = msgspec.msgpack.Encoder().encode
_OPENING = msgspec.msgpack.Decoder(Opening)
_ENTRY: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class StreamKeeper(Protocol):
    """Who outlives this head and holds what its successor needs."""

    def keep(self, socket_fd: int, log_fd: int) -> int | None:
        """Holds duplicates of both. Returns their number; None: there is no room."""
        ...

    def drop(self, number: int) -> None: ...

    def take_memory(self, num_bytes: int) -> bool:
        """Counts bytes of logs. Returns False if that would be too many."""
        ...

    def release_memory(self, num_bytes: int) -> None: ...


class KeptStream:
    """The log of one call. After `drop` it records nothing, and no other head goes on with it."""

    def __init__(self, keeper: StreamKeeper, number: int, log_fd: int, opening: Opening) -> None:
        self.opening = opening
        self.entries: list[Entry] = []  # of earlier heads
        self.is_resumed = False
        self._keeper = keeper
        self._number = number
        self._fd = log_fd
        self._num_bytes = 0
        self.has_lost_bytes = False
        """Bytes of the connection's next request were read by an earlier head."""
        self._has_read_ahead = False
        self._is_kept = True

    @classmethod
    def begin(cls, keeper: StreamKeeper, socket_fd: int, opening: Opening) -> KeptStream | None:
        """Keeps a call; None: there is no room for it."""
        body = _encode(opening)
        if not keeper.take_memory(len(body)):
            return None
        number = log_fd = None
        try:
            log_fd = os.memfd_create("moonpool answer", os.MFD_CLOEXEC)
            append_record(log_fd, body)
            number = keeper.keep(socket_fd, log_fd)
        except OSError as error:
            log.warning("an answer would not outlive the head: %s", error)
        if number is None or log_fd is None:
            keeper.release_memory(len(body))
            if log_fd is not None:
                os.close(log_fd)
            return None
        kept = cls(keeper, number, log_fd, opening)
        kept._num_bytes = len(body)
        return kept

    @classmethod
    def take_over(cls, keeper: StreamKeeper, number: int, log_fd: int) -> KeptStream:
        """Reads the log of an earlier head. Raises ValueError if it is not whole."""
        records, num_bytes = read_records(log_fd)
        if not records:
            raise ValueError("the log of an answer is empty")
        try:
            kept = cls(keeper, number, log_fd, _OPENING.decode(records[0]))
            kept.entries = [_ENTRY.decode(record) for record in records[1:]]
        except MALFORMED as error:
            raise ValueError(f"the log of an answer is damaged: {error}") from None
        os.ftruncate(log_fd, num_bytes)  # without a record that the other head did not finish
        os.lseek(log_fd, num_bytes, os.SEEK_SET)
        kept.is_resumed = True
        kept._num_bytes = num_bytes if keeper.take_memory(num_bytes) else 0
        kept.has_lost_bytes = any(isinstance(entry, ReadAhead) for entry in kept.entries)
        kept._write(TakenOver())
        return kept

    def deliveries(self) -> list[Delivered]:
        return [entry for entry in self.entries if isinstance(entry, Delivered)]

    def refusal(self) -> RequestRefused | None:
        """Returns why the call was refused, or is now."""
        num_fruitless = 0
        for entry in self.entries:
            if isinstance(entry, RefusedThen):
                return RequestRefused(
                    entry.status,
                    entry.reason,
                    entry.message,
                    entry.retry_after_s,
                    entry.projection,
                )
            num_fruitless += isinstance(entry, TakenOver)
            if isinstance(entry, Delivered):
                num_fruitless = 0
        if num_fruitless >= MAX_FRUITLESS:
            text = f"The server failed {num_fruitless + 1} times during this request."
            return RequestRefused(500, "head_failed", text)
        return None

    @property
    def name(self) -> str:
        """The id in the response, if an earlier head has named it."""
        return next((e.request_id for e in self.entries if isinstance(e, Named)), "")

    def note(self, index: int, output: Output) -> None:
        """Logs an increment. Call it before a byte of it is sent."""
        self._write(
            Delivered(
                index=index,
                tokens=output.tokens,
                finish=output.finish_reason,
                cached_tokens=output.cached_tokens,
                timings_s=output.timings_s,
            )
        )

    def note_refused(self, refused: RequestRefused) -> None:
        self._write(
            RefusedThen(
                status=refused.status,
                reason=refused.reason,
                message=refused.message,
                retry_after_s=refused.retry_after_s,
                projection=refused.projection,
            )
        )

    def note_name(self, request_id: str) -> None:
        self._write(Named(request_id=request_id))

    def note_read_ahead(self) -> None:
        if not self._has_read_ahead:
            self._has_read_ahead = True
            self._write(ReadAhead())

    def drop(self) -> None:
        """The response is complete, or its client gone."""
        if self._is_kept:
            self._is_kept = False
            self._keeper.drop(self._number)
            self._keeper.release_memory(self._num_bytes)
            os.close(self._fd)

    def _write(self, entry: Entry) -> None:
        if not self._is_kept:
            return
        body = _encode(entry)
        try:
            if self._keeper.take_memory(len(body)):
                self._num_bytes += len(body)
                append_record(self._fd, body)
                return
            error = "the logs of all answers are full"
        except OSError as failure:
            error = str(failure)
        log.warning("an answer would not outlive the head any more: %s", error)
        self.drop()


def append_record(fd: int, body: bytes) -> None:
    """Appends a record to a log. Raises OSError."""
    record = _LENGTH.pack(len(body)) + body
    if os.write(fd, record) != len(record):
        raise OSError("no memory for the log of an answer")


def read_records(fd: int) -> tuple[list[bytes], int]:
    """Returns the complete records, and how many bytes they take."""
    size = os.fstat(fd).st_size
    whole = memoryview(os.pread(fd, size, 0))
    records: list[bytes] = []
    offset = 0
    while offset + _LENGTH.size <= len(whole):
        (length,) = _LENGTH.unpack_from(whole, offset)
        end = offset + _LENGTH.size + length
        if end > len(whole):
            break
        records.append(bytes(whole[offset + _LENGTH.size : end]))
        offset = end
    return records, offset
