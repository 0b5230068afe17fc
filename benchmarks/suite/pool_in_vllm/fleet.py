"""Two vLLMs and the pool under them, which can be killed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import TracebackType

from benchmarks.suite.live.vllm_server import END_S, VllmServer, cpu_sizes
from benchmarks.suite.pool_in_vllm.pools import Pool
from moonpool.types import Struct
from moonpool_lab.demo.local_server import ServerError

NUM_VLLMS = 2


class VllmShape(Struct, frozen=True):
    """The options of each vLLM."""

    model: str
    kv_tokens: int
    context_tokens: int
    chunk_tokens: int
    caches: bool = True


class GroupedVllm(VllmServer):
    """A vLLM whose processes are a group, so that all of them die at once."""

    def start(
        self, line: list[str], log: int, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )

    def stop(self, sign: signal.Signals = signal.SIGTERM, wait_s: float = END_S) -> int:
        """Like `VllmServer.stop`, and kills all other processes of the group."""
        try:
            return super().stop(sign, wait_s)
        finally:
            self._kill_group()

    def kill(self) -> None:
        self._kill_group()
        super().kill()

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def pooled_vllm(python: str, shape: VllmShape, core: int, pool: Pool | None) -> GroupedVllm:
    """A vLLM on this core above the pool, if there is one. Raises ServerError."""
    flags = ["--enforce-eager"]
    if not shape.caches:
        flags.append("--no-enable-prefix-caching")
    connector = None if pool is None else pool.connector()
    if connector is not None:
        flags += ["--kv-transfer-config", json.dumps(connector)]
    options = cpu_sizes(shape.kv_tokens, shape.context_tokens, shape.chunk_tokens)
    environment = {} if pool is None else pool.environment()
    return GroupedVllm(python, shape.model, str(core), options, flags, environment)


class Fleet:
    """The vLLMs of a run; they run during a `with` block. Raises ServerError."""

    def __init__(self, python: str, pool: Pool, shape: VllmShape) -> None:
        self.pool = pool
        self._python, self._shape = python, shape
        self._cores = sorted(os.sched_getaffinity(0))
        if len(self._cores) < NUM_VLLMS:
            raise ServerError("two vLLMs need two cores")
        self._vllms: dict[int, GroupedVllm] = {}

    def __enter__(self) -> Fleet:
        try:
            self.pool.start()
            self._start(range(NUM_VLLMS))
        except BaseException:
            self._end(GroupedVllm.kill)
            self.pool.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._end(GroupedVllm.stop if kind is None else GroupedVllm.kill)
        finally:
            self.pool.stop()

    @property
    def urls(self) -> list[str]:
        return [self._vllms[number].url for number in sorted(self._vllms)]

    def restart_one(self) -> None:
        """`kill -9` of the first vLLM, which then starts again."""
        self._vllms.pop(0).kill()
        self._start((0,))

    def restart_all(self) -> None:
        """`kill -9` of both vLLMs and of the pool's processes; all start again."""
        self._end(GroupedVllm.kill)
        self.pool.kill()
        self.pool.start()
        self._start(range(NUM_VLLMS))

    def _start(self, numbers: Sequence[int]) -> None:
        """Starts these vLLMs in parallel. If one fails to start, the others are still kept, so that
        they can be ended."""
        made = self._python, self._shape
        fresh = {n: pooled_vllm(*made, self._cores[n], self.pool) for n in numbers}
        with ThreadPoolExecutor(len(fresh)) as threads:
            starts = {number: threads.submit(vllm.__enter__) for number, vllm in fresh.items()}
        for number, start in starts.items():
            if start.exception() is None:
                self._vllms[number] = fresh[number]
        for start in starts.values():
            start.result()

    def _end(self, end: Callable[[GroupedVllm], object]) -> None:
        """Ends all vLLMs, even if one of them fails to end in order."""
        with ExitStack() as stack:
            for vllm in self._vllms.values():
                stack.callback(end, vllm)
            self._vllms.clear()
