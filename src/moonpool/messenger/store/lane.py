"""Threads that take work from one bounded queue. A store has one lane to write and one to read, so
that a prefill that waits for blocks does not stand behind those that are being put away."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable

Task = Callable[[], None]


class Lane:
    """`num_threads` threads; at most `max_tasks` wait. Tasks must not raise. `nice`: by how much
    the threads give way to the process's others where cores are short."""

    def __init__(self, name: str, num_threads: int, max_tasks: int, nice: int = 0) -> None:
        self._tasks: queue.Queue[Task | None] = queue.Queue()
        self._max_tasks = max_tasks
        self._nice = nice
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, tasks: list[Task]) -> bool:
        """All of them, or none if so many may not wait. A lane that is empty takes any number."""
        waiting = self._tasks.qsize()
        if waiting and waiting + len(tasks) > self._max_tasks:
            return False
        for task in tasks:
            self._tasks.put(task)
        return True

    def close(self, timeout_s: float) -> bool:
        """Ends the threads once all that was submitted is done; False if one hangs."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # Linux has a niceness for each thread
            own = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, own) + self._nice
            os.setpriority(os.PRIO_PROCESS, own, nice)
        while (task := self._tasks.get()) is not None:
            task()
