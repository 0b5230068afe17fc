"""The actors of instances: with moonpool's engine, with vLLM, and attention workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import socket
from collections.abc import Mapping, Sequence

from moonpool.children.process import ChildProcess
from moonpool.children.start import moonpool_line
from moonpool.head.memory_files import KeptMemoryFiles
from moonpool.ray.demands import ATTENTION
from moonpool.ray.head_finder import HeadFinder, HeadPlace
from moonpool.ray.pool_place import pool_environment
from moonpool.ray.process_actor import ProcessActor

log = logging.getLogger("moonpool.ray")

LOOK_S = 0.5
SAY_LOOKS = 20
"""Searches for a head between two lines of the log."""


class WorkerActor(ProcessActor):
    """Keeps `moonpool worker` running, and its KVCache in memory while the worker restarts."""

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        role: str,
        flags: Sequence[str],
        heads: Sequence[str],
    ) -> None:
        """`heads`: the names of the head actors."""
        super().__init__(name, environment)
        self._role = role
        self._flags = tuple(flags)
        self._heads = HeadFinder(heads)
        self._memory = None if role == ATTENTION or self._is_external else KeptMemoryFiles()
        self._keep(name)

    @property
    def _is_external(self) -> bool:
        """Whether another process than the worker computes."""
        return False

    async def _spawn(self, name: str) -> ChildProcess:
        leader = await self._leader()
        line = ["worker", "--role", self._role, "--name", name.rpartition("/")[2]]
        line += ["--head", f"{leader.host}:{leader.port}", "--host", self._host, *self._flags]
        if self._memory is not None:
            line += ["--kept-memory", *self._memory.paths]
        return await self._start(moonpool_line(*line))

    async def _leader(self) -> HeadPlace:
        """Waits for a head that leads."""
        num_looks = 0
        while True:
            place = await self._heads.leader()
            if place is not None:
                return place
            if num_looks % SAY_LOOKS == SAY_LOOKS - 1:
                log.info("waiting for a head")
            num_looks += 1
            await asyncio.sleep(LOOK_S)


class VllmActor(WorkerActor):
    """Keeps a vLLM server running, and `moonpool worker --vllm` in front of it."""

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        role: str,
        flags: Sequence[str],
        heads: Sequence[str],
        command: str,
    ) -> None:
        """`command`: `ray.vllm_command`."""
        port, events_port = _free_ports(2)
        self._server = name + "/vllm"
        place = f"http://127.0.0.1:{port}"
        if "{events_port}" in command:
            place += f",tcp://127.0.0.1:{events_port}"
        named = {"{port}": str(port), "{events_port}": str(events_port)}
        for key, value in named.items():
            command = command.replace(key, value)
        self._command = shlex.split(command)
        environment = {**environment, **pool_environment(name.partition("/")[0])}
        super().__init__(name, environment, role, [*flags, "--vllm", place], heads)
        self._keep(self._server)

    @property
    def _is_external(self) -> bool:
        return True

    async def _spawn(self, name: str) -> ChildProcess:
        if name == self._server:
            return await self._start(self._command, ["--group"])
        return await super()._spawn(name)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in socks:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in socks]
