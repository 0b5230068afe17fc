"""The machine of the head is lost, and a standby takes over: a row of `moonpool bench faults`.

Head, standby and workers are started one by one, as on several machines. Clients go on at the other
address with the id of the last event that they have, as docs/operating.md shows.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import msgspec

from benchmarks.errors import BenchError
from benchmarks.suite.live.fault_streams import MODEL, RECOVERY_S, SIZES, FaultStreams, fault_row
from benchmarks.suite.live.idle import family
from moonpool_lab.demo.local_server import free_port

START_S = 120.0
NAME = "the head's machine lost, with a standby on another"
PROMISED = "every answer right: its client goes on at the standby"


class StandbyPair:
    """A head, its standby, a prefill and a decode instance; ended by `close`."""

    def __init__(self) -> None:
        self._environment = os.environ | {"MOONPOOL_CLUSTER_SECRET": secrets.token_hex(32)}
        self._processes: list[subprocess.Popen[bytes]] = []
        port, standby_port, head_port = free_port(), free_port(), free_port()
        self.urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{standby_port}"]
        head = f"127.0.0.1:{head_port}"
        try:
            ports = ("--head-port", str(head_port), "--port", str(port))
            self._first = self._start("head", MODEL, *SIZES, *ports)
            for role in ("prefill", "decode"):
                self._start("worker", "--role", role, "--head", head)
            self._await(lambda found: len(found["instances"]) == 2)
            ports = ("--head-port", str(free_port()), "--port", str(standby_port))
            self._start("head", "--standby-of", head, *ports)
            self._await(lambda found: len(found["standbys"]) == 1)
        except BaseException:
            self.close()
            raise

    def lose_first(self) -> None:
        """Kills the supervisor, the head and all their children at once."""
        self._first.send_signal(signal.SIGSTOP)  # it must not start another head
        for pid in family(self._first.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        pids = [pid for process in self._processes for pid in _family_of(process)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", "moonpool", *arguments]
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )
        self._processes.append(process)
        return process

    def _await(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if holds(httpx.get(f"{self.urls[0]}/cluster", timeout=10).json()):
                    return
            if time.monotonic() > deadline:
                raise BenchError(f"head, workers and standby are not up after {START_S:.0f} s")
            time.sleep(0.1)


def _family_of(process: subprocess.Popen[bytes]) -> Sequence[int]:
    try:
        return [process.pid, *family(process.pid)]
    except OSError:  # the process has ended
        return [process.pid]


class ResumingStreams(FaultStreams):
    """Streams whose clients know both addresses and go on from the last event that they have."""

    def __init__(self, urls: Sequence[str], count: int) -> None:
        self._urls = urls
        super().__init__(urls[0], count)

    def _ask(self, number: int) -> tuple[str, str]:
        text, last, event_id, finished = "", "0", "0", False
        deadline = time.monotonic() + RECOVERY_S
        for url in itertools.cycle(self._urls):
            if time.monotonic() > deadline:
                return "hung", text
            call: dict[str, Any] = {
                "json": self.body(number),
                "headers": {"Last-Event-ID": last},
                "timeout": 60,
            }
            with (
                contextlib.suppress(httpx.TransportError),
                httpx.stream("POST", f"{url}/v1/completions", **call) as answer,
            ):
                if 400 <= answer.status_code < 500:
                    return "refused", text
                for line in answer.iter_lines():
                    field, _, value = line.partition(": ")
                    if value == "[DONE]":
                        return ("whole" if finished else "cut"), text
                    if field == "id":
                        event_id = value
                    elif field == "data" and event_id != last:  # an error has no id
                        for choice in msgspec.json.decode(value).get("choices") or ():
                            text += choice["text"]
                            finished |= choice["finish_reason"] is not None
                        last = event_id
            time.sleep(0.2)
        raise AssertionError("unreachable")


def measure_standby(times: int, count: int, rng: random.Random) -> dict[str, Any]:
    """Measures each time with a new cluster. Raises BenchError."""
    recoveries: list[float | None] = []
    seen: dict[str, int] = {}
    for _ in range(times):
        pair = StandbyPair()
        try:
            streams = ResumingStreams(pair.urls, count)
            recoveries.append(streams.disturbed(pair.lose_first, rng.uniform(0.05, 0.6)))
            for outcome, number in streams.seen.items():
                seen[outcome] = seen.get(outcome, 0) + number
        finally:
            pair.close()
    return fault_row(NAME, PROMISED, recoveries, seen)
