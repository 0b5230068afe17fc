"""Children that were forked, and not started as programs: known by process id alone."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import time

LOOK_S = 0.02
"""Time between two checks of a child where the system has no descriptors of processes (macOS)."""


def has_pidfds() -> bool:
    """Whether a file descriptor can stand for a process here."""
    return hasattr(os, "pidfd_open")


class ForkedChild:
    """A child of this process. `wait` blocks, like that of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.pidfd = os.pidfd_open(pid) if has_pidfds() else -1
        """Readable once the process has ended; closed by `reap`. -1 without `has_pidfds`."""

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status, or the negative number of the signal that ended it. Raises
        subprocess.TimeoutExpired."""
        if self.returncode is None and timeout is not None and not self._ends_within(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return self.reap()

    def poll(self) -> int | None:
        """Returns the exit status without waiting, or None while the process runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Never reaches another process that has got the number of this one."""
        if self.pidfd >= 0:
            if self.returncode is None:
                signal.pidfd_send_signal(self.pidfd, number)
        elif self.poll() is None:
            # the process id stays this child's until `poll` has noticed its end
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def reap(self) -> int:
        """Returns the status of a process that has ended, or waits for its end."""
        if self.returncode is None and self.pidfd < 0:
            self._note(os.waitpid(self.pid, 0)[1])
        if self.returncode is None:
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED)
            os.close(self.pidfd)
            assert ended is not None
            by_itself = ended.si_code == os.CLD_EXITED
            self.returncode = ended.si_status if by_itself else -ended.si_status
        return self.returncode

    def _ends_within(self, seconds: float) -> bool:
        if self.pidfd >= 0:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(1e3 * seconds))
        by_s = time.monotonic() + seconds
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._note(status)
            elif time.monotonic() >= by_s:
                return False
            else:
                time.sleep(LOOK_S)
        return True

    def _note(self, status: int) -> None:
        self.returncode = os.waitstatus_to_exitcode(status)


class ForkedProcess:
    """A forked child with the interface of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self._child = ForkedChild(pid)
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        loop.add_reader(self._child.pidfd, self._on_end)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    async def wait(self) -> int:
        """Returns the exit status, or the negative number of the signal that ended it."""
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        self._child.kill()

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._child.pidfd)
        self._ended.set_result(self._child.reap())


ChildProcess = ForkedProcess | asyncio.subprocess.Process
"""A child that the event loop watches."""
