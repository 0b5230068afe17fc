"""The HTTP/1.1 client of all that runs in an event loop: calls of servers, and the load generator.

A token costs little: with 64 streams 5.6 us per token received, events parsed, where httpx takes 33
to 42 us. The head's machine has many streams, and the load generator shares its machine with the
server that it measures. httptools parses the answers. A connection is used again after a complete
answer, and closed after anything else. No proxy of the environment is used, and no redirect is
followed.
"""

from __future__ import annotations

import asyncio
import math
import re
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any, Protocol, cast
from urllib.parse import unquote, urlsplit

import httptools

from moonpool.http_client.trust import trusting_context

MOST_WAITING_BYTES = 1 << 20
"""Most bytes that wait here for a slow reader. The rest waits in the kernel, and then at the
server."""


class TooLargeError(Exception):
    """A body is larger than its reader takes."""


class HttpResponse:
    """`status` and `headers` (with names in lower case) are set when the response is returned."""

    def __init__(self, flow: asyncio.Transport) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._flow = flow
        self._parts: list[bytes] = []
        self._num_waiting_bytes = 0
        self._is_paused = False
        self._ended: asyncio.Future[None] | None = None
        self._wake: asyncio.Future[None] | None = None

    def on_start(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers
        self._notify()

    def on_body(self, data: bytes, now_s: float) -> None:
        self._parts.append(data)
        self._num_waiting_bytes += len(data)
        if self._num_waiting_bytes > MOST_WAITING_BYTES and not self._is_paused:
            self._is_paused = True
            with suppress(RuntimeError):  # the connection has just ended
                self._flow.pause_reading()
        self._notify()

    async def begin(self, ended: asyncio.Future[None]) -> None:
        """Waits for status and headers. `ended`: done when the exchange has ended. Raises
        ConnectionFailedError."""
        self._ended = ended
        ended.add_done_callback(self._on_end)
        while not self.status and await self._next():
            pass

    async def parts(self) -> AsyncGenerator[bytes]:
        """Yields the body as it comes. Raises ConnectionFailedError if it breaks off."""
        while True:
            if not self._parts and not await self._next():
                return
            data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._num_waiting_bytes = 0
            self.resume()
            if data:
                yield data

    async def read(self, most_bytes: int) -> bytes:
        """Returns the whole body of the response. Raises TooLargeError and
        ConnectionFailedError."""
        body = bytearray()
        async for part in self.parts():
            body += part
            if len(body) > most_bytes:
                raise TooLargeError(f"the server sent a response of more than {most_bytes} bytes")
        return bytes(body)

    def resume(self) -> None:
        """Lets the connection read on."""
        if self._is_paused:
            self._is_paused = False
            with suppress(RuntimeError):
                self._flow.resume_reading()

    async def _next(self) -> bool:
        """Waits for more of the response. Returns False if the response has ended. Raises
        ConnectionFailedError."""
        assert self._ended is not None
        if self._ended.done():
            self._ended.result()
            return False
        self._wake = asyncio.get_running_loop().create_future()
        await self._wake
        return True

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _on_end(self, ended: asyncio.Future[None]) -> None:
        if not ended.cancelled():
            ended.exception()  # a reader that has left does not ask for the exception
        self._notify()


_TARGET = re.compile(r"[!-~]+")
_HEADER = re.compile(r"[!-9;-~]+: [\t -~\x80-\xff]*")

MAX_HEAD_BYTES = 1 << 20
MAX_BODY_BYTES = 256 << 20
"""The longest body that is read in full if the caller sets no limit."""


class ConnectionFailedError(Exception):
    """The server cannot be reached, or closed the connection; the text says which."""


class UnreachableError(ConnectionFailedError):
    """No server listens at the address, or it does not prove who it is."""


class Receiver(Protocol):
    """Receives an answer piece by piece. Times are `monotonic`'s, because a loop's may be whole
    milliseconds."""

    def on_start(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def on_body(self, data: bytes, now_s: float) -> None: ...


class _Connection(asyncio.Protocol):
    """One TCP connection, which has one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = False
        self.was_used = False  # whether the connection was used before the present exchange
        self.is_answered = False  # whether at least a part of the answer has come
        self.idle_since_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._num_head_bytes = 0  # bytes of an answer's incomplete head
        self._now_s = 0.0
        self._until_closed = False

    @property
    def flow(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    def begin(self, request: bytes, receiver: Receiver) -> asyncio.Future[None]:
        """Sends a request. Returns a future that is done at the end of the answer, or has a
        ConnectionFailedError. A connection whose exchange is cancelled cannot be used again.
        """
        self.reusable = self.is_answered = False
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self._headers = {}
        self._num_head_bytes = 0
        self._until_closed = False
        done = self._done = self._loop.create_future()
        self.flow.write(request)
        return done

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not a subclass
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.reusable:  # no request waits for an answer
            self.close()
            return
        self._now_s = monotonic()
        self.is_answered = True
        if self._num_head_bytes >= 0:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._fail(f"the head of the server's answer has more than {MAX_HEAD_BYTES} bytes")
                self.close()
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._until_closed and error is None:
            self._finish()
        else:
            self._fail("the server closed the connection before the end of its answer")

    # Callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._num_head_bytes >= 0:  # otherwise, the header is a trailer, which follows the body
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status, headers = self._parser.get_status_code(), self._headers
        if status < 200:  # this is an interim response, which the final one follows
            self._headers = {}
            return
        self._num_head_bytes = -1
        self._until_closed = (
            b"content-length" not in headers and b"transfer-encoding" not in headers
        )
        assert self._receiver is not None
        self._receiver.on_start(status, headers)

    def on_body(self, data: bytes) -> None:
        assert self._receiver is not None
        self._receiver.on_body(data, self._now_s)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self.reusable = self._parser.should_keep_alive()
        self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, text: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionFailedError(text))


class HttpClient:
    """Requests to the server at `url` (http or https, with or without a path)."""

    def __init__(
        self,
        url: str,
        api_key: str = "",
        connect_s: float = 10.0,
        ca_file: str = "",
        headers: Mapping[str, str] | None = None,
        idle_s: float = math.inf,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`ca_file` (PEM) names the authorities to trust over https in place of the system's; `tls`
        is a context in place of both. `headers` are sent with every request. A connection that was
        idle for `idle_s` is not used again. Without `idle_s`, a request on one that the server has
        closed meanwhile goes out once more.

        Raises ValueError if `url` is no URL or a header is invalid, and TlsError (a ValueError) if
        `ca_file` or the certificate of this client cannot be used.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https address of a server")
        place = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{place}{parts.path.rstrip('/')}"
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or trusting_context(ca_file)) if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        common = {"Host": place, "Accept": "*/*"}
        if api_key:
            common["Authorization"] = f"Bearer {api_key}"
        elif parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            common["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"
        self._common = header_lines(common | dict(headers or {}))
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._idle: deque[_Connection] = deque()

    async def get(self, path: str, headers: bytes = b"") -> tuple[int, bytes]:
        """Returns status and body of a GET, of `MAX_BODY_BYTES` at most. Raises
        ConnectionFailedError."""
        async with self.stream("GET", path, headers=headers) as response:
            try:
                return response.status, await response.read(MAX_BODY_BYTES)
            except TooLargeError as error:
                raise ConnectionFailedError(str(error)) from None

    async def post(self, path: str, body: bytes, receiver: Receiver, headers: bytes = b"") -> None:
        """Sends a POST of JSON; `receiver` gets the answer. `headers` are given as in
        `header_lines`. Raises ConnectionFailedError."""
        request = self._request("POST", path, body, headers)
        connection = await self._connection()
        try:
            await connection.begin(request, receiver)
        except ConnectionFailedError:
            if not self._resends(connection):
                raise
            connection = await self._new_connection()
            await connection.begin(request, receiver)
        finally:
            self._leave(connection)

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, body: bytes = b"", headers: bytes = b""
    ) -> AsyncIterator[HttpResponse]:
        """Sends a request. Within the block, the response can be read as it arrives. The end of the
        block closes the connection if the response is not complete. Raises
        ConnectionFailedError."""
        request = self._request(method, path, body, headers)
        connection = await self._connection()
        try:
            response = HttpResponse(connection.flow)
            try:
                await response.begin(connection.begin(request, response))
            except ConnectionFailedError:
                if not self._resends(connection):
                    raise
                connection = await self._new_connection()
                response = HttpResponse(connection.flow)
                await response.begin(connection.begin(request, response))
            try:
                yield response
            finally:
                response.resume()
        finally:
            self._leave(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _request(self, method: str, path: str, body: bytes, headers: bytes) -> bytes:
        target = self._path + path
        if _TARGET.fullmatch(target) is None:
            raise ValueError(f"{target!r} is no path of a URL")
        begin = b"%b %b HTTP/1.1\r\n%b%b" % (
            method.encode(),
            target.encode(),
            self._common,
            headers,
        )
        if method == "GET":
            return begin + b"\r\n"
        kind = b"Content-Type: application/json\r\n"
        return b"%b%bContent-Length: %d\r\n\r\n%b" % (begin, kind, len(body), body)

    def _resends(self, connection: _Connection) -> bool:
        """A connection that the server closed while it was idle says nothing about the server."""
        return connection.was_used and not connection.is_answered and self._idle_s == math.inf

    def _leave(self, connection: _Connection) -> None:
        if connection.reusable:
            connection.was_used = True
            connection.idle_since_s = monotonic()
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> _Connection:
        least_s = monotonic() - self._idle_s
        while self._idle and self._idle[0].idle_since_s < least_s:
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return await self._new_connection()

    async def _new_connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        make: Callable[[], _Connection] = _Connection
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    make, self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectionFailedError(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:
            raise UnreachableError(f"cannot connect: {error}") from None
        return connection


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Returns headers as they are sent. Raises ValueError."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    for line in lines:
        if _HEADER.fullmatch(line) is None:
            raise ValueError(f"{line.partition(':')[0]!r}: this is no header that can be sent")
    return "".join(f"{line}\r\n" for line in lines).encode("latin-1")
