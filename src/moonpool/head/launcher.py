"""Starts a cluster's workers as processes of this machine, and ends them with the supervisor.

A worker receives the cluster's secret through its environment, never on its command line. Each
worker runs in a separate session, so that Ctrl-C reaches only the supervisor; the head then ends
the workers in order. If the head dies, the workers stay and wait for the next head. If the
supervisor dies, the kernel ends the workers (`PR_SET_PDEATHSIG`). Arenas are anonymous memory, so
no memory is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from moonpool.children.process import ChildProcess, ForkedProcess
from moonpool.children.start import moonpool_line, start_child
from moonpool.config.tables import ClusterConfig, Config, EngineConfig
from moonpool.cores import CoreShare, format_cores
from moonpool.head.fork_server import ForkServer, ForkServerError
from moonpool.head.keeper import Keeper
from moonpool.head.memory_files import KeptMemoryFiles
from moonpool.head.watch.culprits import OomKills
from moonpool.types import InstanceId, Role

log = logging.getLogger("moonpool.launcher")

SECRET_VARIABLE = "MOONPOOL_CLUSTER_SECRET"  # noqa: S105 - its name, not its value
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# the role's name on the command line; the Conductor does not count such a worker as an instance
ATTENTION = "attention"
STOP_S = 3.0
KILLED_S = 5.0
"""A killed process that has not ended after this time hangs in a device driver's call that does not
return."""


def worker_environment(secret: bytes, threads: int) -> dict[str, str]:
    """Returns the variables that a worker's environment has in addition to its parent's."""
    return {SECRET_VARIABLE: secret.hex()} | dict.fromkeys(THREAD_VARIABLES, str(threads))


def _num_parts(engine: EngineConfig) -> dict[str, int]:
    """Returns the number of stages or ranks of an instance after the first, by role."""
    return {role.value: engine.degree(role).num_processes - 1 for role in Role}


def local_instances(cluster: ClusterConfig) -> list[tuple[Role, InstanceId]]:
    """Returns the instances that a local cluster starts, in the order of their start."""
    counts: Counter[Role] = Counter()
    found = []
    for role in cluster.roles:
        found.append((role, InstanceId(f"{role.value}-{counts[role]}")))
        counts[role] += 1
    return found


class LocalLauncher:
    """The worker processes of one local cluster. The launcher restarts a worker that dies."""

    def __init__(
        self,
        config: Config,
        head_port: int,
        secret: bytes,
        threads: int,
        shares: Sequence[CoreShare] = (),
        fork_server: ForkServer | None = None,
    ) -> None:
        """`shares`: the cores of each worker of the cluster's roles; if it is empty, no worker is
        pinned. Workers are forked from `fork_server`, or start as new interpreters without it."""
        cluster = config.cluster
        self._head = f"127.0.0.1:{head_port}"
        self._environment = os.environ | worker_environment(secret, threads)
        self._fork_server = fork_server
        self._flags = config.tls.flags()
        counts: Counter[Role] = Counter()
        self._wanted: list[tuple[str, str]] = []
        self._places: dict[str, tuple[str, ...]] = {}
        for role, name in local_instances(cluster):
            instance_id = str(name)
            self._wanted.append((role.value, instance_id))
            places = getattr(config.vllm, role.value)
            if places:
                self._places[instance_id] = ("--vllm", places[counts[role]])
            counts[role] += 1
        self.num_instances = len(self._wanted)
        self._cores: dict[str, tuple[str, ...]] = {}
        if shares:
            for (_, instance_id), share in zip(self._wanted, shares, strict=True):
                own, other = format_cores(share.engine), format_cores(share.others)
                self._cores[instance_id] = ("--cores", own, "--other-cores", other)
        self._wanted += [(ATTENTION, f"{ATTENTION}-{i}") for i in range(cluster.attention)]
        self._num_parts = _num_parts(config.engine)
        self._memory: dict[str, KeptMemoryFiles] = {}
        self._oom_kills = OomKills()
        self._kept = {
            name: Keeper(name, partial(self.spawn, role, name), self._oom_kills)
            for role, name in self._wanted
        }
        # tasks; each ends when it gives up on its worker
        self.keepers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._started = False
        self._listed: dict[str, tuple[Role, str]] = {}
        self._adopted: dict[str, int] = {}
        self.on_crash: Callable[[str], None] = lambda instance_id: None
        """Called with the name of a worker that has crashed (see `is_crash`)."""

    def start(self) -> None:
        """Begins to start all workers. One keeper task per worker restarts that worker."""
        for instance_id, keeper in self._kept.items():
            keeper.on_crash = self.on_crash
            name = f"keeper of {instance_id}"
            self.keepers.append(asyncio.create_task(self._keep(keeper), name=name))

    def add(self, name: str, role: Role, place: str) -> None:
        """Starts a worker of the vLLM server at `place`, beside those of the configuration. If a
        worker of the same name still drains, that worker keeps running."""
        self._listed[name] = (role, place)
        former = next((k for k in self.keepers if k.get_name() == f"keeper of {name}"), None)
        keeper = asyncio.create_task(self._keep_listed(name, former), name=f"keeper of {name}")
        self.keepers.append(keeper)

    def drain(self, name: str) -> None:
        """Lets a worker that `add` started leave in order, after its requests have ended."""
        self._listed.pop(name, None)
        if name in self._kept:
            self._kept[name].leave()

    @property
    def listed(self) -> dict[str, tuple[Role, str]]:
        return dict(self._listed)

    async def _keep_listed(self, name: str, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            await asyncio.wait([former])
            self.keepers.remove(former)
            self._kept.pop(name, None)
        if name not in self._listed:
            return  # the server has left again in the meantime
        role, place = self._listed[name]
        self._places[name] = ("--vllm", place)
        keeper = Keeper(name, partial(self.spawn, role.value, name), self._oom_kills)
        keeper.on_crash, keeper.is_started = self.on_crash, self._started
        if self._adopted.get(name):
            keeper.process = ForkedProcess(self._adopted.pop(name))
        self._kept[name] = keeper
        await self._keep(keeper)

    def adopt(self, workers: Mapping[str, int], memory: Mapping[str, tuple[int, int]]) -> None:
        """Continues with the workers of an earlier program of this process, in place of `start`."""
        self._memory = {name: KeptMemoryFiles(fds) for name, fds in memory.items()}
        self._kept = {name: keeper for name, keeper in self._kept.items() if name in workers}
        for name, keeper in self._kept.items():
            if workers[name]:
                keeper.process = ForkedProcess(workers[name])
        self._adopted = {name: pid for name, pid in workers.items() if name not in self._kept}
        self.note_started()
        self.start()

    def workers(self) -> dict[str, int]:
        """Returns the process ids of all workers that have not left; 0 for a worker that does not
        run."""
        left = {keeper.get_name() for keeper in self.keepers if keeper.done()}
        known = {name: keeper.pid for name, keeper in self._kept.items()}
        known |= {name: 0 for name in self._listed if name not in known}
        return {name: pid for name, pid in known.items() if f"keeper of {name}" not in left}

    def memory(self) -> dict[str, tuple[int, int]]:
        """Returns the memory files of the workers."""
        return {name: files.fds for name, files in self._memory.items()}

    def expect_return(self, instance_id: str, from_disk: bool = True) -> None:
        """Notes that the worker is about to leave, and that another one replaces it. If the
        replacement runs the code on disk, no more workers are forked from a process with the former
        code."""
        if from_disk:
            self._fork_server = None
        if instance_id in self._kept:
            self._kept[instance_id].returns = True

    @property
    def is_ending(self) -> bool:
        return self._stopping

    def expect_end(self) -> None:
        """Notes that the head stops the workers, so that no further worker is started."""
        self._stopping = True
        for keeper in self._kept.values():
            keeper.is_ending = True

    def note_started(self) -> None:
        """Notes that the cluster is up, so that no worker is given up from now on."""
        self._started = True
        for keeper in self._kept.values():
            keeper.is_started = True

    def kill(self, instance_id: str, why: str = "does not respond") -> None:
        """Kills a worker. The worker's keeper restarts it."""
        if instance_id in self._kept:
            self._kept[instance_id].kill(why)

    async def stop(self) -> None:
        """Waits for the workers to end, and kills workers that do not end.

        The head has sent the workers a stop, but a worker that is still starting has not joined
        yet.
        """
        self.expect_end()
        # The keepers are ended first, so that no further process starts. This also kills a process
        # that is being spawned.
        for keeper in self.keepers:
            keeper.cancel()
        await asyncio.gather(*self.keepers, return_exceptions=True)
        processes = [keeper.process for keeper in self._kept.values() if keeper.process]
        waits = [asyncio.ensure_future(process.wait()) for process in processes]
        if waits:
            await asyncio.wait(waits, timeout=STOP_S)
        for process in processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if waits:
            await asyncio.wait(waits, timeout=KILLED_S)
        for process, wait in zip(processes, waits, strict=True):
            if process.returncode is None:
                text = "process %d was killed and does not end: it waits for a device or is frozen"
                log.error(text, process.pid)
                wait.cancel()
        for instance_id in list(self._memory):
            self._forget_memory(instance_id)

    async def _keep(self, keeper: Keeper) -> None:
        if await keeper.run():
            self._forget_memory(keeper.name)

    def _kept_memory(self, role: str, instance_id: str) -> tuple[str, ...]:
        """Returns the flags that name the memory of this worker's predecessor, if it had any."""
        if role == ATTENTION or instance_id in self._places:
            return ()
        if instance_id not in self._memory:
            self._memory[instance_id] = KeptMemoryFiles()
        return ("--kept-memory", *self._memory[instance_id].paths)

    def _forget_memory(self, instance_id: str) -> None:
        memory = self._memory.pop(instance_id, None)
        if memory is not None:
            memory.close()

    async def spawn(self, role: str, instance_id: str) -> ChildProcess:
        """Starts a worker that no keeper restarts."""
        line = ["worker", "--role", role, "--name", instance_id, "--head", self._head]
        line += ["--exit-with-parent", *self._cores.get(instance_id, ())]
        line += [*self._flags, *self._places.get(instance_id, ())]
        line += self._kept_memory(role, instance_id)
        if self._fork_server is not None:
            num_parts = 0 if instance_id in self._places else self._num_parts.get(role, 0)
            parts = ("--parts", str(num_parts)) if num_parts else ()
            try:
                return await self._fork_server.fork([*line, *parts])
            except ForkServerError as error:
                log.debug("%s starts as a new interpreter: %s", instance_id, error)
        return await start_child(moonpool_line(*line), self._environment)
