"""Messages of a ZeroMQ socket, read while the loop turns: pyzmq's own way with asyncio wakes a task
for each, which costs more than a token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

AT_A_TIME = 256
"""Messages read before other work of the loop has its turn."""


class EventInbox:
    """Gives each message to `take` until that returns False, and then again after `closed`. `end`
    it before the socket is closed."""

    def __init__(self, socket: Any, take: Callable[[list[bytes]], bool]) -> None:
        import zmq

        self._zmq: Any = zmq
        self._socket = socket
        self._take = take
        self._left = asyncio.Event()  # `take` wants no more, or has failed
        self._is_closed = self._has_ended = False
        self._failure: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._fd: int = socket.FD
        self._loop.add_reader(self._fd, self._read)

    def end(self) -> None:
        self._has_ended = self._is_closed = True
        self._loop.remove_reader(self._fd)

    async def left_within(self, seconds: float) -> None:
        """Returns when `take` wants no more, or after this time. Raises what reading raised."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._left.wait()
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def closed(self) -> Iterator[None]:
        """A context in which messages wait."""
        self._is_closed = True
        yield
        self._is_closed = False
        self._left.clear()
        self._read()  # the socket does not tell again of what came meanwhile

    def _read(self) -> None:
        if self._has_ended:
            return
        try:
            for _ in range(AT_A_TIME):
                if self._is_closed:
                    self._socket.get(self._zmq.EVENTS)  # else it tells of them again and again
                    return
                if not self._take(self._socket.recv_multipart(self._zmq.DONTWAIT)):
                    self._is_closed = True
                    self._left.set()
                    return
        except self._zmq.Again:
            return
        except Exception as error:
            self._failure, self._is_closed = error, True
            self._left.set()
            return
        self._loop.call_soon(self._read)
