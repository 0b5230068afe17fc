"""A process that forks workers in milliseconds.

A new interpreter would need 1.5 to 2 s of CPU to import torch. The supervisor forks the process
first, before any thread. The fork server then imports what head and workers need, keeps to one
thread, and receives command lines. The fork server forks each process twice, so that the process
becomes the supervisor's child (`PR_SET_CHILD_SUBREAPER`): if the fork server dies, head and workers
live on. The fork server also forks a spare fork server, which takes its place at once and forks the
next spare. If both die together, further processes start as new interpreters until a new fork
server, also started as an interpreter, has imported the same modules.

`multiprocessing`'s forkserver is not used because its children belong to the fork server, not to
the supervisor, and end with it. That forkserver also pickles what it starts (see
docs/decisions/local-processes.md).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import setproctitle

from moonpool.children.parent import end_with
from moonpool.children.process import ChildProcess, ForkedProcess
from moonpool.children.stopped import is_stopped
from moonpool.retry_delays import RetryDelays

log = logging.getLogger("moonpool.supervisor")

PR_SET_CHILD_SUBREAPER = 36
FORK_S = 20.0
IMPORT_S = 100.0
LOAD_S = 280.0
ADOPTED_S = 5.0
END_S = 3.0
LOOK_S = 0.5
"""Time between two checks of a fork server that does not reply."""
RENEWALS = RetryDelays((1.0, 2.0, 5.0, 10.0, 30.0), steady_s=60.0)
"""Time from the end of a fork server to the start of the next one."""
SPARE_DELAY_S = 1.0
"""Time from a fork, or the end of a spare fork server, to the fork of the next spare."""
IDLE_S = 3.0
"""Time without a fork after which a fork server does deferred work (`settle`)."""
_READY = b"ready"
_SPARE = b"spare"
MAX_LINE_BYTES = 1 << 16


class ForkServerError(Exception):
    """The fork server cannot fork workers, or no longer can."""


@dataclass(frozen=True, slots=True, eq=False)
class _Spare:
    """A fork server that waits to take another's place, and the connection to this spare."""

    process: ForkedProcess
    control: socket.socket


Renewal = Callable[[socket.socket], Awaitable[asyncio.subprocess.Process]]


