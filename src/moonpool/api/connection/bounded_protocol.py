"""Reads the HTTP of one connection within limits, which uvicorn's protocol lacks.

Each byte counts against a limit. A header has a limit on its size, on its number of lines, and on
its time to arrive. A body that a handler reads has the limit of its route. Other bytes after a
header (the lines between chunks, trailers) count like those of a header, and a body that no handler
reads has a small limit and a time. A request that exceeds a limit is answered by 400, 408, 413, 431
or 503 if possible, and its connection ends.
"""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from moonpool.api.connection.connection_limit import MAX_LINGERING, ConnectionLimit
from moonpool.api.connection.kept_stream import accepted_bytes
from moonpool.api.sharing.shared_buffer import party_of
from moonpool.log_limit import limited_logger

MAX_HEADER_BYTES = 64 << 10
MAX_HEADER_LINES = 256
"""A line takes far more memory than its bytes."""
HEADER_S = 20.0
"""Seconds for the header of a request to arrive, from its first byte or the connection's start. The
same limit applies to the rest of a body that nobody reads, from the end of the response."""
CHUNK_LINE_BYTES = 32
"""Usual bytes of the lines around one chunk. Only bytes above this number count."""
LEAST_CHUNK_LINE_BYTES = len(b"1\r\n\r\n")
MAX_IGNORED_BYTES = 1 << 20
"""Most bytes of a body that no handler reads."""
LINGER_S = 1.0
MAX_LINGER_BYTES = 4 << 20
"""After its last response, a connection still reads for this time and this many bytes. If it closed
with unread bytes, the system would reset it, and the client might lose the response."""
UNREAD_S = 60.0
MIN_READ_BYTES = 16 << 10
"""A client whose response waits reads this many bytes every UNREAD_S, or loses its connection."""
MAX_PIPELINED = 64
"""Most requests that may wait behind the request that is being answered."""
_BODY = '{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}'
_HEADER_END = b"\r\n\r\n"
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")

log = limited_logger("moonpool.http")


