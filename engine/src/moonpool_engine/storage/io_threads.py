"""The threads of a store: pools that run its I/O, and a watchdog for a disk that hangs.

A store has one pool to write and one to read, so that a prefill that waits for blocks does not
queue behind blocks that are being written. A disk hangs if it returns neither data nor an error:

    responsive --a group takes HANG_S--> hung: all running jobs end, no new job starts
    hung --every thread has returned, and the pause is over--> responsive

A thread in a kernel call cannot be interrupted, and a second one would only hang as well. So the
return of such a call shows that the disk responds. The pause doubles each time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

from moonpool_engine.storage.job import Job

HANG_S = 10.0
"""The time for 4 MiB after which a disk counts as hung: ten times what a worn-out hard disk takes
under load."""
PAUSE_S = 10.0
MAX_PAUSE_S = 600.0
CHECKS_PER_HANG = 10

Task = Callable[[], None]


class IoThreadPool:
    """Threads that take tasks from one bounded queue. Tasks must not raise. `max_tasks`: most tasks
    that may wait. `nice`: added to the threads' niceness, so that they yield to other threads if
    cores are scarce."""

    def __init__(self, name: str, num_threads: int, max_tasks: int, nice: int = 0) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._max_tasks = max_tasks
        self._nice = nice
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tasks: list[Task]) -> bool:
        """Queues all tasks, or none if too many would wait. An empty queue accepts any number."""
        waiting = self._tasks.qsize()
        if waiting and waiting + len(tasks) > self._max_tasks:
            return False
        for task in tasks:
            self._tasks.put(task)
        return True

    def close(self, timeout_s: float) -> bool:
        """Ends the threads after all submitted tasks. Returns False if a thread hangs."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # Linux sets the niceness per thread
            own = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, own) + self._nice
            os.setpriority(os.PRIO_PROCESS, own, nice)
        while (task := self._tasks.get()) is not None:
            task()


class ReadsFirst:
    """Delays writes while there are reads, because requests wait for reads. Thread-safe."""

    def __init__(self, most_s: float, pause_s: float) -> None:
        """`most_s`: longest time that a write waits, so that endless reads do not stop all writes.
        `pause_s`: how long a write waits for the next read after one has ended."""
        self._most_s, self._pause_s = most_s, pause_s
        self._changed = threading.Condition()
        self._num_reads = 0

    def begin(self) -> None:
        """Notes that a read has begun."""
        with self._changed:
            self._num_reads += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Notes that a read has ended."""
        with self._changed:
            self._num_reads -= 1
            if not self._num_reads:
                self._changed.notify_all()

    def wait(self) -> None:
        """Waits for the reads, and for reads that follow them, for at most `most_s`."""
        if not self._num_reads:
            return
        until_s = time.monotonic() + self._most_s
        with self._changed:
            while (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait_for(lambda: not self._num_reads, left_s)
                if not self._changed.wait_for(lambda: self._num_reads > 0, self._pause_s):
                    return


class IoWatchdog:
    """Watches the running jobs in a separate thread, and ends them if the disk hangs. That thread
    calls `pause` and `resume`."""

    def __init__(
        self, pause: Callable[[str], None], resume: Callable[[], None], hang_s: float = HANG_S
    ) -> None:
        self._pause = pause
        self._resume = resume
        self._hang_s = hang_s
        self._changed = threading.Condition()  # guards the fields below
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
        """Why no job may start, or "" if jobs may start."""
        return self._error

    def add(self, job: Job) -> bool:
        """Watches the job. Returns False while the disk hangs: the job must not start."""
        with self._changed:
            if self._error:
                return False
            if not self._jobs:
                self._changed.notify_all()
            self._jobs.add(job)
            return True

    def remove(self, job: Job) -> None:
        """Stops watching a job that has ended and has no running thread."""
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
            jobs = list(self._jobs)  # `add` refuses jobs from now on
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
