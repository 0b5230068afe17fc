"""Notices a disk that hangs: one that gives neither an answer nor an error.

    answering --a group takes HANG_S--> hung: all that is under way ends, nothing new is begun
    hung --every thread is back, and the pause is over--> answering

A thread inside the kernel cannot be called back, and to send another after it would only lose that
one too; so its coming back is the sign that the disk answers. The pause doubles each time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from moonpool.messenger.store.job import Job

HANG_S = 10.0
"""For 4 MiB, whatever else the disk does: ten times what a worn-out hard disk takes."""
PAUSE_S = 10.0
MAX_PAUSE_S = 600.0
CHECKS_PER_HANG = 10


class Watch:
    """Knows the jobs under way, and has a thread that looks at them while there are any. `pause`
    and `resume` are called from it."""

    def __init__(
        self, pause: Callable[[str], None], resume: Callable[[], None], hang_s: float = HANG_S
    ) -> None:
        self._pause = pause
        self._resume = resume
        self._hang_s = hang_s
        self._changed = threading.Condition()  # guards what follows
        self._jobs: set[Job] = set()
        self._hung: set[Job] = set()
        self._paused_until_s = 0.0
        self._pause_s = PAUSE_S
        self._error = ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)
        self._thread.start()

    @property
    def error(self) -> str:
        """Why nothing may be begun; "" if it may."""
        return self._error

    def add(self, job: Job) -> bool:
        """False while the disk hangs: then the job must not be begun."""
        with self._changed:
            if self._error:
                return False
            if not self._jobs:
                self._changed.notify_all()
            self._jobs.add(job)
            return True

    def remove(self, job: Job) -> None:
        """It has ended, and no thread is in it any more."""
        with self._changed:
            self._jobs.discard(job)
            self._hung.discard(job)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(1.0)

    def _run(self) -> None:
        step_s = self._hang_s / CHECKS_PER_HANG
        while True:
            with self._changed:
                if self._closing:
                    return
                self._changed.wait(step_s if self._jobs or self._error else None)
                jobs = list(self._jobs)
            now_s = time.monotonic()
            if self._error:
                self._try_again(now_s)
            elif any(_since_s(job, now_s) >= self._hang_s for job in jobs):
                self._give_up(jobs, now_s)

    def _give_up(self, jobs: list[Job], now_s: float) -> None:
        error = f"the disk has not answered for {self._hang_s:.0f} s"
        with self._changed:
            self._error = error
            self._paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            jobs = list(self._jobs)  # none is added from now on
        self._pause(error)
        for job in jobs:
            job.abandon(error)
            with self._changed:
                if job in self._jobs:
                    self._jobs.discard(job)
                    if job.moving_since_s() is not None:
                        self._hung.add(job)

    def _try_again(self, now_s: float) -> None:
        with self._changed:
            self._hung = {job for job in self._hung if job.moving_since_s() is not None}
            if self._hung or now_s < self._paused_until_s:
                return
            self._error = ""
        self._resume()


def _since_s(job: Job, now_s: float) -> float:
    began_s = job.moving_since_s()
    return 0.0 if began_s is None else now_s - began_s
