"""One HTTP connection with limits: uvicorn's protocol, which alone has none for headers.

A header has a largest size and a time to arrive. A connection that sends neither a header nor waits
for a response is idle; when all connections are taken, a new one ends the one idle longest. So
connections that only wait cannot lock clients out. A client that does not read its response, or
sends too many requests ahead, loses its connection.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, cast

from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from moonpool.api.connection.call_log import StreamKeeper
from moonpool.api.connection.half_read import HalfRead
from moonpool.api.connection.kept_answers import KeptAnswers, Known
from moonpool.api.connection.kept_stream import (
    MAX_KEPT_SHARE,
    KeptStream,
    Opening,
    StreamFacts,
)
from moonpool.api.connection.resumption import ResumedTransport, accepted_bytes, request_bytes
from moonpool.api.connection.work_mark import MarkedWork, WorkMark
from moonpool.log_limit import limited_logger

MAX_HEADER_BYTES = 64 << 10
HEADER_S = 20.0
"""Seconds for the header of a request to arrive, from its first byte or the connection's start."""
READ_S = 5.0
"""Seconds for a request to arrive whose connection another head shall have."""
UNREAD_S = 60.0
MIN_READ_BYTES = 16 << 10
"""A client whose response waits reads so many bytes every UNREAD_S, or loses its connection."""
MAX_PIPELINED = 64
"""Most requests that may wait behind the one that is answered."""
MAX_HALF_READ = 512
"""Most requests at a time that shall outlive this process before they have arrived."""
FLUSH_S = 0.05
"""How often a complete response is looked at until the kernel has all of it."""
_RESERVED_FILES = 192
"""Descriptors kept for workers, files and the process itself."""
_MOST_CONNECTIONS = 16_384
_BODY = '{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}'


log = limited_logger("moonpool.http")


