"""Processes that run trials in parallel; outcomes come back in the order of the trials.

The number of processes changes only the time. Each is spawned and receives the workload once; with
one process, none is spawned. Outcomes are kept, so no trial runs twice.

`concurrent.futures.ProcessPoolExecutor` does not fit: a trial may take minutes, and on Ctrl-C or an
error the executor waits for running trials, since Python before 3.14 cannot terminate its workers.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType

from moonpool.gc_tuning import rare_collections
from moonpool.plan.trial import Outcome, StopRequestedError, Trial, Workload, run_trial

POLL_S = 0.2


class WorkforceError(RuntimeError):
    """A process ended before its trial was done."""


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workforce:
    """Processes that simulate; they end with the `with` block."""

    def __init__(self, workload: Workload, num_processes: int) -> None:
        assert num_processes >= 1
        self.num_run = 0
        self._workload = workload
        self._num_processes = num_processes
        self._known: dict[Trial, Outcome] = {}
        self._idle: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Workforce:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def run(
        self,
        trials: Sequence[Trial],
        report: Callable[[int], None] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Outcome]:
        """Returns the outcomes in order; `report` is called with the number of new ones so far.

        Raises StopRequestedError once `stop` says so. Nothing can be run after that.
        """
        new = list(dict.fromkeys(trial for trial in trials if trial not in self._known))
        if self._num_processes == 1 or (len(new) == 1 and not self._processes):
            with rare_collections():
                for done, trial in enumerate(new, 1):
                    self._known[trial] = run_trial(trial, self._workload, stop)
                    report(done)
        elif new:
            self._run_in_processes(new, report, stop)
        self.num_run += len(new)
        return [self._known[trial] for trial in trials]

    def _run_in_processes(
        self, new: list[Trial], report: Callable[[int], None], stop: Callable[[], bool]
    ) -> None:
        self._start(min(len(new), self._num_processes))
        waiting = deque(new)
        under_way: dict[Connection, Trial] = {}
        done = 0
        while waiting or under_way:
            while waiting and self._idle:
                line = self._idle.pop()
                under_way[line] = waiting.popleft()
                line.send(under_way[line])
            ready = wait(list(under_way), POLL_S)
            if stop():
                raise StopRequestedError
            for line in [line for line in under_way if line in ready]:
                try:
                    self._known[under_way.pop(line)] = line.recv()
                except EOFError:
                    raise WorkforceError(
                        "a simulating process ended early, perhaps by lack of memory: use fewer"
                        " with --processes"
                    ) from None
                self._idle.append(line)
                done += 1
                report(done)

    def _start(self, number: int) -> None:
        context = get_context("spawn")
        while len(self._processes) < number:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(self._workload, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._idle.append(here)


def _serve(workload: Workload, line: Connection) -> None:
    """Runs trials until the parent ends this process or has ended itself."""
    try:
        with rare_collections():
            while True:
                line.send(run_trial(line.recv(), workload))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return
