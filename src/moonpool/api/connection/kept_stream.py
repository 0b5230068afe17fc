"""The log that another head needs to continue an answer: its request, and what its client was sent.

The log is in anonymous memory, which the supervisor holds together with the client's socket. An
increment is logged before its bytes are sent. The whole response follows from the log, so a
successor makes the same bytes again, and sends the bytes that the kernel has not accepted yet. A
request that arrives in several pieces has a separate log until it is complete (`HalfRead`).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import secrets
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from starlette.types import Scope

from moonpool.api.connection.call_log import RECORDS, CallLog, StreamKeeper
from moonpool.api.connection.poison import INSTANCES_ENDED, MAX_ENDED, Enders, WorkMark
from moonpool.api.serving_backend import Output, RequestRefused
from moonpool.refusal import Refusal
from moonpool.types import MALFORMED, FinishReason, Struct, Token

MAX_FRUITLESS = 8
"""The most heads in a row that may die without an increment of an answer, if nothing shows that its
call ended them. Then the answer is refused, because it may end heads in a way that is not
detected."""
MAX_KEPT_SHARE = 5
"""The logs of answers may use a fifth (1 / MAX_KEPT_SHARE) of a process's file descriptors. The
supervisor has two for each log, and two more for each log that it is passing to the next head."""


class StreamFacts(Struct, frozen=True):
    """Facts of a response besides the model's output. The facts are drawn once per call."""

    request_id: str
    seed: int  # seed of the sampling, if the client gave none
    created_s: int
    ids: bytes  # seed of the ids within the response
    max_model_tokens: int
    # whether reasoning is sent apart from the answer, where the model's template has its tags
    tells_reasoning: bool = False
    system_fingerprint: str = ""

    def id_source(self, index: int) -> Callable[[], str]:
        """Returns a function that gives unpredictable ids one after another, for one choice."""
        count = 0

        def next_id() -> str:
            nonlocal count
            count += 1
            return hashlib.blake2b(
                b"%d/%d" % (index, count), key=self.ids, digest_size=12
            ).hexdigest()

        return next_id


def draw_facts(request_id: str, max_model_tokens: int, system_fingerprint: str = "") -> StreamFacts:
    return StreamFacts(
        request_id=request_id,
        seed=secrets.randbits(63),
        created_s=int(time.time()),
        ids=secrets.token_bytes(16),
        max_model_tokens=max_model_tokens,
        tells_reasoning=True,
        system_fingerprint=system_fingerprint,
    )


class Opening(Struct, frozen=True):
    """One call, as its head received it.

    `request`: as bytes of HTTP. `base`: the position of the response's first byte among all bytes
    that this connection sends, as `accepted_bytes` counts them. `arrived_s` is on the machine's
    monotonic clock, which all processes share. `request` is empty if the connection cannot outlive
    its head. `digest`: the digest of path and body, which identifies the call if it is sent again;
    empty if the call cannot be continued. `num_returns`: how often the call has come again.
    `num_ended`: how many heads calls like it had ended when it came.
    """

    request: bytes
    default_headers: tuple[tuple[bytes, bytes], ...]
    base: int
    arrived_s: float
    tenant: str
    is_operator: bool = msgspec.field(name="is_admin")
    facts: StreamFacts
    digest: bytes = b""
    num_returns: int = 0
    num_ended: int = 0


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


class LoggedRefusal(Refusal, frozen=True, tag="r"):
    """The call was refused, or ended early."""


class Named(Struct, frozen=True, array_like=True, tag="n"):
    """The id in the response, which differs from the client's id if two calls gave the same one."""

    request_id: str


class Commented(Struct, frozen=True, array_like=True, tag="c"):
    """Bytes between increments that say nothing (see `silence`)."""

    data: bytes


class TakenOver(Struct, frozen=True, array_like=True, tag="t"):
    """A later head continues from here. `num_ended`: number of heads that this call has hung or
    crashed so far. `num_killed`: how many heads were killed while they processed this call, which
    may be chance."""

    num_ended: int = 0
    num_killed: int = 0


class ReadAhead(Struct, frozen=True, array_like=True, tag="a"):
    """Bytes of the connection's next request that were read, and are lost with the head."""


