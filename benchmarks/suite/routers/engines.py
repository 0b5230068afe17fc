"""The instances behind all routers: stubs with a model of time, or vLLMs on this machine's CPUs."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import httpx

from benchmarks.checkout import ROOT
from benchmarks.suite.live.vllm_server import CPU_BLOCK_TOKENS, VllmServer, cpu_sizes
from moonpool.types import Struct
from moonpool_lab.demo.local_server import LocalServer, ServerError, free_port

STUB_MODEL = "random:hidden=64,layers=1,heads=2,kv_heads=1,inter=64,vocab=1024"
STUB_BLOCK_TOKENS = 16
_COUNTER = r"^vllm:{}_total\{{.*?\}} (\S+)$"


class EngineFleet(Struct, frozen=True):
    """`speeds`: the slowdown of each instance, 1 for the fastest; vLLMs are all equal.
    `vllm_python`: "" takes stubs."""

    model: str = STUB_MODEL
    vllm_python: str = ""
    speeds: tuple[float, ...] = (1.0, 1.0, 1.0)
    kv_tokens: int = 32_768
    step_tokens: int = 512
    longest_tokens: int = 16_384

    @property
    def block_tokens(self) -> int:
        return CPU_BLOCK_TOKENS if self.vllm_python else STUB_BLOCK_TOKENS


class RunningEngine(Struct, frozen=True):
    """`events`, `replay`: the addresses of its KV events."""

    url: str
    events: str
    replay: str

    @property
    def place(self) -> str:
        """The address in the form that `serve --vllm` takes."""
        return f"{self.url},{self.events},{self.replay}"


@contextmanager
def start_engines(fleet: EngineFleet) -> Iterator[list[RunningEngine]]:
    """Raises ServerError."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    if fleet.vllm_python and len(cores) < len(fleet.speeds):
        raise ServerError(f"{len(fleet.speeds)} vLLMs need as many cores; there are {len(cores)}")
    with ExitStack() as stack:
        engines = []
        for number, speed in enumerate(fleet.speeds):
            events, replay = free_port(), free_port()
            server = (
                _vllm(fleet, cores[number], events, replay)
                if fleet.vllm_python
                else StubProcess(fleet, speed, events, replay)
            )
            stack.enter_context(server)
            engines.append(
                RunningEngine(server.url, f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
            )
        yield engines


class StubProcess(LocalServer):
    def __init__(self, fleet: EngineFleet, factor: float, events: int, replay: int) -> None:
        super().__init__(())
        given = {
            "--port": self.port,
            "--model": fleet.model,
            "--factor": factor,
            "--events-port": events,
            "--replay-port": replay,
            "--block-tokens": fleet.block_tokens,
            "--kv-tokens": fleet.kv_tokens,
            "--step-tokens": fleet.step_tokens,
            "--max-model-tokens": fleet.longest_tokens,
        }
        words = [str(word) for pair in given.items() for word in pair]
        self._arguments = [sys.executable, "-m", "benchmarks.suite.routers.stub_server", *words]
        before = self._environment.get("PYTHONPATH")
        self._environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))


def _vllm(fleet: EngineFleet, core: str, events: int, replay: int) -> VllmServer:
    told = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",  # vLLM only listens at a wildcard, and connects to others
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
    }
    options = cpu_sizes(fleet.kv_tokens, fleet.longest_tokens, fleet.step_tokens)
    flags = ("--kv-events-config", json.dumps(told))
    environment = {"VLLM_SERVER_DEV_MODE": "1"}  # vLLM then offers the reset of its cache
    return VllmServer(fleet.vllm_python, fleet.model, core, options, flags, environment)


def counters(engines: Sequence[RunningEngine]) -> dict[str, float]:
    """Returns the sums of all instances' counters. Raises httpx.HTTPError."""
    texts = [httpx.get(f"{engine.url}/metrics", timeout=30).text for engine in engines]
    names = ("prefix_cache_queries", "prefix_cache_hits", "num_preemptions")
    return {
        name: sum(float(n) for text in texts for n in re.findall(_COUNTER.format(name), text, re.M))
        for name in names
    }
