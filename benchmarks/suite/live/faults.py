"""`moonpool bench faults`: injects faults into real servers during streams, and counts the outcomes
of the streams.

Each fault meets running greedy streams. Their answers are compared with those of the undisturbed
server, bit for bit. Recovery is the time from the fault until a new request is answered right.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.suite.live.damage import corrupt_slices
from benchmarks.suite.live.fault_streams import MODEL, SIZES, FaultStreams, fault_row
from benchmarks.suite.live.standby_fault import NAME as STANDBY
from benchmarks.suite.live.standby_fault import measure_standby
from moonpool_lab.demo.local_server import LocalServer

PAIR = ("--prefill", "1", "--decode", "1")
ONE = ("--prefill", "0", "--decode", "0", "--mixed", "1")
DAMAGED_DISK = "bits flipped in SSD files"
ANSWERS_GO_ON = "every answer right, none cut"

Victim = Callable[[LocalServer], list[int]]


class Fault(NamedTuple):
    """One row: the server, the process, the fault, and the promised behaviour."""

    name: str
    arguments: tuple[str, ...]
    victims: Victim
    sign: signal.Signals = signal.SIGKILL
    promised: str = ANSWERS_GO_ON


def _role(role: str) -> Victim:
    return lambda server: [i["pid"] for i in server.instances() if i["role"] == role]


def _child(kind: str) -> Victim:
    """The processes of this kind that instances, or the head, have started."""

    def find(server: LocalServer) -> list[int]:
        parents = {server.pid, *server.worker_pids()}
        return [pid for pid, parent, words in _processes() if parent in parents and kind in words]

    return find


def _processes() -> list[tuple[int, int, str]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found.append((int(folder.name), parent, f" {words} "))
    return found


STAGES = (*PAIR, "--decode-pipeline-parallel-size", "2")
RANKS = (*PAIR, "--decode-tensor-parallel-size", "2")

FAULTS = (
    Fault("kill -9 of the only prefill instance", PAIR, _role("prefill")),
    Fault("kill -9 of the only decode instance", PAIR, _role("decode")),
    Fault("kill -9 of the only mixed instance", ONE, _role("mixed")),
    Fault("kill -9 of a stage", STAGES, _child(" stage ")),
    Fault("kill -9 of a rank", RANKS, _child(" rank ")),
    Fault(
        "kill -9 of an attention worker",
        (*PAIR, "--attention", "1"),
        lambda server: server.attention_pids(),
    ),
    Fault("kill -9 of the fork server", PAIR, _child(" moonpool fork server ")),
    Fault("SIGSTOP of the only decode instance", PAIR, _role("decode"), signal.SIGSTOP),
    Fault("SIGSTOP of a stage", STAGES, _child(" stage "), signal.SIGSTOP),
    Fault("SIGSTOP of a rank", RANKS, _child(" rank "), signal.SIGSTOP),
    Fault(
        "SIGSTOP of an attention worker",
        (*PAIR, "--attention", "1"),
        lambda server: server.attention_pids(),
        signal.SIGSTOP,
    ),
    Fault("kill -9 of the head", PAIR, _child(" head-process ")),
)


def bench_faults(
    times: int, streams: int, seed: int, only: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Returns a row per fault, with damaged SSD files as the last. Raises ServerError and
    BenchError."""
    chosen = [f for f in FAULTS if not only or any(word in f.name for word in only)]
    rng = random.Random(seed)
    rows = [_measure(fault, times, streams, rng) for fault in chosen]
    if not only or any(word in STANDBY for word in only):
        rows.append(measure_standby(times, streams, rng))
    if not only or any("SSD" in word for word in only):
        rows.append(_damaged_disk(times, streams, rng))
    return rows


def _measure(fault: Fault, times: int, count: int, rng: random.Random) -> dict[str, Any]:
    recoveries: list[float | None] = []
    seen: Counter[str] = Counter()
    injected = corrupt = 0
    while injected < times:
        with LocalServer([MODEL, *fault.arguments, *SIZES]) as server:
            streams = FaultStreams(server.url, count)
            while injected < times:
                victims = fault.victims(server)
                if not victims:
                    break  # e.g. a fork server, which is not started again
                victim = rng.choice(victims)
                wait_s = rng.uniform(0.05, 0.6)
                inject = _signaller(victim, fault.sign)
                recoveries.append(streams.disturbed(inject, wait_s))
                injected += 1
                if recoveries[-1] is None or victim == server.pid:
                    break
            seen.update(streams.seen)
            if recoveries[-1] is not None:
                corrupt += corrupt_slices(server.url)
    return fault_row(fault.name, fault.promised, recoveries, seen) | {"corrupt_slices": corrupt}


def _signaller(pid: int, sign: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(pid, sign)


def _damaged_disk(times: int, count: int, rng: random.Random) -> dict[str, Any]:
    """Flips bits in all segment files while evicted prompts are requested again."""
    recoveries: list[float | None] = []
    with tempfile.TemporaryDirectory() as name:
        arguments = [MODEL, *ONE, "--kv-tokens", "1024", "--block-size", "16"]
        arguments += ["--ssd-tokens", "65536", "--ssd-folder", name]
        with LocalServer(arguments) as server:
            streams = FaultStreams(server.url, count)
            for _ in range(times):
                recoveries.append(streams.disturbed(lambda: _flip(Path(name), rng), 0.05))
            corrupt = corrupt_slices(server.url)
    promised = "every answer right: a damaged block is computed again"
    row = fault_row(DAMAGED_DISK, promised, recoveries, streams.seen)
    return row | {"corrupt_slices": corrupt}


def _flip(folder: Path, rng: random.Random) -> None:
    for path in folder.rglob("segment-*"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            for at in range(rng.randrange(4096), size, 4096):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