Entry = Delivered | LoggedRefusal | Named | Commented | TakenOver | ReadAhead
_encode = msgspec.msgpack.Encoder().encode
_OPENING = msgspec.msgpack.Decoder(Opening)
_ENTRY: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


class KeptStream:
    """The log of one call. After `drop` it records nothing, and no other head continues it. After
    `cut` it records nothing, and another connection may continue it."""

    def __init__(self, call_log: CallLog, opening: Opening, has_socket: bool = True) -> None:
        """`has_socket`: whether its connection outlives this process."""
        self.opening = opening
        self.has_socket = has_socket
        self.has_delivered = False
        self.may_come_again = False
        """Whether the log can serve a client that has lost its connection and comes back."""
        self.is_cut = False
        self.num_returns = opening.num_returns
        self.num_ended = opening.num_ended
        """Number of heads that the call, or calls like it, have ended."""
        self.mark: WorkMark | None = None
        self.enders: Enders | None = None
        self.on_write: Callable[[], None] | None = None
        self.entries: list[Entry] = []  # entries that earlier heads wrote
        self.is_resumed = False
        self.has_lost_bytes = False
        """Whether an earlier head read bytes of the connection's next request."""
        self._log = call_log
        self._has_read_ahead = False

    @classmethod
    def begin(
        cls, keeper: StreamKeeper, socket_fd: int | None, opening: Opening, party: str = ""
    ) -> KeptStream | None:
        """Starts to keep a call. Returns None if there is no room for the log. Without a socket,
        the call's connection ends with this process. `party`: as in `SharedBuffer`."""
        call_log = CallLog.begin(keeper, socket_fd, _encode(opening), party)
        return None if call_log is None else cls(call_log, opening, socket_fd is not None)

    @classmethod
    def take_over(cls, call_log: CallLog, num_ended: int = 0, num_killed: int = 0) -> KeptStream:
        """Continues the log of an earlier head. `num_ended`, `num_killed`: as in `TakenOver`.
        Raises ValueError if the log is empty or damaged."""
        kept = cls._read(call_log)
        kept.is_resumed = True
        kept.has_lost_bytes = any(isinstance(entry, ReadAhead) for entry in kept.entries)
        taken = TakenOver(num_ended=num_ended, num_killed=num_killed)
        kept.num_ended = _num_ended(kept.opening, [*kept.entries, taken])
        kept._write(taken)
        return kept

    @classmethod
    def take_cut(cls, call_log: CallLog) -> KeptStream:
        """Holds the log of an earlier head, whose connection has ended. Raises ValueError."""
        kept = cls._read(call_log)
        kept.is_cut = True
        kept.entries = []  # the entries are read again only when the client comes back
        return kept

    @classmethod
    def _read(cls, call_log: CallLog) -> KeptStream:
        records, call_log.records = call_log.records, []
        if not records:
            raise ValueError("the log of an answer is empty")
        try:
            kept = cls(call_log, _OPENING.decode(records[0]))
            kept.entries = [_ENTRY.decode(record) for record in records[1:]]
        except MALFORMED as error:
            raise ValueError(f"the log of an answer is damaged: {error}") from None
        kept.has_delivered = bool(kept.deliveries())
        kept.may_come_again = any(map(_may_come_again, kept.deliveries()))
        call_log.belong_to(kept.opening.tenant)
        kept.num_ended = _num_ended(kept.opening, kept.entries)
        return kept

    @property
    def number(self) -> int:
        """The keeper's number of this log."""
        return self._log.number

    @property
    def log(self) -> CallLog:
        return self._log

    @property
    def base(self) -> int:
        return self.opening.base

    @property
    def received(self) -> list[bytes]:
        """The call, as the HTTP bytes that arrived."""
        return [self.opening.request]

    def deliveries(self) -> list[Delivered]:
        return [entry for entry in self.entries if isinstance(entry, Delivered)]

    def comments(self) -> list[tuple[int, bytes]]:
        """Returns the comments, each with the number of increments before it."""
        found, num_delivered = [], 0
        for entry in self.entries:
            num_delivered += isinstance(entry, Delivered)
            if isinstance(entry, Commented):
                found.append((num_delivered, entry.data))
        return found

    def refusal(self) -> RequestRefused | None:
        """Returns why the call was refused, by an earlier head or by this one, or None if it was
        not."""
        num_fruitless = 0
        for entry in self.entries:
            if isinstance(entry, LoggedRefusal):
                # the head that refused the call has counted it
                return RequestRefused.of(entry, is_counted=True)
            num_fruitless += isinstance(entry, TakenOver)
            if isinstance(entry, Delivered):
                num_fruitless = 0
        if num_fruitless >= MAX_FRUITLESS:
            text = f"The server failed {num_fruitless + 1} times during this request."
            return RequestRefused(500, "head_failed", text)
        return None

    def raise_refusal(self, note: Callable[[str], None]) -> None:
        """Raises RequestRefused if the call was refused, or is now. `note` counts the latter."""
        refused = self.refusal()
        if refused is None:
            return
        if not refused.is_counted:
            note(refused.refusal.reason)
            refused.is_counted = True
        raise refused

    @property
    def name(self) -> str:
        """Returns the id in the response, if an earlier head has named one."""
        return next((e.request_id for e in self.entries if isinstance(e, Named)), "")

    def note(self, index: int, output: Output) -> None:
        """Logs an increment. Must be called before any byte of the increment is sent."""
        self.has_delivered = True
        delivered = Delivered(
            index=index,
            tokens=output.tokens,
            finish=output.finish_reason,
            cached_tokens=output.cached_tokens,
            timings_s=output.timings_s,
        )
        if not self.may_come_again:
            self.may_come_again = _may_come_again(delivered)
        self._write(delivered)

    def note_refused(self, refused: RequestRefused) -> None:
        refusal = refused.refusal
        if refusal.reason == INSTANCES_ENDED and self.enders is not None and self.opening.digest:
            self.enders.note(self.opening.tenant, self.opening.digest, MAX_ENDED, time.monotonic())
        self._write(LoggedRefusal(*msgspec.structs.astuple(refusal)))

    def note_comment(self, data: bytes) -> None:
        """Logs bytes between increments. Must be called before any of these bytes is sent."""
        self._write(Commented(data=data))

    def note_name(self, request_id: str) -> None:
        self._write(Named(request_id=request_id))

    def note_read_ahead(self) -> None:
        if not self._has_read_ahead:
            self._has_read_ahead = True
            self._write(ReadAhead())

    def cut(self) -> None:
        """Notes that the connection has ended. The log is kept for its client, who may come
        back."""
        self.is_cut = True
        self._log.cut()

    def read_deliveries(self) -> list[Delivered]:
        """Returns the increments in the log. Raises OSError and ValueError."""
        try:
            entries = [_ENTRY.decode(record) for record in self._log.read_again()[1:]]
        except MALFORMED as error:
            raise ValueError(f"the log of an answer is damaged: {error}") from None
        return [entry for entry in entries if isinstance(entry, Delivered)]

    def drop(self) -> None:
        """Notes that the response is complete, or its client gone."""
        self._log.drop()

    def _write(self, entry: Entry) -> None:
        if self.is_cut:
            return
        self._log.append(_encode(entry))
        if self.on_write is not None:
            self.on_write()


