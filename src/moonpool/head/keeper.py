"""Keeps one process of a cluster running: starts it again when it dies, with growing delays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable

from moonpool.head.fork_server import ForkedProcess
from moonpool.head.watch.culprits import OomKills, is_crash

log = logging.getLogger("moonpool.launcher")

MAX_RESTARTS = 5
"""More restarts of one process end the start of the cluster. Once the cluster is up, no process is
given up."""
RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Delay after the first, second, ... death in short succession."""
STEADY_S = 60.0
"""A process that lived this long had started well, so its restart count is reset."""
SERVING_STEADY_S = 10.0
"""The same once the cluster is up. Most deaths are then no fault of the start."""

WorkerProcess = ForkedProcess | asyncio.subprocess.Process


class Keeper:
    """`run` lasts as long as the process is wanted. `process` is the newest one."""

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[WorkerProcess]],
        oom_kills: OomKills | None = None,
    ) -> None:
        """`oom_kills`: shared with the other keepers of this machine, so that each kill counts
        once."""
        self.name = name
        self.process: WorkerProcess | None = None
        self.is_started = False
        """Whether the cluster is up, so that the process is not given up."""
        self.is_ending = False
        """Whether the cluster ends, so that no further process is started."""
        self.returns = False
        """Whether another process replaces the one that is about to leave."""
        self.is_leaving = False
        """Whether the process was told to leave, so that no other one takes its place."""
        self.on_crash: Callable[[str], None] = lambda name: None
        """Called with the name when the process has ended by itself."""
        self._spawn = spawn
        self._oom_kills = oom_kills or OomKills()

    @property
    def pid(self) -> int:
        """0 while no process runs."""
        process = self.process
        return 0 if process is None or process.returncode is not None else process.pid

    def kill(self, why: str) -> None:
        """Kills the process; another one takes its place."""
        if self.pid and self.process is not None:
            log.warning("%s %s; killing it", self.name, why)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    def leave(self) -> None:
        """Tells the process to end in an orderly way; none replaces it."""
        self.is_leaving = True
        if self.pid and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    async def run(self) -> bool:
        """Returns whether the process has left in order. Raises OSError if none can start."""
        restarts = 0
        while not self.is_ending:
            began_s = time.monotonic()
            code = await self._run_once()
            if self.is_ending:
                break
            if self.is_leaving:
                log.info("%s has left the cluster", self.name)
                return True
            if is_crash(code, self._oom_kills.is_new()):
                self.on_crash(self.name)
            if code == 0 and self.returns:
                self.returns = False
                log.info("%s has left; another one starts in its place", self.name)
                continue
            if code == 0:
                log.info("%s has left the cluster", self.name)
                return True
            steady_s = SERVING_STEADY_S if self.is_started else STEADY_S
            if time.monotonic() - began_s > steady_s:
                restarts = 0
            if restarts >= MAX_RESTARTS and not self.is_started:
                log.error("%s ended with code %s too often; giving up on it", self.name, code)
                break
            delay_s = RESTART_DELAYS_S[min(restarts, len(RESTART_DELAYS_S) - 1)]
            restarts += 1
            log.warning("%s ended with code %s; restarting it in %g s", self.name, code, delay_s)
            await asyncio.sleep(delay_s)
        return False

    async def _run_once(self) -> int | None:
        """Starts a process, and returns its status when it has ended; None: none could start."""
        process = self.process
        if process is None or process.returncode is not None:
            try:
                process = await self._spawn()
            except OSError as error:
                if not self.is_started:
                    raise
                log.warning("cannot start %s: %s", self.name, error)
                return None
        self.process = process
        return await process.wait()