class _RefusedError(Exception):
    """The request that is being parsed is refused; raised within the parser's callbacks."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.refusal = status, text


class BoundedProtocol(HttpToolsProtocol):
    """Created by uvicorn for each connection; a subclass sets `limit`."""

    limit: ConnectionLimit

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.party = ""
        """The party that the connection belongs to in this process: the address, or the tenant of
        the last request.
        """
        self._address = ""  # name of the address as a party
        self._tenant = ""  # tenant of the last request, or "" if the server has no tenants
        self._in_header = True
        self._has_begun = False  # whether the first line of the present request has arrived
        self._loose_bytes = 0  # bytes of the present request outside its body
        self._ignored_bytes = 0  # bytes of the present body that came while no handler reads it
        self._is_reading = False
        self._has_place = False  # whether the connection has a place among the calls of its tenant
        self._upgrades = False
        self._is_entered = False
        # whether the connection was refused because all places are taken
        self._is_turned_away = False
        self._running: RequestResponseCycle | None = None
        # (status, text) of the last response; status 0 means no response
        self._refusal: tuple[int, str] | None = None
        self._num_skipped_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._accepted_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.party = self._address = party_of(self.client[0] if self.client else "")
        self._is_entered = self.limit.enter(self._address)
        if self._is_entered:
            self.limit.wait(self, self._address)
            self._await_header()
            return
        self._is_turned_away = True
        self.limit.num_lingering += 1
        text = "All connections of this server are in use. Send the request again later."
        self._refuse(503, text)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread()
        self.limit.half_headers.drop(self)
        self.limit.unread.drop(self)
        if self._is_entered:
            self.limit.leave(self, self._address)
        self.limit.num_lingering -= self._is_turned_away
        super().connection_lost(exc)
        # uvicorn reports only the newest request, which may wait behind the one that is answered.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()

    def belong_to(self, tenant: str) -> bool:
        """Does what `KeepingConnection.belong_to` does."""
        self._tenant = tenant
        self.party = tenant or self._address
        if tenant:
            self._has_place = self.limit.calls.take(tenant)
            return self._has_place
        return True

    def end_call(self) -> None:
        if self._has_place:
            self._has_place = False
            self.limit.calls.release(self._tenant)

    def give_back(self) -> None:
        """Ends the connection at once, because another connection needs its place or its memory."""
        self.transport.abort()

    # Parsing

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._parse(data)
        is_half = self._in_header and self._loose_bytes and not self._is_ending
        if is_half and not self.limit.half_headers.grow(self, self._address, len(data)):
            self._refuse(503, "Too many requests are unfinished. Send the request again later.")

    def _parse(self, data: bytes) -> None:
        while data and not self._is_ending:
            room = MAX_HEADER_BYTES - self._loose_bytes
            if self._in_header:  # bytes after the header are counted separately
                end = data.find(_HEADER_END, 0, room) + len(_HEADER_END)
                room = end if end >= len(_HEADER_END) else room
            piece, data = data[:room], data[room:]
            self._loose_bytes += len(piece)
            if self._in_header and self._header_timer is None and not self._responds:
                self._await_header()
            self._feed(piece)
            if self._loose_bytes >= MAX_HEADER_BYTES and not self._is_ending:
                what = (
                    "The header exceeds" if self._in_header else "Trailers and chunk lines exceed"
                )
                self._refuse(431, f"{what} {MAX_HEADER_BYTES} bytes. Shorten them.")
        self._skip(data)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                self._read_as_if_without_upgrade()
                data = data[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                cause = error.__context__
                if isinstance(cause, _RefusedError):
                    self._refuse(*cause.refusal)
                    return
                log.warning("a client sent no valid HTTP: %s", cause or error)
                self._refuse(400, "This is no valid HTTP request.")
                return

    def _read_as_if_without_upgrade(self) -> None:
        """A server may ignore a client's wish for another protocol. The parser would then end the
        request at its header, and take its body for another request."""
        lines = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"\r\n".join(lines) + b"\r\n\r\n")

    def _skip(self, data: bytes) -> None:
        """Reads and drops bytes after the last request."""
        self._num_skipped_bytes += len(data)
        if self._num_skipped_bytes > MAX_LINGER_BYTES:
            self.transport.abort()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        self._ignored_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_header:  # a trailer must not change the meaning of the header
            return
        if len(self.headers) >= MAX_HEADER_LINES:
            text = f"The header has more than {MAX_HEADER_LINES} lines. Shorten it."
            raise _RefusedError(431, text)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            return
        self._check_host()
        self._upgrades = self.parser.should_upgrade()
        if self._upgrades:
            if self.parser.get_method() == b"CONNECT":
                raise _RefusedError(400, "This server is no proxy.")
            return
        self._stop_timer()
        self._in_header = False
        self._loose_bytes = 0
        self.limit.half_headers.drop(self)
        self.limit.work(self, self._address)
        self._begin_request()

    def _begin_request(self) -> None:
        super().on_headers_complete()

    def _check_host(self) -> None:
        """Requires one valid Host line, as RFC 9112 does."""
        hosts = [value for name, value in self.headers if name == b"host"]
        is_missing = not hosts and self.parser.get_http_version() == "1.1"
        if is_missing or len(hosts) > 1 or not all(map(_HOST.fullmatch, hosts)):
            raise _RefusedError(400, "A request needs one valid Host header.")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._loose_bytes = max(self._loose_bytes - len(body), 0)
        self._ignore(len(body))
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        self._loose_bytes = max(self._loose_bytes - CHUNK_LINE_BYTES, 0)
        self._ignore(LEAST_CHUNK_LINE_BYTES)

    def _ignore(self, num_bytes: int) -> None:
        """Limits the bytes of a body that no handler reads, or reads yet."""
        if self._is_reading:
            return
        self._ignored_bytes += num_bytes
        if self._ignored_bytes > MAX_IGNORED_BYTES:
            raise _RefusedError(413, "This endpoint reads no such body.")

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        super().on_message_complete()
        self._in_header = True  # expects the header of the next request
        self._has_begun = False
        self._loose_bytes = 0
        if not self._responds:  # the remaining bytes of an unread body have arrived
            self.await_next()

    def begin_body(self) -> bool:
        """Notes that a handler reads the body from now on, and limits it itself. Returns whether
        all of it has arrived."""
        self._is_reading = True
        return self._running is not None and not self._running.more_body

    def end_body(self) -> None:
        self._is_reading = False
        self._ignored_bytes = 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._watch_reader()
        if self.transport.is_closing() or self._responds:
            return
        if self._refusal is not None:
            self._send_refusal()
            return
        if self._is_partial:  # the next header, or the remaining bytes of this body, will arrive
            self._await_header()
        self.limit.wait(self, self._address)

    # Ends

    @property
    def _responds(self) -> bool:
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    @property
    def _is_partial(self) -> bool:
        """Whether a part of a request has arrived, but not all of it."""
        return self._has_begun or bool(self._loose_bytes) or not self._in_header

    @property
    def _is_ending(self) -> bool:
        return self._refusal is not None or self.transport.is_closing()

    def await_next(self) -> None:
        """Waits for the next request after a response."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _refuse(self, status: int, text: str) -> None:
        """Sends a last response, after the responses to earlier requests; status 0 means no
        response. Bytes that arrive from now on are skipped."""
        if self._refusal is not None:
            return
        self._refusal = status, text
        self._give_up_request()
        if not self._responds:
            self._send_refusal()

    def _give_up_request(self) -> None:
        """Ends the wait for the missing bytes of a request that has no response yet."""
        cycle = self.cycle
        if cycle is None or not cycle.more_body or cycle.response_started:
            return
        if self.pipeline:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._running  # type: ignore[assignment]
        else:
            self.cycle = None  # type: ignore[assignment]
            cycle.disconnected = True
            cycle.message_event.set()

    def _send_refusal(self) -> None:
        assert self._refusal is not None
        status, text = self._refusal
        is_answered = not self._in_header and self.cycle is not None
        if status and not is_answered:
            body = _BODY % text
            self.transport.write(
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                "content-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()
            )
        self._linger()

    def _linger(self) -> None:
        """Closes the connection when its client has read the last response, or a moment later."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        is_crowded = self._is_turned_away and self.limit.num_lingering > MAX_LINGERING
        if is_crowded or not self.transport.can_write_eof():
            self.transport.close()
            return
        self.transport.write_eof()
        if self._is_entered:
            self.limit.wait(self, self._address)
        self._header_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _await_header(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(HEADER_S, self._on_late)

    def _on_late(self) -> None:
        self._header_timer = None
        if self._in_header and self._is_partial:
            self._refuse(408, f"The header did not arrive within {HEADER_S:g} s. Send it again.")
        elif self._is_partial:
            self._refuse(0, "")
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    # Methods about clients that do not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()
        if not self.limit.unread.grow(self, self.party, self.transport.get_write_buffer_size()):
            log.warning("a client has more responses unread than others leave room for")
            self.transport.abort()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.limit.unread.drop(self)
        self._stop_unread()

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
        """Returns the bytes that the kernel has accepted; it accepts more when the client reads."""
        try:
            return accepted_bytes(self._fd)
        except OSError:
            return 0

    @property
    def _fd(self) -> int:
        number: int = self.transport.get_extra_info("socket").fileno()
        return number