def _may_come_again(delivered: Delivered) -> bool:
    """Whether the answer can be sent again. A forwarded answer without an end cannot, because no
    process could continue it."""
    return delivered.finish is not None or not any(token.payload for token in delivered.tokens)


def _num_ended(opening: Opening, entries: Iterable[Entry]) -> int:
    """Returns the number of heads that a call has ended. Killed heads count only after the last
    increment: a kill from outside may hit any call, but seldom hits the same call twice before that
    call makes progress."""
    num_ended, num_killed, before = opening.num_ended, 0, TakenOver()
    for entry in entries:
        if isinstance(entry, Delivered):
            num_killed = 0
        elif isinstance(entry, TakenOver):
            num_ended += max(entry.num_ended - before.num_ended, 0)
            num_killed += max(entry.num_killed - before.num_killed, 0)
            before = entry
    return num_ended + num_killed


def written_log(opening: Opening, entries: bytes) -> bytes:
    """Returns the bytes of a log. `entries`: bytes of another log, after its opening."""
    return RECORDS.framed(_encode(opening)) + entries


def digest_of(path: str, body: bytes) -> bytes:
    """Returns the digest that names a call, together with its request id."""
    made = hashlib.blake2b(path.encode() + b"\0", digest_size=16)
    made.update(body)
    return made.digest()