class ForkServer:
    """The supervisor's side of the fork server; made by `open_fork_server`."""

    def __init__(self, pid: int, control: socket.socket, renewal: Renewal | None = None) -> None:
        """`renewal` starts another fork server, which calls `serve_renewed` with the socket."""
        self.pid = pid
        self._control: socket.socket | None = control
        control.setblocking(False)
        self._renewal = renewal
        self._one_at_a_time = asyncio.Lock()
        self._process: ChildProcess | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self._spare: _Spare | None = None
        self._spare_taken = asyncio.Event()
        self._spare_keeper: asyncio.Task[None] | None = None
        # Time limits of the next replies, the last one first: one comes after the imports, one
        # after the load.
        self._limits_s = [LOAD_S + FORK_S, IMPORT_S + FORK_S]

    async def fork(self, arguments: Sequence[str], fd: int | None = None) -> ForkedProcess:
        """Forks a process with this command line. `fd` is passed on to the process: its number in
        that process is the last word of the line. Raises ForkServerError."""
        async with self._one_at_a_time:
            if self._closed:
                raise ForkServerError("the fork server is closed")
            if self._process is None:
                self._process = ForkedProcess(self.pid)
                self._keeper = asyncio.create_task(self._keep(self._process))
            line = msgspec.json.encode(list(arguments))
            try:
                pid = await self._ask_either(line, fd)
            except (OSError, TimeoutError) as error:
                raise ForkServerError(
                    f"no more workers can be forked: {error or 'no reply'}"
                ) from None
            if self._spare_keeper is None:
                self._spare_keeper = asyncio.create_task(self._keep_spare())
            return ForkedProcess(pid)

    async def _ask_either(self, line: bytes, fd: int | None) -> int:
        """Asks the fork server, then the spare. Raises OSError or TimeoutError."""
        if self._control is None or is_stopped(self.pid):
            if not self._take_spare():
                raise OSError("the fork server has ended, or is stopped")
        elif self._spare is not None:
            with contextlib.suppress(OSError, TimeoutError):
                return await self._ask(line, fd)
            self._take_spare()
        return await self._ask(line, fd)

    async def close(self) -> None:
        """Ends the fork server. The forked processes stay."""
        self._closed = True
        for keeper in (self._keeper, self._spare_keeper):
            if keeper is not None:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
        self._shut()
        process = self._process or ForkedProcess(self.pid)
        if self._limits_s:  # the fork server still loads modules that no process needs any more
            process.kill()
        await _end(process)
        if self._spare is not None:
            self._spare.control.close()
            await _end(self._spare.process)

    async def _keep(self, process: ChildProcess) -> None:
        """Replaces the fork server when it has ended: by the spare, or by a new interpreter."""
        num_ended, began_s = 0, time.monotonic()
        while True:
            await process.wait()
            # waits for a fork under way, which notices the end of the fork server
            async with self._one_at_a_time:
                if process is self._process:
                    self._shut()
                    self._take_spare()
            if process is not self._process:
                assert self._process is not None
                process, num_ended = self._process, 0
                continue
            if self._renewal is None:
                return
            num_ended = RENEWALS.count(num_ended, time.monotonic() - began_s)
            await asyncio.sleep(RENEWALS.after(num_ended))
            began_s = time.monotonic()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            with theirs:
                try:
                    process = self._process = await self._renewal(theirs)
                except OSError as error:
                    ours.close()
                    log.warning("cannot start a fork server: %s", error)
                    continue
            try:
                is_ready = await asyncio.get_running_loop().sock_recv(ours, MAX_LINE_BYTES)
            except asyncio.CancelledError:
                ours.close()
                raise
            except OSError:
                is_ready = b""
            if is_ready != _READY:
                ours.close()
                continue
            self.pid, self._control = process.pid, ours
            self._limits_s.clear()

    async def _keep_spare(self) -> None:
        """Has the fork server fork a spare whenever there is none."""
        while True:
            await asyncio.sleep(SPARE_DELAY_S)
            async with self._one_at_a_time:
                spare = self._spare = await self._fork_spare()
            if spare is None:
                if self._control is None and self._renewal is None:
                    return
                continue
            self._spare_taken.clear()
            ends = [spare.process.wait(), self._spare_taken.wait()]
            waits = [asyncio.ensure_future(end) for end in ends]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
            if self._spare is spare:
                self._spare = None
                spare.control.close()

    async def _fork_spare(self) -> _Spare | None:
        """Returns None if no fork server runs now."""
        if self._control is None or is_stopped(self.pid):
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                pid = await self._ask(_SPARE, theirs.fileno())
            except BaseException as error:
                ours.close()
                if isinstance(error, OSError):  # a TimeoutError is an OSError, too
                    return None
                raise
        return _Spare(ForkedProcess(pid), ours)

    def _take_spare(self) -> bool:
        """Replaces the fork server by the spare, if there is a spare that works."""
        spare, self._spare = self._spare, None
        self._spare_taken.set()
        if spare is None:
            return False
        if spare.process.returncode is not None or is_stopped(spare.process.pid):
            spare.control.close()
            spare.process.kill()
            return False
        self._shut()
        self.pid, self._process, self._control = spare.process.pid, spare.process, spare.control
        self._limits_s.clear()
        log.info("a spare fork server takes the place of one that has ended or is stopped")
        return True

    async def _ask(self, line: bytes, fd: int | None) -> int:
        """Sends one line and returns the answer. If that fails, it ends the connection and raises
        OSError or TimeoutError."""
        if self._control is None:
            raise OSError("the fork server has ended")
        try:
            return await self._ask_at(self._control, line, fd)
        except (OSError, TimeoutError):
            self._shut()
            raise
        except asyncio.CancelledError:
            self._shut()  # a late reply would be taken for the reply to the next line
            raise

    async def _ask_at(self, control: socket.socket, line: bytes, fd: int | None) -> int:
        loop = asyncio.get_running_loop()
        # set only now, because this process does not wait for orphans
        adopt_orphans(True)
        limit_s = self._limits_s.pop() if self._limits_s else FORK_S
        try:
            async with asyncio.timeout(limit_s):
                socket.send_fds(control, [line], [] if fd is None else [fd])
                answer = await self._until_stopped(loop.sock_recv(control, MAX_LINE_BYTES))
        finally:
            adopt_orphans(False)
        if not answer.isdigit():
            raise OSError(answer.decode() or "it has ended")
        return int(answer)

    async def _until_stopped(self, reply: Coroutine[object, object, bytes]) -> bytes:
        """Raises OSError if the fork server is stopped before its reply."""
        waiting = asyncio.ensure_future(reply)
        try:
            while not (await asyncio.wait({waiting}, timeout=LOOK_S))[0]:
                if is_stopped(self.pid):
                    raise OSError("it is stopped")
            return waiting.result()
        finally:
            waiting.cancel()

    def _shut(self) -> None:
        """Ends the connection. The fork server then ends by itself, unless a signal has stopped
        it."""
        if self._control is not None:
            self._control.close()
            self._control = None
            if self._process is not None and is_stopped(self.pid):
                self._process.kill()


