"""Stores the Conductor's state without stopping it: a forked child writes the state to a pipe.

A state of a million blocks takes seconds to write, and the head has answers to pass on meanwhile.
The child sees the memory as it was at the fork.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from moonpool.log_limit import limited_logger
from moonpool.rewind.event_log import EventLog
from moonpool.rewind.snapshot import SnapshotError, dump

log = limited_logger("moonpool.head")

MAX_CHECKPOINT_BYTES = 256 << 20
MAX_CPU_S = 120
_READ_BYTES = 1 << 20


class Checkpoints:
    """Begins segments of an event log with a state. `own`: classes of policies from outside the
    package, as in `checkpoint`."""

    def __init__(self, events: EventLog, state: object, own: Iterable[Any]) -> None:
        self._events = events
        self._state = state
        self._own = tuple(own)
        self._task: asyncio.Task[None] | None = None

    def renew(self) -> None:
        """Starts a segment if the present one is full and no state is being written."""
        if not self._events.full or (self._task is not None and not self._task.done()):
            return
        segment = self._events.begin()
        try:
            on_done = partial(setattr, segment, "checkpoint")
            self._task = checkpoint(self._state, on_done, self._own)
        except OSError as error:
            log.warning("the event log has no new state: %s", error)


def checkpoint(
    state: object, on_done: Callable[[bytes], None], own: Iterable[Any] = ()
) -> asyncio.Task[None]:
    """Forks, and calls `on_done` on the event loop with the state's bytes. If the child fails, it
    logs a line instead. `own`: classes of policies from outside the package. Raises OSError if the
    system cannot fork."""
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if child == 0:
        _write_and_exit(state, writer, own)
    os.close(writer)
    return asyncio.create_task(_collect(child, reader, on_done))


def _write_and_exit(state: object, writer: int, own: Iterable[Any]) -> None:
    """Writes the state in the child process, and ends it without a return to the copied event
    loop."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        # a client whose head dies now must not wait until this child closes the connection
        os.closerange(3, writer)
        os.closerange(writer + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
        os.nice(10)
        data = memoryview(dump(state, own))
        while data:
            data = data[os.write(writer, data) :]
        status = 0
    except SnapshotError as error:
        os.write(2, f"the Conductor's state is not stored: {error}\n".encode())
    finally:
        os._exit(status)


async def _collect(child: int, reader: int, on_done: Callable[[bytes], None]) -> None:
    data, status = await asyncio.to_thread(_read_all, child, reader)
    if status == 0:
        on_done(data)
    else:
        log.warning("the event log has no new state: its writer ended with status %d", status)


def _read_all(child: int, reader: int) -> tuple[bytes, int]:
    """Returns the bytes that the child wrote, and its exit status."""
    data = bytearray()
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while len(data) <= MAX_CHECKPOINT_BYTES and (read := pipe.read(_READ_BYTES)):
            data += read
    _, status = os.waitpid(child, 0)  # if its pipe is closed, the child ends by SIGPIPE
    return bytes(data), status
