"""The head's end of one process that reads bodies (`body_process`).

Several calls may be in it, and are read in their order. When it ends, the oldest call is the one it
ended with; the others may go to another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from moonpool.api.body_process import LENGTH, BodyReady, BodyResult, BodyStart, BodyWork, UseCard
from moonpool.api.body_reading.limits import LOAD_BYTES, LOAD_S, ReadStage, StageNote, cpu_s
from moonpool.api.frontend import ModelCard
from moonpool.link.anonymous_file import anonymous_file

LOOK_S = 0.1
LATE_S, LATE_FACTOR = 10.0, 4.0
"""A process that takes this time, and so many times what it may compute, is stopped or stuck."""
_encode = msgspec.msgpack.Encoder().encode
_RESULT = msgspec.msgpack.Decoder(BodyResult)
_READY = msgspec.msgpack.Decoder(BodyReady)


class BodyProcessEndedError(Exception):
    """The process ended with this call. `took_too_long`: more CPU time than the call may."""

    def __init__(self, stage: ReadStage, took_too_long: bool) -> None:
        super().__init__(stage, took_too_long)
        self.stage = stage
        self.took_too_long = took_too_long


class NotReadError(Exception):
    """The process ended before it came to this call, or left it for calls of other tenants."""


@dataclass(slots=True)
class _Call:
    reply: asyncio.Future[BodyResult]
    limit_s: float


class BodyClient(asyncio.SubprocessProtocol):
    """One process. `begin`, wait for that, then `read`; `end` ends it."""

    def __init__(self, started: BodyStart, on_end: Callable[[], None] | None = None) -> None:
        self._started = started
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._starting: asyncio.Task[str] | None = None
        self._ready: asyncio.Future[str] = self._loop.create_future()
        self._calls: deque[_Call] = deque()
        self._num_replies = 0
        self._received = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._card: ModelCard | None = None
        self._note: StageNote | None = None
        self._transport: asyncio.SubprocessTransport | None = None
        self._input: asyncio.WriteTransport | None = None
        self._took_too_long = False
        self.has_ended = False

    def begin(self) -> asyncio.Task[str]:
        """Starts the process. Returns why the tokenizer or the chat template cannot be used; "" if
        they can."""
        if self._starting is None:
            self._starting = self._loop.create_task(self._start())
        return self._starting

    async def _start(self) -> str:
        try:
            await self._spawn()
        except OSError as error:
            self._lose(None)
            return f"no process can be started: {error}"
        if self.has_ended:  # `end` came meanwhile
            self.end()
            return ""
        self._write(self._started)
        late = self._loop.call_later(LATE_FACTOR * LOAD_S, self._kill)
        try:
            return await self._ready
        finally:
            late.cancel()

    async def _spawn(self) -> None:
        note_fd = anonymous_file("moonpool stage")
        try:
            os.ftruncate(note_fd, os.sysconf("SC_PAGESIZE"))
            self._note = StageNote(note_fd)
            transport, _ = await self._loop.subprocess_exec(
                lambda: self,
                sys.executable,
                "-m",
                "moonpool.api.body_process",
                str(note_fd),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # where libraries write before they end it
                start_new_session=True,
                pass_fds=(note_fd,),
                env={**os.environ, **_ENVIRONMENT},
            )
        finally:
            os.close(note_fd)
        self._transport = transport
        self._input = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))

    @property
    def is_ready(self) -> bool:
        return self._ready.done() and not self.has_ended

    @property
    def pid(self) -> int | None:
        return None if self._transport is None else self._transport.get_pid()

    async def read(self, work: BodyWork, card: ModelCard) -> BodyResult:
        """Reads a body by the card. Raises `BodyProcessEndedError` and `NotReadError`."""
        if self.has_ended:
            raise NotReadError
        if card is not self._card:
            self._card = card
            self._write(UseCard(card))
        call = _Call(self._loop.create_future(), work.limit_s)
        self._calls.append(call)
        if len(self._calls) == 1:
            self._watch()
        self._write(msgspec.structs.replace(work, num_replies=self._num_replies))
        result = await call.reply
        if result.was_left:
            raise NotReadError
        return result

    def end(self) -> None:
        """Ends the process. Bodies that it was reading count as not read."""
        self._lose(None)
        if self._transport is not None:
            self._transport.close()

    def _write(self, frame: BodyStart | BodyWork | UseCard) -> None:
        assert self._input is not None
        if self._input.is_closing():  # the process has ended: `connection_lost` follows
            return
        body = _encode(frame)
        self._input.write(LENGTH.pack(len(body)) + body)

    def _kill(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.kill()

    # Called by the loop

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        self._received += data
        start, received = 0, self._received
        while len(received) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(received, start)
            if len(received) - start - LENGTH.size < length:
                break
            begin = start + LENGTH.size
            start = begin + length
            self._on_frame(bytes(received[begin:start]))
        del received[:start]

    def _on_frame(self, frame: bytes) -> None:
        if not self._ready.done():
            self._ready.set_result(_READY.decode(frame).error)
            return
        self._num_replies += 1
        call = self._calls.popleft()
        if not call.reply.done():
            call.reply.set_result(_RESULT.decode(frame))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended, and all that it wrote has come."""
        if self._transport is not None:
            self._lose(self._transport.get_returncode())
            self._transport.close()

    def _lose(self, status: int | None) -> None:
        """The process has ended with this status; None: it was ended from outside."""
        if self.has_ended:
            return
        self.has_ended = True
        self._took_too_long |= status == -signal.SIGXCPU
        stage = ReadStage.OTHER if self._note is None else self._note.stage
        if self._note is not None:
            self._note.close()
        calls, self._calls = self._calls, deque()
        self._watch()
        for number, call in enumerate(calls):
            if call.reply.done():
                continue
            if number == 0 and status is not None and status != 0:
                error: Exception = BodyProcessEndedError(stage, self._took_too_long)
            else:
                error = NotReadError()
            call.reply.set_exception(error)
        if not self._ready.done():
            self._ready.set_result("" if status is None else _why_not_ready(status))
        if self._on_end is not None:
            self._on_end()

    # A process that does not end a call by itself

    def _watch(self) -> None:
        """Waits for the reply to the oldest call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._calls:
            limit_s = self._calls[0].limit_s
            self._timer = self._loop.call_later(limit_s + LOOK_S, self._look, limit_s)

    def _look(self, limit_s: float, since_s: float = 0.0, used_s: float | None = None) -> None:
        """Ends a process that computes on after its limit, or seems to stand still. It may have
        used less than the limit before the first look."""
        assert self.pid is not None
        try:
            now_used_s = cpu_s(self.pid)
        except OSError:
            return  # it has ended
        used_s = now_used_s if used_s is None else used_s
        if now_used_s - used_s > limit_s:
            self._took_too_long = True
            self._kill()
        elif since_s > LATE_S + LATE_FACTOR * limit_s:
            self._kill()
        else:
            since_s += LOOK_S
            self._timer = self._loop.call_later(LOOK_S, self._look, limit_s, since_s, used_s)


_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",  # it reads one text at a time
    "RAYON_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # each further one takes addresses, which are limited
    "RUST_BACKTRACE": "0",
}


def _why_not_ready(status: int) -> str:
    if status in (0, -signal.SIGXCPU, -signal.SIGKILL):
        how = f"takes more than {LOAD_S:g} s or {LOAD_BYTES >> 30} GiB to load"
    else:
        name = signal.Signals(-status).name if status < 0 else f"status {status}"
        how = f"ends the process that loads it ({name}): it is damaged, or needs too much memory"
    return (
        f"the model's tokenizer or chat template {how}; use another model, or --chat-template FILE"
    )
