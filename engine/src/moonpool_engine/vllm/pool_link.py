"""A process's connection to the pool of its host. The link never makes its caller wait for the
pool.

One thread keeps the connection: it connects, greets, reads, and begins again when the pool has
gone. Bytes that the socket accepts are sent at once. If the socket accepts no more bytes, because
the pool reads slowly, another thread sends the rest. A pool counts as gone if it then accepts
nothing for a second, or if too many bytes wait for it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from moonpool.host_pool.messages import (
    FRAMES,
    FROM_POOL,
    AttachRank,
    ClientMessage,
    JoinPool,
    PoolJoinAccepted,
    PoolMessage,
    PoolRefused,
    RankAttached,
    framed,
    is_own_user,
)
from moonpool.retry_delays import RetryDelays
from moonpool.types import MALFORMED
from moonpool_engine.vllm.thread_cores import leave_bound_core

log = logging.getLogger("moonpool.vllm_connector")

CONNECT_S = 1.0
STALL_S = 1.0
MAX_BACKLOG_BYTES = 8 << 20
RETRIES = RetryDelays((0.1, 0.2, 0.5, 1.0, 2.0), steady_s=2.0)


class SpaceMemory:
    """The memory of one rank's space, mapped."""

    def __init__(self, path: str, num_bytes: int, num_blocks: int) -> None:
        """Raises OSError or ValueError if the file is not there, or too small."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._mapping = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        self.address: int = self._bytes.ctypes.data
        self.num_blocks = num_blocks


class PoolLink:
    """`on_message` gets the pool's messages in this link's thread; `on_end` is called there when
    the connection has ended. `greeting` is an `AttachRank` or a `JoinPool`."""

    def __init__(
        self,
        path: Path,
        greeting: AttachRank | JoinPool,
        on_message: Callable[[PoolMessage], None],
        on_end: Callable[[], None],
    ) -> None:
        self.path = path
        self._greeting = greeting
        self._on_message = on_message
        self._on_end = on_end
        self._stopping = threading.Event()
        self._said = ""
        self._sending = threading.Condition()  # guards the fields below
        self._sock: socket.socket | None = None
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0
        self._backlog_thread: threading.Thread | None = None
        self.memory: SpaceMemory | None = None
        """The memory of an attached link, while it is connected."""
        self._thread = threading.Thread(target=self._run, name="moonpool-pool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._sock is not None

    def send(self, message: ClientMessage, memory: SpaceMemory | None = None) -> bool:
        """Returns False if there is no pool now, or another pool than that of `memory`. Never
        waits. May be called from any thread."""
        body = memoryview(framed(message))
        with self._sending:
            sock = self._sock
            if sock is None or memory not in (None, self.memory):
                return False
            sent = 0 if self._backlog else self._send_some(sock, body)
            if sent is None:
                return False
            if sent < len(body):
                return self._keep(sock, body[sent:])
        return True

    def _send_some(self, sock: socket.socket, body: memoryview) -> int | None:
        """Returns how many bytes the socket accepted at once, or None if the pool has gone."""
        try:
            return sock.send(body, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._cut(sock)
            return None

    def _keep(self, sock: socket.socket, rest: memoryview) -> bool:
        """Leaves the unsent part of a message to the other thread. The caller holds `_sending`."""
        if self._backlog_bytes + len(rest) > MAX_BACKLOG_BYTES:
            self._cut(sock)
            return False
        self._backlog.append(rest)
        self._backlog_bytes += len(rest)
        if self._backlog_thread is None:
            self._backlog_thread = threading.Thread(
                target=self._send_backlog, name="moonpool-pool-send", daemon=True
            )
            self._backlog_thread.start()
        self._sending.notify_all()
        return True

    def _send_backlog(self) -> None:
        while not self._stopping.is_set():
            with self._sending:
                self._sending.wait_for(lambda: bool(self._backlog) or self._stopping.is_set())
                sock = self._sock
            if sock is not None and not self._stopping.is_set():
                self._send_more(sock)

    def _send_more(self, sock: socket.socket) -> None:
        """Sends the bytes that the socket accepts within `STALL_S`; if it accepts none, closes the
        connection."""
        with contextlib.suppress(OSError, ValueError):  # the socket was closed
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            takes = bool(poll.poll(STALL_S * 1000))
            with self._sending:
                if sock is not self._sock:
                    return
                if not takes:
                    self._cut(sock)
                    self._forget_backlog()
                while takes and self._backlog:
                    sent = self._send_some(sock, self._backlog[0])
                    if sent is None:
                        self._forget_backlog()
                        return
                    self._backlog_bytes -= sent
                    takes = sent == len(self._backlog[0])
                    self._backlog[0] = self._backlog[0][sent:]
                    if takes:
                        self._backlog.popleft()

    def _forget_backlog(self) -> None:
        """The caller holds `_sending`."""
        self._backlog.clear()
        self._backlog_bytes = 0

    def close(self) -> None:
        self._stopping.set()
        with self._sending:
            if self._sock is not None:
                self._cut(self._sock)
            self._sending.notify_all()

    def _cut(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        leave_bound_core()
        num_failures = 0
        while not self._stopping.is_set():
            try:
                began_s = time.monotonic()
                self._serve()
                problem = "the pool ended the connection"
            except _RefusedError as error:
                problem = str(error)
            except (OSError, ValueError, *MALFORMED) as error:
                problem = str(getattr(error, "strerror", None) or error)
            was_connected = self._end_connection()
            if was_connected:
                self._on_end()
            if self._stopping.is_set():
                return
            if problem != self._said:
                self._said = problem
                log.warning(
                    "no KVCache pool at %s (%s); vLLM goes on without it", self.path, problem
                )
            lasted_s = time.monotonic() - began_s if was_connected else 0.0
            num_failures = RETRIES.count(num_failures, lasted_s)
            self._stopping.wait(RETRIES.after(num_failures))

    def _end_connection(self) -> bool:
        """Returns whether there was one."""
        with self._sending:
            was_connected, self._sock, self.memory = self._sock is not None, None, None
            self._forget_backlog()
        return was_connected

    def _serve(self) -> None:
        """Serves one connection until it ends. Raises OSError, ValueError or _RefusedError."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_S)
            sock.connect(str(self.path))
            sock.settimeout(None)
            if not is_own_user(sock):
                raise _RefusedError("its socket is another user's")
            reader = cast(BinaryIO, sock.makefile("rb", buffering=1 << 16))
            sock.sendall(framed(self._greeting))
            message = _read(reader)
            match message:
                case PoolRefused():
                    raise _RefusedError(message.error)
                case RankAttached():
                    assert isinstance(self._greeting, AttachRank)
                    num_bytes = message.num_blocks * self._greeting.layout.block_bytes
                    self.memory = SpaceMemory(message.path, num_bytes, message.num_blocks)
                case PoolJoinAccepted():
                    pass
                case _:
                    raise ValueError("it answered with something else than a welcome")
            self._sock, self._said = sock, ""
            log.info("the KVCache pool at %s is used", self.path)
            while True:
                message = _read(reader)
                if isinstance(message, PoolRefused):
                    raise _RefusedError(message.error)
                self._on_message(message)


class _RefusedError(Exception):
    """The pool does not serve this process."""


def _read(reader: BinaryIO) -> PoolMessage:
    try:
        message: PoolMessage = FROM_POOL.decode(FRAMES.read(reader.read))
    except EOFError:
        raise ConnectionError("it ended the connection") from None
    return message