_BYTES_ACKED = 120
"""Offset of `tcpi_bytes_acked` in Linux's `struct tcp_info`."""
_U64 = struct.Struct("=Q")
_I32 = struct.Struct("=i")
_MAX_LOOKS = 1000
_NOT_REPEATED = (b"content-length", b"transfer-encoding", b"expect")


def accepted_bytes(fd: int) -> int:
    """Returns how many bytes the kernel has accepted on a TCP socket, counted from a start that is
    fixed per connection. Raises OSError if the kernel does not count them.

    Bytes are accepted when they are acknowledged or still in the kernel's queue.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=os.dup(fd)) as sock:
        acked = _acked(sock)
        for _ in range(_MAX_LOOKS):
            queued = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
            before, acked = acked, _acked(sock)
            if before == acked:  # otherwise, an acknowledgement came between the two reads
                return acked + int(_I32.unpack(queued)[0])
    raise OSError("the connection's counters keep changing")


def _acked(sock: socket.socket) -> int:
    if not hasattr(socket, "TCP_INFO"):
        raise OSError("this kernel does not count acknowledged bytes")
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _BYTES_ACKED + _U64.size:
        raise OSError("this kernel does not count acknowledged bytes")
    return int(_U64.unpack_from(info, _BYTES_ACKED)[0])


def request_bytes(scope: Scope, body: bytes) -> bytes:
    """Returns a request whose body has arrived as the bytes that a client would send."""
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    version = scope["http_version"].encode()
    lines = [b"%b %b%b HTTP/%b" % (scope["method"].encode(), scope["raw_path"], query, version)]
    lines += [b"%b: %b" % pair for pair in scope["headers"] if pair[0] not in _NOT_REPEATED]
    lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class ResumedTransport:
    """A transport that does not send its first bytes, because the client was sent them before."""

    def __init__(self, transport: asyncio.Transport, num_sent: int) -> None:
        self._transport = transport
        self._num_left = num_sent

    def write(self, data: bytes) -> None:
        if self._num_left:
            num_skipped = min(self._num_left, len(data))
            self._num_left -= num_skipped
            data = data[num_skipped:]
        if data:
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


_START = struct.Struct("<9sQ")
_MARK = b"half-read"
"""Begins the first record of a half-read request. The opening of a kept call never begins like
this, because it is a map in msgpack."""


class HalfRead:
    """The log of one request that is arriving: each record is a piece of it. A request that arrives
    in one piece needs no such log, because its call is kept before its head does anything else."""

    def __init__(self, call_log: CallLog, base: int) -> None:
        """`base`: as in `Opening`."""
        self.base = base
        self.received: list[bytes] = []  # pieces that earlier heads received
        self.num_ended = 0
        """Number of heads that the request has ended."""
        self._log = call_log

    @classmethod
    def begin(
        cls, keeper: StreamKeeper, socket_fd: int, base: int, party: str = ""
    ) -> HalfRead | None:
        """Starts to keep a request of which nothing is logged yet. Returns None if there is no room
        for it."""
        call_log = CallLog.begin(keeper, socket_fd, _START.pack(_MARK, base), party)
        return None if call_log is None else cls(call_log, base)

    @staticmethod
    def is_in(call_log: CallLog) -> bool:
        """Whether the log of an earlier head belongs to a request that was arriving."""
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
        call_log.append(b"")  # an empty record stands for each further head
        return half_read

    @property
    def party(self) -> str:
        """Returns the party whose room the log takes."""
        return self._log.party

    @property
    def number(self) -> int:
        """The keeper's number of this log."""
        return self._log.number

    def note(self, data: bytes) -> None:
        """Logs a piece of the request. Must be called before the piece is parsed."""
        if data:
            self._log.append(data)

    def drop(self) -> None:
        """Notes that the call is kept elsewhere from now on, or need not be kept."""
        self._log.drop()
