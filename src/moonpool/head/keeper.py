"""Keeps one process of a cluster running: starts it again when it dies, with growing delays."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable

from moonpool.children.process import ChildProcess
from moonpool.children.successors import Next, Successors
from moonpool.head.watch.culprits import OomKills, is_crash
from moonpool.retry_delays import RetryDelays

log = logging.getLogger("moonpool.launcher")

MAX_RESTARTS = 5
"""If one process needs more restarts than this, the start of the cluster fails. Once the cluster is
up, there is no limit."""
RESTARTS = RetryDelays((0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0), steady_s=60.0)
SERVING_STEADY_S = 10.0
"""Replaces `steady_s` once the cluster is up, because most deaths then have nothing to do with the
start."""


class Keeper:
    """`run` lasts as long as the process is wanted. `process` is the newest process."""

    def __init__(
        self,
        name: str,
        spawn: Callable[[], Awaitable[ChildProcess]],
        oom_kills: OomKills | None = None,
    ) -> None:
        """`oom_kills`: shared with the other keepers of this machine, so that each kill counts
        once."""
        self.name = name
        self.process: ChildProcess | None = None
        self.is_started = False
        """Whether the cluster is up. From then on the process is always started again after its
        end."""
        self.is_ending = False
        """Whether the cluster ends, so that no further process is started."""
        self.returns = False
        """Whether another process replaces the process that is about to leave."""
        self.is_leaving = False
        """Whether the process was told to leave, so that it is not replaced."""
        self.on_crash: Callable[[str], None] = lambda name: None
        """Called with the process's name when it has crashed (see `is_crash`)."""
        self._spawn = spawn
        self._oom_kills = oom_kills or OomKills()
        self._began_s = 0.0
        self._has_left = False
        self._successors = Successors(name, self._run_once, self._after, RESTARTS, log)

    @property
    def pid(self) -> int:
        """Process id, or 0 while no process runs."""
        process = self.process
        return 0 if process is None or process.returncode is not None else process.pid

    def kill(self, why: str) -> None:
        """Kills the process; another one takes its place."""
        if self.pid and self.process is not None:
            log.warning("%s %s; killing it", self.name, why)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    def leave(self) -> None:
        """Tells the process to end in an orderly way; no process replaces it."""
        self.is_leaving = True
        if self.pid and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    async def run(self) -> bool:
        """Keeps the process running; returns whether it has left in order. Raises OSError if none
        can start before the cluster is up."""
        await self._successors.run()
        return self._has_left

    async def _after(self, code: int | None) -> Next:
        if self.is_ending:
            return Next.NONE
        if self.is_leaving:
            return self._note_left()
        if is_crash(code, self._oom_kills.is_new()):
            self.on_crash(self.name)
        if code == 0 and self.returns:
            self.returns = False
            log.info("%s has left; another one starts in its place", self.name)
            return Next.AT_ONCE
        if code == 0:
            return self._note_left()
        steady_s = SERVING_STEADY_S if self.is_started else RESTARTS.steady_s
        if time.monotonic() - self._began_s > steady_s:
            return Next.AFTER_GOOD_LIFE
        if self._successors.num_deaths >= MAX_RESTARTS and not self.is_started:
            log.error("%s ended with code %s too often; giving up on it", self.name, code)
            return Next.NONE
        return Next.AFTER_DEATH

    def _note_left(self) -> Next:
        self._has_left = True
        log.info("%s has left the cluster", self.name)
        return Next.NONE

    async def _run_once(self) -> int | None:
        """Starts a process, and returns its status when it has ended, or None if it could not be
        started."""
        if self.is_ending:
            return None
        self._began_s = time.monotonic()
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