async def _end(process: ChildProcess) -> None:
    """Waits until a fork server has ended, whose connection is closed."""
    if is_stopped(process.pid):
        process.kill()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def open_fork_server(
    environment: Mapping[str, str],
    run_line: Callable[[list[str]], object],
    prepare: Callable[[], object] = lambda: None,
    renewal: Renewal | None = None,
    load: Callable[[], object] = lambda: None,
    settle: Callable[[], object] = lambda: None,
) -> ForkServer | None:
    """Forks the fork server. Each process calls `run_line` with its command line, then ends.

    The fork server first calls `prepare`, which imports what these processes need. After the first
    fork, which becomes the head, the fork server calls `load`, and all later forks share what
    `load` has loaded. `load` must not raise, and must leave no thread. `settle`, which the fork
    server calls once no process was forked for `IDLE_S`, must not raise or leave a thread either.
    `renewal` starts another fork server, by `prepare` alone, when one has ended. Must be called
    before the process has threads or an event loop. Returns None if the system does not support it,
    or if the process has threads, of which a fork would copy only one. Raises OSError if the system
    cannot fork. Does not return in a forked process.
    """
    if not _may_fork():
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent_pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return ForkServer(pid, ours, renewal)
    ours.close()
    # puts the process into a session of its own, so that Ctrl-C reaches only the supervisor
    os.setsid()
    end_with(parent_pid)
    # finds the command line now, because it cannot be found after variables have moved
    setproctitle.getproctitle()
    os.environ.update(environment)
    prepare()
    line = _serve_forks(theirs, parent_pid, load, settle)
    status: object = 0
    try:
        run_line(line)
    except SystemExit as end:
        status = end.code
    return end_quickly(status)


def end_quickly(status: object) -> NoReturn:
    """Ends this process as `sys.exit(status)` does, but leaves its memory to the kernel: Python
    would take a third of a second of CPU to free the modules that the fork server has imported."""
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads that are not daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def serve_renewed(control: socket.socket, prepare: Callable[[], object]) -> list[str]:
    """Serves as a fork server that is a new interpreter in a session of its own. Returns only in
    forked processes, with their command line."""
    parent_pid = os.getppid()
    end_with(parent_pid)
    prepare()
    control.send(_READY)
    return _serve_forks(control, parent_pid)


def _may_fork() -> bool:
    """Whether this is Linux 5.4 or newer without a sandbox that forbids forking, and the process
    has one thread."""
    if not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _serve_forks(
    control: socket.socket,
    parent_pid: int,
    load: Callable[[], object] | None = None,
    settle: Callable[[], object] | None = None,
) -> list[str]:
    """Forks processes until the supervisor closes the connection. Returns only in forked processes,
    with their command line. Calls `load` after the first fork, and `settle` in the first long pause
    after it."""
    is_spare = False
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    setproctitle.setproctitle("moonpool fork server")
    _freeze()
    try:
        while True:
            if load is None and settle is not None and not _is_asked(control):
                settle()
                settle = None
                _freeze()
            line, fds, _, _ = socket.recv_fds(control, MAX_LINE_BYTES, 1)
            if not line:
                break
            if is_spare:
                is_spare = False
                setproctitle.setproctitle("moonpool fork server")
            if _fork_twice(control):
                _be_adopted(control, parent_pid)
                if line == _SPARE:
                    end_with(parent_pid)
                    setproctitle.setproctitle("moonpool spare fork server")
                    control, is_spare = socket.socket(fileno=fds[0]), True
                    continue
                return [*msgspec.json.decode(line, type=list[str]), *map(str, fds)]
            for fd in fds:
                os.close(fd)
            if load is not None:
                load()
                load = None
                _freeze()
    except ConnectionError:
        pass  # the supervisor ended before it had read the last reply
    os._exit(0)


def _is_asked(control: socket.socket) -> bool:
    """Waits for the next command line for at most `IDLE_S`."""
    return bool(select.select([control], [], [], IDLE_S)[0])


def _freeze() -> None:
    """Excludes all present objects from garbage collection, because a collection in a forked
    process would write to all pages, and so copy them. No collection is made here: after imports it
    finds next to nothing, and takes a tenth of a second."""
    gc.freeze()


def _fork_twice(control: socket.socket) -> bool:
    """Forks a grandchild. Returns True in the grandchild, whose parent is about to end."""
    try:
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return False
        if os.fork() == 0:
            return True
    except OSError as error:
        control.send(f"{error}".encode())
        if os.getpid() == os.getsid(0):  # the process is the fork server itself
            return False
    os._exit(0)


def _be_adopted(control: socket.socket, parent_pid: int) -> None:
    """Waits until the supervisor is the parent, which is so when the process in between has
    ended."""
    by_s = time.monotonic() + ADOPTED_S
    while os.getppid() != parent_pid:
        if time.monotonic() > by_s:
            control.send(b"the supervisor did not become the parent of the process")
            os._exit(1)
        time.sleep(0.0005)
    os.setsid()
    try:
        control.send(str(os.getpid()).encode())
    except OSError:
        os._exit(1)  # the supervisor no longer waits for this process
    control.close()


def adopt_orphans(wanted: bool) -> None:
    """Sets whether this process becomes the parent of descendants whose parent has ended."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
