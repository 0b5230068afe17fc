"""Processes that a worker forks before it has threads, for its stages and ranks.

A new interpreter needs 1.5 to 2 s of CPU to import torch; an instance that has lost a stage would
wait for that. A forked worker has imported torch already. The worker forks its spare processes
first of all. Each spare waits for the command line of a stage or rank, and ends with the worker.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence

import msgspec

from moonpool.children.process import ForkedChild

MAX_LINE_BYTES = 1 << 16
_spares: list[SpareProcess] = []


class SpareProcess(ForkedChild):
    """A forked child that waits for a command line."""

    def __init__(self, pid: int, control: socket.socket) -> None:
        super().__init__(pid)
        self._control = control

    def begin(self, line: Sequence[str], fd: int) -> bool:
        """Lets it run the command line, whose last word becomes its number of `fd`. Returns False
        if it has ended."""
        try:
            with self._control:
                socket.send_fds(self._control, [msgspec.json.encode(list(line))], [fd])
        except OSError:
            self.kill()
            self.wait()
            return False
        return True


def fork_spares(
    count: int, end_with: Callable[[int], object], run_line: Callable[[list[str]], object]
) -> None:
    """Forks this many processes. Each spare calls `end_with` with this process's id at once, and
    later `run_line` with its command line. Forks none if torch is not imported yet, or if there are
    threads: a fork would copy only one."""
    if "torch" not in sys.modules or len(os.listdir("/proc/self/task")) > 1:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    parent_pid = os.getpid()
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for spare in _spares:
                spare._control.close()
            _spares.clear()
            os.setsid()  # Ctrl-C must reach the head only
            end_with(parent_pid)
            _wait_and_run(theirs, run_line)
        theirs.close()
        _spares.append(SpareProcess(pid, ours))


def begin_spare(line: Sequence[str], fd: int) -> SpareProcess | None:
    """Runs a command line in a spare process, or returns None if no spare is left. The last word of
    the line will be the process's number of `fd`."""
    while _spares:
        spare = _spares.pop()
        if spare.begin(line, fd):
            return spare
    return None


def _wait_and_run(control: socket.socket, run_line: Callable[[list[str]], object]) -> None:
    """Never returns."""
    status = 1
    try:
        with control:
            line, fds, _, _ = socket.recv_fds(control, MAX_LINE_BYTES, 1)
        if line:
            run_line([*msgspec.json.decode(line, type=list[str]), *map(str, fds)])
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
