"""Accepts connections, and hands each one over in the callback that accepts it.

An event loop's own server tells a protocol about its connection in a later callback. A head that
dies before that would lose the connection and the call that comes on it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

log = logging.getLogger("moonpool.http")

MOST_AT_ONCE = 16
RETRY_S = 1.0
"""Pause after an error that would come again at once, such as a lack of file descriptors."""


class Acceptor:
    """Accepts on a listening socket from its creation on, until `close`.

    `begin` gets each connection at once, and returns the protocol that serves it.
    """

    def __init__(
        self,
        listener: socket.socket,
        begin: Callable[[socket.socket], asyncio.Protocol],
        most_at_once: int = MOST_AT_ONCE,
    ) -> None:
        """Must be called on the running loop. `most_at_once`: connections accepted before other
        work gets its turn; 1 if processes share the socket, so that idle processes get more of the
        connections."""
        self._most_at_once = most_at_once
        listener.setblocking(False)
        self._listener = listener
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._watch()

    def close(self) -> None:
        """Accepts no more connections. Waiting connections stay in the socket's queue."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._connecting)

    def _watch(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(self._most_at_once):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("cannot accept a connection: %s; next try in %g s", error, RETRY_S)
                self._loop.remove_reader(self._listener)
                self._retry = self._loop.call_later(RETRY_S, self._watch)
                return
            sock.setblocking(False)
            protocol = self._begin(sock)
            task = self._loop.create_task(self._connect(protocol, sock))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, protocol: asyncio.Protocol, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, sock)
        except OSError as error:  # the client has left
            protocol.connection_lost(error)
            sock.close()
