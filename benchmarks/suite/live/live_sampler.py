"""Watches a live cluster while it is loaded: both pools' load, queues, memory; twice a second.

Samples in a separate thread, so that the replay's loop is not delayed: reads `/metrics`, and the
processes' memory from the kernel.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import httpx

from benchmarks.suite.live.cpu_steal import BackgroundLoad
from benchmarks.suite.live.machine_speed import loop_s
from moonpool.types import Struct
from moonpool_lab.demo.local_server import LocalServer
from moonpool_lab.replay.server import parse_metrics

SAMPLE_S = 0.5


class LoadSample(Struct, frozen=True):
    """Loads are predicted over promised latency, as `Conductor.loads` has them."""

    at_s: float
    prefill_load: float
    decode_load: float
    running: float
    waiting: float
    head_bytes: int
    worker_bytes: int  # the largest worker's, shared memory included


class LoadSampler:
    """Use it as a context around the load on a running server, which must be idle at the start and
    the end. Then read `samples`, `neighbours_share` (the share of the processors that other
    processes used) and `machine_loop_s` (the machine's speed, see `machine_speed`)."""

    def __init__(self, server: LocalServer, every_s: float = SAMPLE_S) -> None:
        self.samples: list[LoadSample] = []
        self.neighbours_share = 0.0
        self.machine_loop_s = loop_s()
        self._server = server
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> LoadSampler:
        self._workers = self._server.worker_pids()
        ours = [self._server.pid, *self._workers, *self._server.attention_pids()]
        self._neighbours = BackgroundLoad(ours)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.neighbours_share = self._neighbours.share()
        self._stop.set()
        self._thread.join(10)
        self.machine_loop_s = (self.machine_loop_s + loop_s()) / 2

    def _run(self) -> None:
        began_s = time.monotonic()
        with httpx.Client(base_url=self._server.url, timeout=10) as client:
            while not self._stop.wait(self._every_s):
                try:
                    text = client.get("/metrics").text
                except httpx.HTTPError:
                    continue
                self.samples.append(self._sample(time.monotonic() - began_s, text))

    def _sample(self, at_s: float, text: str) -> LoadSample:
        found = parse_metrics(text)
        return LoadSample(
            at_s=at_s,
            prefill_load=found.get("moonpool:pool_load{prefill}", 0.0),
            decode_load=found.get("moonpool:pool_load{decode}", 0.0),
            running=found.get("vllm:num_requests_running", 0.0),
            waiting=found.get("vllm:num_requests_waiting", 0.0),
            head_bytes=resident_bytes(self._server.pid),
            worker_bytes=max(map(resident_bytes, self._workers), default=0),
        )


def resident_bytes(pid: int) -> int:
    """Returns the resident bytes of a process, as Linux tells; 0 if the process is gone or Linux
    does not tell."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0
