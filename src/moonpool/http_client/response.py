"""A response whose body is read as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Protocol

MOST_WAITING_BYTES = 1 << 20
"""What a slow reader lets wait here. The rest waits in the kernel, and then at the server."""


class TooLargeError(Exception):
    """A body is larger than its reader takes."""


class Pausable(Protocol):
    """The transport of a connection, as far as a slow reader uses it."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class HttpResponse:
    """`status` and `headers` (by names in lower case) are there when it is given out."""

    def __init__(self, flow: Pausable) -> None:
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
        """Waits for status and headers. `ended`: of the exchange. Raises ConnectionFailedError."""
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
        """Returns the whole body. Raises TooLargeError and ConnectionFailedError."""
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
        """Waits for news. False: the response has ended. Raises ConnectionFailedError."""
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
            ended.exception()  # a reader that has left does not ask for it
        self._notify()
