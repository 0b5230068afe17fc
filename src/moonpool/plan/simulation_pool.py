"""Runs trials in parallel processes, and returns outcomes in the order of the trials.

The number of processes changes only the time. Each process is spawned and receives the workload
once. With one process, the trials run in the caller's process. Outcomes are kept, so no trial runs
twice.

A search mostly waits for one trial, whose outcome decides the next one. Meanwhile the other
processes run trials *ahead*, which the search will probably ask for. A trial that ran ahead counts
as run only once the search asks for it. So trials ahead change neither the search nor its number of
runs. A trial ahead stops if a trial that the search asked for has no process.

`concurrent.futures.ProcessPoolExecutor` does not fit: a trial may take minutes, and on Ctrl-C or an
error the executor waits for running trials, because it cannot terminate its workers before Python
3.14.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from moonpool.gc_tuning import rare_collections
from moonpool.plan.trial import Outcome, StopRequestedError, Trial, Workload, run_trial

POLL_S = 0.2


class SimulationPoolError(RuntimeError):
    """Says that a process ended before its trial was done."""


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class SimulationPool:
    """Owns the processes that simulate. The processes end with the `with` block."""

    def __init__(self, workload: Workload, num_processes: int) -> None:
        assert num_processes >= 1
        self._workload = workload
        self._num_processes = num_processes
        self._known: dict[Trial, Outcome] = {}
        self._asked: set[Trial] = set()
        self._idle: list[Connection] = []
        self._under_way: dict[Connection, Trial] = {}
        self._told_to_stop: set[Connection] = set()
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> SimulationPool:
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    @property
    def num_run(self) -> int:
        """The number of trials that were asked for and have run."""
        return len(self._asked)

    def run(
        self,
        trials: Sequence[Trial],
        report: Callable[[int], None] = lambda done: None,
        stop: Callable[[], bool] = lambda: False,
        ahead: Sequence[Trial] = (),
    ) -> list[Outcome]:
        """Returns the outcomes in order. Calls `report` with the number of new outcomes so far.
        Idle processes run the trials `ahead`, which the search may ask for next; the likeliest
        comes first.

        Raises StopRequestedError once `stop` says so. The pool runs no trial after that.
        """
        new = [trial for trial in dict.fromkeys(trials) if trial not in self._asked]
        if self._num_processes == 1 or (len(new) == 1 and not ahead and not self._processes):
            with rare_collections():
                for done, trial in enumerate(new, 1):
                    self._known[trial] = run_trial(trial, self._workload, stop)
                    report(done)
        elif new:
            self._run_in_processes(new, report, stop, ahead)
        self._asked.update(new)
        return [self._known[trial] for trial in trials]

    def _run_in_processes(
        self,
        new: list[Trial],
        report: Callable[[int], None],
        stop: Callable[[], bool],
        ahead: Sequence[Trial],
    ) -> None:
        self._start(min(len(new) + len(ahead), self._num_processes))
        left, done = new, 0
        while left:
            waiting = self._not_begun(left)
            self._make_room(len(waiting), left)
            for trial in (*waiting, *self._not_begun(ahead)):
                if self._idle:
                    line = self._idle.pop()
                    self._under_way[line] = trial
                    line.send(trial)
            ready = wait(list(self._under_way), POLL_S)
            if stop():
                raise StopRequestedError
            for line in [line for line in self._under_way if line in ready]:
                self._take_outcome(line)
            left = [trial for trial in left if trial not in self._known]
            if len(new) - len(left) > done:
                done = len(new) - len(left)
                report(done)

    def _not_begun(self, trials: Iterable[Trial]) -> list[Trial]:
        """Returns the trials that no process runs or has run."""
        begun = {trial for line, trial in self._under_way.items() if line not in self._told_to_stop}
        return [trial for trial in trials if trial not in self._known and trial not in begun]

    def _make_room(self, num_waiting: int, asked: Sequence[Trial]) -> None:
        """Stops trials that were not asked for, so that each asked trial gets a process."""
        lacking = num_waiting - len(self._idle) - len(self._told_to_stop)
        for line, trial in self._under_way.items():
            if lacking > 0 and trial not in asked and line not in self._told_to_stop:
                line.send(None)
                self._told_to_stop.add(line)
                lacking -= 1

    def _take_outcome(self, line: Connection) -> None:
        """Receives a process's answer to its trial: an outcome, or None if the trial stopped."""
        try:
            outcome = line.recv()
        except (EOFError, ConnectionResetError):
            raise SimulationPoolError(
                "a simulating process ended early, perhaps by lack of memory: use fewer with"
                " --processes"
            ) from None
        trial = self._under_way.pop(line)
        self._told_to_stop.discard(line)
        self._idle.append(line)
        if outcome is not None:
            self._known[trial] = outcome

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
    """Runs trials until the parent ends this process or has ended. A None from the parent stops the
    trial under way; a None after the trial's end has no effect."""
    try:
        with rare_collections():
            while True:
                trial = line.recv()
                if trial is not None:
                    line.send(_outcome_unless_stopped(trial, workload, line))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return


def _outcome_unless_stopped(trial: Trial, workload: Workload, line: Connection) -> Outcome | None:
    def told_to_stop() -> bool:
        return line.poll() and line.recv() is None

    try:
        return run_trial(trial, workload, told_to_stop)
    except StopRequestedError:
        return None
