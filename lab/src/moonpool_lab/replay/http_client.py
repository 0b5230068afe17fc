"""The HTTP/1.1 client of the load generator, which timestamps each piece of an answer.

Other parts of the package use httpx. The load generator shares its machine with the server, so its
own CPU time distorts what it measures: with 64 streams it takes 5.6 us per token received, events
parsed, where httpx takes 33 to 42 us. httptools parses the answers. A connection is used again
after a whole answer, and closed after anything else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools

from moonpool.api.connection.tls import trusting_context


class ConnectionFailedError(Exception):
    """The server cannot be reached, or closed the connection; the text says which."""


class Receiver(Protocol):
    """Receives an answer piece by piece. Times are `monotonic`'s: a loop's may be whole ms."""

    def on_start(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def on_body(self, data: bytes, now_s: float) -> None: ...


class _Connection(asyncio.Protocol):
    """One TCP connection, with one exchange at a time."""

    def __init__(self) -> None:
        self.reusable = False
        self.was_used = False  # before the exchange under way
        self.is_answered = False  # at least in part
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._now_s = 0.0
        self._until_closed = False

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Sends a request and waits for the end of its answer. Raises ConnectionFailedError.

        A connection whose exchange is cancelled cannot be used again.
        """
        assert self._transport is not None
        self.reusable = self.is_answered = False
        self._receiver = receiver
        self._parser = httptools.HttpResponseParser(self)
        self._headers = {}
        self._until_closed = False
        self._done = self._loop.create_future()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        self._now_s = monotonic()
        self.is_answered = True
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
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        headers = self._headers
        self._until_closed = (
            b"content-length" not in headers and b"transfer-encoding" not in headers
        )
        assert self._receiver is not None
        self._receiver.on_start(self._parser.get_status_code(), headers)

    def on_body(self, data: bytes) -> None:
        assert self._receiver is not None
        self._receiver.on_body(data, self._now_s)

    def on_message_complete(self) -> None:
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
        self, url: str, api_key: str = "", connect_s: float = 10.0, ca_file: str = ""
    ) -> None:
        """`ca_file` (PEM) names whom to trust over https in place of the system's authorities.

        Raises ValueError if `url` is no URL, or `ca_file` holds no certificate.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https address of a server")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = trusting_context(ca_file) if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/").removesuffix("/v1").encode()
        bearer = b"Authorization: Bearer %b\r\n" % api_key.encode() if api_key else b""
        self._common = b"Host: %b\r\nAccept: */*\r\n%b" % (parts.netloc.encode(), bearer)
        self._connect_s = connect_s
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> tuple[int, bytes]:
        """Returns status and body of a GET. Raises ConnectionFailedError."""
        whole = BodyReceiver()
        head = b"GET %b%b HTTP/1.1\r\n%b\r\n" % (self._path, path.encode(), self._common)
        await self._exchange(head, whole)
        return whole.status, b"".join(whole.parts)

    async def post(
        self, path: str, body: bytes, receiver: Receiver, extra_headers: bytes = b""
    ) -> None:
        """Sends a POST; `receiver` gets the answer. Raises ConnectionFailedError."""
        head = b"POST %b%b HTTP/1.1\r\n%b%bContent-Type: application/json\r\n" % (
            self._path,
            path.encode(),
            self._common,
            extra_headers,
        )
        request = b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
        await self._exchange(request, receiver)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, request: bytes, receiver: Receiver) -> None:
        """A connection that the server closed while it was idle says nothing about the server: the
        request goes out once more, on a new one."""
        connection = await self._connection()
        try:
            await connection.exchange(request, receiver)
        except ConnectionFailedError:
            if not connection.was_used or connection.is_answered:
                raise
            self.close()
            connection = await self._connection()
            await connection.exchange(request, receiver)
        finally:
            if connection.reusable:
                connection.was_used = True
                self._idle.append(connection)
            else:
                connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        make: Callable[[], _Connection] = _Connection
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(
                    make, self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise ConnectionFailedError(f"no connection within {self._connect_s:g} s") from None
        except OSError as error:
            raise ConnectionFailedError(f"cannot connect: {error}") from None
        return connection


class BodyReceiver:
    """A receiver that keeps the whole body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.parts: list[bytes] = []

    def on_start(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes, now_s: float) -> None:
        self.parts.append(data)
