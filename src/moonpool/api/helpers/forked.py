"""A helper process that was forked before this process had an event loop or threads.

The helper has already imported what this process has, and waits for its first frame.
`HelperProcess` drives it like a process that it has started itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import traceback
from collections.abc import Callable, Collection, Mapping

import setproctitle

from moonpool.children.process import ForkedChild, has_pidfds

_M_ARENA_MAX = -8


class ForkedHelper(asyncio.SubprocessTransport):
    """The server's side of the forked helper. Call `attach` on a running loop, or `close` it."""

    def __init__(self, pid: int, input_fd: int, output_fd: int) -> None:
        super().__init__()
        self._child = ForkedChild(pid)
        self._fds = [input_fd, output_fd]
        self._input: asyncio.WriteTransport | None = None

    async def attach(self, owner: asyncio.SubprocessProtocol) -> None:
        """Connects the process with `owner`, as `loop.subprocess_exec` does."""
        loop = asyncio.get_running_loop()
        ends = [os.fdopen(fd, mode, 0) for fd, mode in zip(self._fds, ("wb", "rb"), strict=True)]
        self._fds.clear()
        self._input, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, ends[0])
        owner.connection_made(self)
        await loop.connect_read_pipe(lambda: _Output(owner, self._child), ends[1])

    def get_pid(self) -> int:
        return self._child.pid

    def get_returncode(self) -> int | None:
        return self._child.returncode

    def get_pipe_transport(self, fd: int) -> asyncio.BaseTransport | None:
        return self._input if fd == 0 else None

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        """Ends the process."""
        self.kill()
        for fd in self._fds:  # while the helper is not attached, its descriptors are kept here
            os.close(fd)
        if self._fds:
            self._fds.clear()
            self._child.reap()
        elif self._input is not None:
            self._input.close()


class _Output(asyncio.Protocol):
    """The output of the helper process. The protocol ends once no more output comes."""

    def __init__(self, owner: asyncio.SubprocessProtocol, child: ForkedChild) -> None:
        self._owner = owner
        self._child = child

    def data_received(self, data: bytes) -> None:
        self._owner.pipe_data_received(1, data)

    def connection_lost(self, exc: Exception | None) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._child.pidfd, self._on_end, loop)

    def _on_end(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self._child.pidfd)
        self._child.reap()
        self._owner.connection_lost(None)


def fork_helper(
    run: Callable[[int], object],
    title: str,
    environment: Mapping[str, str],
    fds: Collection[int] = (),
) -> ForkedHelper | None:
    """Forks a process that calls `run` with the id of this one, and ends with it. `fds`: the file
    descriptors that the helper keeps. Returns None if this process has threads, of which a fork
    would copy only one, or if it cannot fork."""
    if not has_pidfds():
        return None
    try:
        if len(os.listdir("/proc/self/task")) != 1:
            return None
        parent_pid, ours, theirs = os.getpid(), os.pipe(), os.pipe()
        pid = os.fork()
    except OSError:
        return None
    if pid:
        os.close(ours[0])
        os.close(theirs[1])
        return ForkedHelper(pid, ours[1], theirs[0])
    status = 1
    try:
        _settle(ours[0], theirs[1], title, environment, fds)
        run(parent_pid)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _settle(
    source_fd: int,
    sink_fd: int,
    title: str,
    environment: Mapping[str, str],
    fds: Collection[int],
) -> None:
    """Gives this process the state of a new interpreter with the same command."""
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    for number, fd in enumerate((source_fd, sink_fd, null)):
        os.dup2(fd, number)
    for fd in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, *fds}:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed already
            os.close(fd)
    os.environ.update(environment)
    if "MALLOC_ARENA_MAX" in environment:  # glibc reads the variable only at the start of a program
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, int(environment["MALLOC_ARENA_MAX"]))
    setproctitle.setproctitle(title)
