"""A process forked off a head that has imported everything and started nothing: from it workers
are forked in milliseconds, where a new interpreter would import torch for seconds, each.

The nursery has one thread and waits for command lines. A worker is forked twice, so that it
becomes the head's child (`PR_SET_CHILD_SUBREAPER`) and not the nursery's: should the nursery die,
no worker does, and further ones are started as interpreters of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import setproctitle

from moonpool.messenger.parent import end_with

PR_SET_CHILD_SUBREAPER = 36
FORK_S = 20.0
ADOPTED_S = 5.0
END_S = 3.0
MAX_LINE_BYTES = 1 << 16


class NurseryError(Exception):
    """It forks no worker (any more)."""


class ForkedProcess:
    """A child of this process, as `asyncio.subprocess.Process` shows one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._pidfd = os.pidfd_open(pid)
        loop.add_reader(self._pidfd, self._on_end)

    async def wait(self) -> int:
        """Its exit status, or the signal that ended it, negative."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        assert ended is not None
        by_itself = ended.si_code == os.CLD_EXITED
        self.returncode = ended.si_status if by_itself else -ended.si_status
        self._ended.set_result(self.returncode)


class Nursery:
    """The head's side of it. Made by `open_nursery`."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self._control = control
        self._control.setblocking(False)
        self._one_at_a_time = asyncio.Lock()
        self._process: ForkedProcess | None = None
        self._closed = False

    async def fork(self, arguments: Sequence[str]) -> ForkedProcess:
        """A worker with this command line, adopted. Raises NurseryError."""
        async with self._one_at_a_time:
            if self._closed:
                raise NurseryError("the nursery is closed")
            if self._process is None:
                self._process = ForkedProcess(self.pid)
            try:
                pid = await self._ask(msgspec.json.encode(list(arguments)))
            except (OSError, TimeoutError) as error:
                self._shut()
                raise NurseryError(
                    f"no more workers can be forked: {error or 'no answer'}"
                ) from None
            except asyncio.CancelledError:
                self._shut()  # its answer would be taken for that to the next question
                raise
            return ForkedProcess(pid)

    async def close(self) -> None:
        """Ends it. Workers stay."""
        self._shut()
        process = self._process or ForkedProcess(self.pid)
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _ask(self, line: bytes) -> int:
        loop = asyncio.get_running_loop()
        adopt_orphans(True)  # for the moment only: nobody here waits for those of others
        try:
            async with asyncio.timeout(FORK_S):
                await loop.sock_sendall(self._control, line)
                answer = await loop.sock_recv(self._control, MAX_LINE_BYTES)
        finally:
            adopt_orphans(False)
        if not answer.isdigit():
            raise OSError(answer.decode() or "it has ended")
        return int(answer)

    def _shut(self) -> None:
        if not self._closed:
            self._closed = True
            self._control.close()


def open_nursery(
    environment: Mapping[str, str], run_worker: Callable[[list[str]], object]
) -> Nursery | None:
    """To be called before there are threads or an event loop, with all modules imported that a
    worker needs. Each worker calls `run_worker` with its command line, and ends when that returns.
    None where the system cannot do it, or where there are threads: a fork would have only one."""
    if not _may_fork():
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    head_pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return Nursery(pid, ours)
    ours.close()
    os.setsid()  # Ctrl-C is for the head
    end_with(head_pid)
    os.environ.update(environment)
    line = _nurse(theirs, head_pid)
    run_worker(line)
    raise SystemExit(0)


def _may_fork() -> bool:
    """Linux from 5.4 on, if no sandbox forbids it, and no thread that a fork would be without."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _nurse(control: socket.socket, head_pid: int) -> list[str]:
    """Returns in workers only."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    setproctitle.setproctitle("moonpool nursery")
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, all pages
    try:
        while line := control.recv(MAX_LINE_BYTES):
            if _fork_twice(control):
                _be_adopted(control, head_pid)
                return msgspec.json.decode(line, type=list[str])
    except ConnectionError:
        pass  # the head has ended without having read the last answer
    os._exit(0)


def _fork_twice(control: socket.socket) -> bool:
    """Whether this is the grandchild, whose parent is about to end."""
    try:
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return False
        if os.fork() == 0:
            return True
    except OSError as error:
        control.send(f"{error}".encode())
        if os.getpid() == os.getsid(0):  # the nursery itself
            return False
    os._exit(0)


def _be_adopted(control: socket.socket, head_pid: int) -> None:
    """By the head, once the process between is gone."""
    by_s = time.monotonic() + ADOPTED_S
    while os.getppid() != head_pid:
        if time.monotonic() > by_s:
            control.send(b"nobody adopts its workers")
            os._exit(1)
        time.sleep(0.0005)
    os.setsid()
    control.send(str(os.getpid()).encode())
    control.close()


def adopt_orphans(wanted: bool) -> None:
    """Whether this process becomes the parent of descendants whose own has ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
