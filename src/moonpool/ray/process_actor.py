"""The base of all actors: one actor of Ray keeps one process of the cluster running.

The process is the same command line that a person would type. The process ends with its actor: if
Ray loses the actor or its node, Ray starts another actor in the same place of a placement group. A
process that dies alone is started again by its actor, at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import ray

from moonpool.children.process import ChildProcess
from moonpool.children.start import start_child
from moonpool.children.stopped import StopNotice, StoppedProcesses
from moonpool.head.keeper import Keeper

log = logging.getLogger("moonpool.ray")

LEAVE_S = 10.0
"""How much longer than its drain a process may take to end."""


class ProcessActor(ABC):
    """Made by Ray on a loop, which runs as long as the actor."""

    def __init__(self, name: str, environment: Mapping[str, str]) -> None:
        """`environment`: the variables that the process gets in addition to those of the actor."""
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level="INFO")
        self._name = name
        self._environment = os.environ | environment
        self._host = _node_address()
        self._keepers: list[Keeper] = []
        self._tasks: list[asyncio.Task[bool]] = []
        self._is_again = _is_again()
        self._loop = asyncio.get_event_loop()
        self._watch = self._loop.create_task(self._watch_stopped())

    def __repr__(self) -> str:
        """How Ray names this actor in front of its lines in the log."""
        return self._name

    async def pid(self) -> int:
        """The process that is kept; 0 while none runs."""
        return self._keepers[0].pid if self._keepers else 0

    async def has_failed(self) -> bool:
        """Whether the process could not be kept running at the start of the cluster."""
        return any(task.done() and not task.result() for task in self._tasks)

    async def note_started(self) -> None:
        """Notes that the cluster is up, so that no process is given up from now on."""
        for keeper in self._keepers:
            keeper.is_started = True

    async def leave(self, within_s: float) -> None:
        """Lets the processes end in an orderly way, one after the other: a worker drains while its
        vLLM still computes. Starts no further ones."""
        for keeper in self._keepers:
            keeper.is_ending = True
        for keeper, task in zip(self._keepers, self._tasks, strict=True):
            if keeper.pid:
                os.kill(keeper.pid, signal.SIGTERM)
            else:
                task.cancel()
            await asyncio.wait([task], timeout=within_s + LEAVE_S)

    def _keep(self, name: str) -> Keeper:
        """Begins to keep the process that `_spawn` starts under this name."""
        keeper = Keeper(name, partial(self._spawn, name))
        keeper.is_started = self._is_again
        self._keepers.append(keeper)
        self._tasks.append(self._loop.create_task(keeper.run()))
        return keeper

    @abstractmethod
    async def _spawn(self, name: str) -> ChildProcess:
        """Starts the process of this name."""

    async def _start(
        self, line: Sequence[str], flags: Sequence[str] = ()
    ) -> asyncio.subprocess.Process:
        """Starts a program that ends with this actor. `flags`: those of `moonpool.ray.child`."""
        child = [sys.executable, "-m", "moonpool.ray.child", *flags, str(os.getpid())]
        return await start_child([*child, *line], self._environment)

    async def _watch_stopped(self) -> None:
        """Replaces a process that a signal has stopped."""
        notice, stopped = StopNotice(), StoppedProcesses()
        while True:
            await notice.wait(stopped.any_stopped)
            watched = {keeper.pid: keeper for keeper in self._keepers if keeper.pid}
            for pid in stopped.look(watched):
                watched[pid].kill("is stopped by a signal (SIGSTOP)")


def _is_again() -> bool:
    """Whether this actor takes the place of a lost one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray asks itself by a deprecated name
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _node_address() -> str:
    """Returns this node's address, as Ray was told it."""
    own = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)
