"""Starts a cluster's workers as processes of this machine, and sees that none outlives the head.

A worker gets the cluster's secret by its environment, never on its command line. It runs in a
session of its own, so that Ctrl-C reaches only the head, which then ends the workers in order; if
the head dies without a word, the kernel ends them (`PR_SET_PDEATHSIG`). Arenas are anonymous
memory: nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from moonpool.config import ClusterConfig, VllmConfig
from moonpool.runtime.cores import CoreShare, format_cores
from moonpool.runtime.nursery import ForkedProcess, Nursery, NurseryError
from moonpool.types import Role

log = logging.getLogger("moonpool.launcher")

SECRET_VARIABLE = "MOONPOOL_CLUSTER_SECRET"  # noqa: S105 - its name, not its value
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
ATTENTION = "attention"  # on the command line; to the Conductor it is no instance
MAX_RESTARTS = 5
STEADY_S = 60.0
"""A worker that lived this long had started well: its restarts are counted anew."""
STOP_S = 3.0

WorkerProcess = ForkedProcess | asyncio.subprocess.Process


def worker_environment(secret: bytes, threads: int) -> dict[str, str]:
    """What a worker's environment has beyond the head's."""
    return {SECRET_VARIABLE: secret.hex()} | dict.fromkeys(THREAD_VARIABLES, str(threads))


class LocalLauncher:
    """The worker processes of one local cluster. A worker that dies is started anew, a few
    times."""

    def __init__(
        self,
        cluster: ClusterConfig,
        head_port: int,
        secret: bytes,
        threads: int,
        shares: Sequence[CoreShare] = (),
        nursery: Nursery | None = None,
        vllm: VllmConfig | None = None,
    ) -> None:
        """`shares` of the cores, one per worker as in `cluster.roles`; none: nothing is pinned.
        Workers are forked from `nursery`, or else are interpreters of their own. `vllm`: those that
        they stand before, if any."""
        self._head = f"127.0.0.1:{head_port}"
        self._environment = os.environ | worker_environment(secret, threads)
        self._nursery = nursery
        counts: Counter[Role] = Counter()
        self._wanted: list[tuple[str, str]] = []
        self._places: dict[str, tuple[str, ...]] = {}
        for role in cluster.roles:
            instance_id = f"{role.value}-{counts[role]}"
            self._wanted.append((role.value, instance_id))
            places = () if vllm is None else getattr(vllm, role.value)
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
        self._processes: dict[str, WorkerProcess] = {}
        self.keepers: list[asyncio.Task[None]] = []  # each ends when it gives its worker up
        self._stopping = False

    def start(self) -> None:
        """Begins to start all workers; a keeper task looks after each."""
        for role, instance_id in self._wanted:
            self.keepers.append(asyncio.create_task(self._keep(role, instance_id)))

    def kill(self, instance_id: str) -> None:
        """Ends a worker that stands still, which then is started anew."""
        process = self._processes.get(instance_id)
        if process is not None and process.returncode is None:
            log.warning("%s stands still; it is killed", instance_id)
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def stop(self) -> None:
        """Waits for the workers, which the head has told to end, and kills those that do not: one
        that is still starting has not joined yet. Nothing is lost by it."""
        self._stopping = True
        # First, so that no process comes up behind our back: one being spawned is killed by it.
        for keeper in self.keepers:
            keeper.cancel()
        await asyncio.gather(*self.keepers, return_exceptions=True)
        processes = list(self._processes.values())
        waits = [asyncio.ensure_future(process.wait()) for process in processes]
        if waits:
            await asyncio.wait(waits, timeout=STOP_S)
        for process in processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        await asyncio.gather(*waits)
        if self._nursery is not None:
            await self._nursery.close()

    async def _keep(self, role: str, instance_id: str) -> None:
        restarts = 0
        while not self._stopping:
            process = await self._spawn(role, instance_id)
            self._processes[instance_id] = process
            began_s = time.monotonic()
            code = await process.wait()
            if self._stopping:
                return
            if code == 0:
                log.info("%s has left, as it was told to", instance_id)
                return
            if time.monotonic() - began_s > STEADY_S:
                restarts = 0
            if restarts == MAX_RESTARTS:
                log.error("%s ended with code %d too often; it stays down", instance_id, code)
                return
            restarts += 1
            log.warning("%s ended with code %d; starting it anew", instance_id, code)
            await asyncio.sleep(min(0.5 * 2**restarts, 10.0))

    async def _spawn(self, role: str, instance_id: str) -> WorkerProcess:
        line = ["worker", "--role", role, "--name", instance_id, "--head", self._head]
        line += ["--exit-with-head", *self._cores.get(instance_id, ())]
        line += self._places.get(instance_id, ())
        if self._nursery is not None:
            try:
                return await self._nursery.fork(line)
            except NurseryError as error:
                log.debug("%s is started by itself: %s", instance_id, error)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "moonpool",
            *line,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
