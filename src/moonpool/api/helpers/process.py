"""A process that works for the API where the work may take long, or end the process that does it.

The process gets frames and replies to each in order (`parent`), and keeps to its own limits. The
server's side ends a process that exceeds its limits or hangs. When the process ends, the oldest
work is the one that it ended with; other work may go to another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

from moonpool.api.helpers.forked import ForkedHelper
from moonpool.api.helpers.parent import FRAMES
from moonpool.api.serving_backend import RequestRefused
from moonpool.framing import FrameTooLongError

LOOK_S = 0.1
LATE_S, LATE_FACTOR = 10.0, 4.0
"""A process that takes longer than LATE_S plus LATE_FACTOR times its limit of CPU time is stopped
or stuck."""


class HelperEndedError(Exception):
    """The process ended before it replied. `status`: the exit status as of a subprocess, or None if
    the process was ended on purpose. `was_at_work`: whether it was processing this work.
    `took_too_long`: whether it computed longer than it may."""

    def __init__(self, status: int | None, was_at_work: bool, took_too_long: bool) -> None:
        super().__init__(status, was_at_work, took_too_long)
        self.status = status
        self.was_at_work = was_at_work
        self.took_too_long = took_too_long

    @property
    def is_of_the_work(self) -> bool:
        """Whether this work has ended the process. A status of 0 is an orderly end, before this
        work."""
        return self.was_at_work and bool(self.status)


@dataclass(slots=True)
class _Work:
    reply: asyncio.Future[bytes]
    limit_s: float


class HelperProcess(asyncio.SubprocessProtocol):
    """One process. Call `start`, then `ask`; `end` ends the process."""

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None = None,
        on_end: Callable[[], None] = lambda: None,
        forked: ForkedHelper | None = None,
    ) -> None:
        """`module`: the Python module that the process runs. `environment`: variables in addition
        to those of this process. `on_end`: called once the process has ended, before its unfinished
        work fails. `forked`: a process that waits already, used in place of a new one."""
        self.has_ended = False
        self.is_ready = False
        """Whether the process has replied to `start` and has not ended since."""
        self.num_replies = 0
        self._module = module
        self._environment = environment or {}
        self._on_end = on_end
        self._forked = forked
        self._loop = asyncio.get_running_loop()
        self._starting: asyncio.Task[bytes] | None = None
        self._works: deque[_Work] = deque()
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.SubprocessTransport | None = None
        self._input: asyncio.WriteTransport | None = None
        self._took_too_long = False
        self._status: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self._transport is None else self._transport.get_pid()

    async def start(
        self, first: bytes, limit_s: float, words: Sequence[str] = (), fds: Sequence[int] = ()
    ) -> bytes:
        """Starts the process and returns its reply to the `first` frame; a second call waits for
        the first one. `words`: the arguments of the command line. `fds`: file descriptors that the
        process inherits. Raises OSError if no process can be started, and HelperEndedError."""
        if self._starting is None:
            self._starting = self._loop.create_task(self._start(first, limit_s, words, fds))
            self._starting.add_done_callback(_note_error)
        return await asyncio.shield(self._starting)

    async def _start(
        self, first: bytes, limit_s: float, words: Sequence[str], fds: Sequence[int]
    ) -> bytes:
        try:
            await self._spawn(words, fds)
        except OSError:
            self._lose(None)
            raise
        if self.has_ended:  # `end` was called in the meantime
            self.end()
        reply = await self.ask(first, limit_s)
        self.is_ready = not self.has_ended
        return reply

    async def _spawn(self, words: Sequence[str], fds: Sequence[int]) -> None:
        """Raises OSError."""
        if self._forked is not None:
            await self._forked.attach(self)
            return
        await self._loop.subprocess_exec(
            lambda: self,
            *(sys.executable, "-m", self._module, str(os.getpid()), *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # libraries write their last words here before they end the process
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=tuple(fds),
            env={**os.environ, **self._environment},
        )

    async def ask(self, frame: bytes, limit_s: float) -> bytes:
        """Returns the reply to a frame. `limit_s`: CPU time after which the process is ended,
        unless it stops the work before. Raises HelperEndedError."""
        if self.has_ended:
            raise HelperEndedError(self._status, False, self._took_too_long)
        work = _Work(self._loop.create_future(), limit_s)
        self._works.append(work)
        if len(self._works) == 1:
            self._watch()
        self.tell(frame)
        return await work.reply

    def tell(self, frame: bytes) -> None:
        """Sends a frame that has no reply."""
        assert self._input is not None, "the process is started first"
        # otherwise, the process has ended, and `connection_lost` follows
        if not self._input.is_closing():
            self._input.write(FRAMES.framed(frame))

    def end(self) -> None:
        """Ends the process. Unfinished work counts as not done."""
        self._lose(None)
        if self._transport is not None:
            self._transport.close()

    def _kill(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()

    # Methods that the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.SubprocessTransport, transport)
        self._input = cast(asyncio.WriteTransport, self._transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        self._received += data
        try:
            for frame in FRAMES.pop_all(self._received):
                self._on_reply(frame)
        except FrameTooLongError:
            self._kill()

    def _on_reply(self, frame: bytes) -> None:
        self.num_replies += 1
        work = self._works.popleft()
        if not work.reply.done():
            work.reply.set_result(frame)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Notes that the process has ended, and all of its output has come."""
        if self._transport is not None:
            self._lose(self._transport.get_returncode())
            self._transport.close()

    def _lose(self, status: int | None) -> None:
        """Notes that the process has ended. `status`: its exit status, or None if this side ended
        it."""
        if self.has_ended:
            return
        self.has_ended, self.is_ready, self._status = True, False, status
        self._took_too_long |= status == -signal.SIGXCPU
        self._on_end()
        works, self._works = self._works, deque()
        self._watch()
        for number, work in enumerate(works):
            if not work.reply.done():
                error = HelperEndedError(status, number == 0, self._took_too_long)
                work.reply.set_exception(error)

    # Handles a process that does not finish its work

    def _watch(self) -> None:
        """Waits for the reply to the oldest work."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._works:
            limit_s = self._works[0].limit_s
            self._timer = self._loop.call_later(limit_s + LOOK_S, self._look, limit_s)

    def _look(self, limit_s: float, since_s: float = 0.0, used_s: float | None = None) -> None:
        """Ends a process that computes beyond its limit, or seems to hang. Its CPU time is counted
        from the first check on, which comes `limit_s` after the work has begun."""
        assert self.pid is not None
        try:
            now_used_s = _cpu_s(self.pid)
        except OSError:
            return  # the process has ended
        used_s = now_used_s if used_s is None else used_s
        if now_used_s - used_s > limit_s:
            self._took_too_long = True
            self._kill()
        elif since_s > LATE_S + LATE_FACTOR * limit_s:
            self._kill()
        else:
            since_s += LOOK_S
            self._timer = self._loop.call_later(LOOK_S, self._look, limit_s, since_s, used_s)


def _note_error(starting: asyncio.Task[bytes]) -> None:
    """Reads the error of a start, so that asyncio does not log it as unread: the call that waited
    for the start may have gone."""
    if not starting.cancelled():
        starting.exception()


def _cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process has used. Raises OSError."""
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


class HelperLife(Protocol):
    """One process of a helper, from its start to its end."""

    @property
    def has_ended(self) -> bool: ...

    def end(self) -> None: ...


_Life = TypeVar("_Life", bound=HelperLife)


class Helper(Generic[_Life]):
    """Owns one process at a time: another one takes its place when it has ended, until `close`."""

    def __init__(self, make: Callable[[], _Life], first: _Life | None = None) -> None:
        """`first`: a process that already runs."""
        self._make = make
        self._closed = False
        self.process = first

    @property
    def is_up(self) -> bool:
        return self.process is not None and not self.process.has_ended

    def current(self) -> _Life:
        """Returns the process, or a new one, not started yet, if it has ended. Raises
        `RequestRefused` after `close`."""
        if self._closed:
            text = "The server is stopping. Send the request again."
            raise RequestRefused(503, "server_stopping", text, 5.0)
        if self.process is None or self.process.has_ended:
            self.process = self._make()
        return self.process

    def close(self) -> None:
        self._closed = True
        if self.process is not None:
            self.process.end()