class ConnectionLimit:
    """The open connections of one server, at most `largest`."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.num_open = 0
        self.num_half_read = 0
        self.most_half_read = min(MAX_HALF_READ, largest // 20)  # the others are for answers
        self.idle: dict[LimitedProtocol, None] = {}  # longest idle first

    def enter(self) -> bool:
        """Makes room for one more connection. Returns False if all of them are in use."""
        if self.num_open >= self.largest:
            if not self.idle:
                log.warning("all %d connections are in use: new ones get 503", self.largest)
                return False
            log.warning(
                "%d connections are open, as many as the limit of file descriptors allows: the one"
                " idle longest ends for each new one",
                self.largest,
            )
            longest = next(iter(self.idle))
            del self.idle[longest]
            longest.transport.abort()
        self.num_open += 1
        return True


class LimitedProtocol(HttpToolsProtocol):
    """Created by uvicorn for each connection; `limit` is set by `limited_protocol`."""

    limit: ConnectionLimit
    keeper: StreamKeeper | None = None
    """Holds answers that shall outlive this process."""
    answers: KeptAnswers
    mark: WorkMark | None = None
    """Where the supervisor sees which call is worked on."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._header_bytes = 0
        self._in_header = True
        self._entered = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._accepted_bytes = 0
        self._running: RequestResponseCycle | None = None
        self._kept: KeptStream | None = None
        self._resumed: KeptStream | None = None
        self._half_read: HalfRead | None = None
        self._received_before: list[bytes] = []  # by an earlier head
        self._num_messages = 0  # requests that have arrived
        self._num_sent = 0  # bytes that an earlier head sent and this one makes again

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._num_sent:
            resumed = ResumedTransport(transport, self._num_sent)
            transport = cast(asyncio.Transport, resumed)
        super().connection_made(transport)
        self._entered = self.limit.enter()
        if not self._entered:
            self._refuse(
                503, "All connections of this server are in use. Send the request again later."
            )
            return
        self.limit.idle[self] = None
        self._await_header()
        if self._half_read is None and self._resumed is None:
            self._keep_half_read()  # before anything arrives: what is not read is lost, too
        with self._marked():
            for piece in self._received_before:  # now: what the kernel has comes after it
                if not self.transport.is_closing():
                    self._parse(piece)
        self._received_before.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread()
        is_complete = exc is None and self._running is not None and self._running.response_complete
        if self._kept is not None and not is_complete:
            self.answers.lose(self._kept)
            self._kept = None
        self._drop_kept()
        self._drop_half_read()
        self.limit.idle.pop(self, None)
        if self._entered:
            self.limit.num_open -= 1
            self._entered = False
        super().connection_lost(exc)
        # uvicorn tells it the newest request only, which may wait behind the one that is answered.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()

    def data_received(self, data: bytes) -> None:
        with self._marked():
            self._receive(data)

    def _receive(self, data: bytes) -> None:
        if self._kept is not None:
            self._kept.note_read_ahead()
        if self._half_read is not None:
            self._half_read.note(data)
        begins = self._in_header and not self._header_bytes and not self._responds
        num_messages = self._num_messages
        self._parse(data)
        if begins and num_messages == self._num_messages and self._half_read is None:
            self._keep_half_read(data)

    def _parse(self, data: bytes) -> None:
        if self._in_header and not self.transport.is_closing():
            room = MAX_HEADER_BYTES - self._header_bytes
            head, data = data[:room], data[room:]
            self._header_bytes += len(head)
            if self._header_timer is None and not self._responds:
                self._await_header()
            super().data_received(head)
            if data and self._in_header and not self.transport.is_closing():
                self._refuse(431, f"The header exceeds {MAX_HEADER_BYTES} bytes. Shorten it.")
                return
            if not data:
                return
        if not self.transport.is_closing():
            super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            return
        self._stop_timer()
        self._in_header = False
        self.limit.idle.pop(self, None)
        self.scope["moonpool.connection"] = self  # type: ignore[typeddict-unknown-key]
        if self._resumed is None:
            super().on_headers_complete()
            return
        kept = self._kept = self._resumed
        kept.mark, kept.enders = self.mark, self.answers.enders
        self._resumed = None
        self.answers.begin(kept, self.transport.abort)
        self.scope["moonpool.kept"] = kept  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self.cycle.default_headers = list(kept.opening.default_headers)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app if self.mark is None else self._marked_app(app))

    def on_message_complete(self) -> None:
        self._num_messages += 1
        super().on_message_complete()
        self._in_header = True  # of the next request, if there is one
        self._header_bytes = 0
        if not self._responds:  # the rest of a body that nobody wanted has arrived
            self._stop_timer()
            self.limit.idle[self] = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._drop_half_read()
        if self.transport.get_write_buffer_size():
            self._watch_reader()
        if self._kept is not None:
            self.loop.call_soon(self._end_kept, self._kept)
        if self.transport.is_closing() or self._responds:
            return
        if self._header_bytes:  # the next header, or the rest of this body, is on its way
            self._await_header()
        if self._in_header:
            self.limit.idle[self] = None

    # What the supervisor sees if this process ends

    @property
    def number(self) -> int | None:
        """Of the call that another head would go on with."""
        received = self._kept or self._half_read or self._resumed
        return None if received is None else received.number

    @contextmanager
    def _marked(self) -> Iterator[None]:
        number = None if self.mark is None else self.number
        if self.mark is None or number is None:
            yield
            return
        self.mark.set(number)
        try:
            yield
        finally:
            self.mark.clear()

    def _marked_app(self, app: ASGI3Application) -> ASGI3Application:
        async def run(scope: Any, receive: Any, send: Any) -> None:
            await MarkedWork(app(scope, receive, send), self)  # type: ignore[arg-type]

        return run

    # Another head takes over

    def leave(self, give: Callable[[int], None]) -> float:
        """Gives the connection away if no call is under way on it. Returns how many seconds to wait
        for it: 0 if it has gone, or what it has received is kept."""
        is_kept = self._kept is not None and self._kept.has_socket
        if is_kept or self._half_read or self.transport.is_closing():
            return 0.0
        if self._responds:
            return inf
        if self._header_bytes or not self._in_header:
            return READ_S
        if self.scheme != "https":
            give(self._fd)
        self.transport.abort()
        return 0.0

    def await_next(self) -> None:
        """The connection is one of another head, after a response: it waits like any such."""
        self._stop_timer()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    # Answers that outlive this process

    def keep(
        self,
        scope: Scope,
        body: bytes,
        facts: StreamFacts,
        arrived_s: float,
        tenant: str,
        is_admin: bool,
        digest: bytes = b"",
        num_returns: int = 0,
        num_ended: int = 0,
    ) -> KeptStream | None:
        """Keeps the call that is being answered. None: it cannot be kept."""
        self._drop_kept()
        base = None if self.pipeline else self._sent_bytes()
        may_return = digest and not self.transport.is_closing()
        if self.keeper is not None and (base is not None or may_return):
            opening = Opening(
                request=b"" if base is None else request_bytes(scope, body),
                default_headers=() if base is None else tuple(self.cycle.default_headers),
                base=base or 0,
                arrived_s=arrived_s,
                tenant=tenant,
                is_admin=is_admin,
                facts=facts,
                digest=digest,
                num_returns=num_returns,
                num_ended=num_ended,
            )
            fd = None if base is None else self._fd
            self._kept = KeptStream.begin(self.keeper, fd, opening)
            if self._kept is not None:
                self._kept.mark, self._kept.enders = self.mark, self.answers.enders
                self.answers.begin(self._kept, self.transport.abort)
                if self.mark is not None:
                    self.mark.set(self._kept.number)  # until now it had another number, or none
        self._drop_half_read()  # not earlier: one of both is always kept
        if self._kept is not None and self._header_bytes:
            self._kept.note_read_ahead()
        return self._kept

    async def known(
        self, tenant: str, request_id: str, digest: bytes, displaces: bool
    ) -> Known | None:
        """Returns what is known of a call that comes again."""
        return await self.answers.find(tenant, request_id, digest, displaces)

    def num_ended(self, tenant: str, digest: bytes) -> int:
        """Returns how many heads calls like this one have ended."""
        return self.answers.enders.count(tenant, digest)

    def begin_response(self) -> None:
        """What is sent from now on follows from the kept call, if from anything."""
        self._drop_half_read()

    @property
    def _fd(self) -> int:
        number: int = self.transport.get_extra_info("socket").fileno()
        return number

    def _sent_bytes(self) -> int | None:
        """All bytes that this connection has sent, or has yet to send, as `accepted_bytes` counts
        them; None: another head cannot go on with it."""
        if self.transport.is_closing() or self.scheme == "https":
            return None
        try:
            return accepted_bytes(self._fd) + self.transport.get_write_buffer_size()
        except OSError:
            return None

    def resume(self, received: KeptStream | HalfRead, num_sent: int) -> None:
        """Goes on with a call that another head has received, or has begun to receive, and whose
        client was sent so many bytes. Call it before the connection is made."""
        if isinstance(received, KeptStream):
            self._resumed = received
        else:
            self._half_read = received
            self.limit.num_half_read += 1
        self._received_before, self._num_sent = received.received, num_sent

    def hold(self, socket_fd: int) -> None:
        """Keeps a connection that was accepted just now. Call it before the connection is made."""
        with suppress(OSError):
            self._begin_half_read(socket_fd, accepted_bytes(socket_fd))

    def _keep_half_read(self, data: bytes = b"") -> None:
        """Keeps a request that began with these bytes and is not complete yet."""
        base = self._sent_bytes()
        if base is not None:
            self._begin_half_read(self._fd, base)
        if self._half_read is not None:
            self._half_read.note(data)

    def _begin_half_read(self, socket_fd: int, base: int) -> None:
        if self.keeper is None or self.limit.num_half_read >= self.limit.most_half_read:
            return
        self._half_read = HalfRead.begin(self.keeper, socket_fd, base)
        self.limit.num_half_read += self._half_read is not None

    def _drop_half_read(self) -> None:
        if self._half_read is not None:
            self._half_read.drop()
            self._half_read = None
            self.limit.num_half_read -= 1

    def _end_kept(self, kept: KeptStream) -> None:
        """Drops an answer once the kernel has all of it."""
        if kept is not self._kept or self.transport.is_closing():
            return  # the end of the connection drops it
        if self.transport.get_write_buffer_size():
            self.loop.call_later(FLUSH_S, self._end_kept, kept)
            return
        self._drop_kept()
        if kept.has_lost_bytes:
            self.transport.close()

    def _drop_kept(self) -> None:
        if self._kept is not None:
            self.answers.drop(self._kept)
            self._kept = None

    # Clients that do not read

    def _watch_reader(self) -> None:
        if self._unread_timer is None:
            self._accepted_bytes = self._accepted()
            self._unread_timer = self.loop.call_later(UNREAD_S, self._on_unread)

    def _on_unread(self) -> None:
        self._unread_timer = None
        if not self.transport.get_write_buffer_size():
            return
        if self._accepted() - self._accepted_bytes < MIN_READ_BYTES:
            log.warning("a client read less than %d bytes in %g s", MIN_READ_BYTES, UNREAD_S)
            self.transport.abort()
        else:
            self._watch_reader()

    def _stop_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _accepted(self) -> int:
        """The bytes that the kernel has accepted; it accepts more when the client reads."""
        try:
            return accepted_bytes(self._fd)
        except OSError:
            return 0

    @property
    def _responds(self) -> bool:
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def _await_header(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(HEADER_S, self._on_late_header)

    def _on_late_header(self) -> None:
        self._header_timer = None
        if self._in_header and self._header_bytes:
            self._refuse(408, f"The header did not arrive within {HEADER_S:g} s. Send it again.")
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: int, text: str) -> None:
        if self._responds:
            self.transport.abort()
            return
        words = {408: "Request Timeout", 431: "Request Header Fields Too Large"}
        reason = words.get(status, "Service Unavailable")
        body = _BODY % text
        self.transport.write(
            f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
        )
        self.transport.close()


def limited_protocol(
    largest: int | None = None,
    keeper: StreamKeeper | None = None,
    answers: KeptAnswers | None = None,
    mark: WorkMark | None = None,
) -> type[LimitedProtocol]:
    """Returns a protocol class whose connections share one limit."""
    limited_logger("uvicorn.error")
    limit = ConnectionLimit(largest or _largest(keeper is not None))
    shared = {
        "limit": limit,
        "keeper": keeper,
        "answers": answers or KeptAnswers(),
        "mark": mark,
    }
    return type("LimitedProtocol", (LimitedProtocol,), shared)


def _largest(keeps: bool) -> int:
    """Returns how many connections the descriptors suffice for, after raising their limit.

    `keeps`: answers have logs, which take descriptors too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _RESERVED_FILES
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if keeps:
        soft -= soft // MAX_KEPT_SHARE
    return max(soft - _RESERVED_FILES, min(soft // 2, 64))
