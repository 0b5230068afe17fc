"""`moonpool bench faults`: injects faults into real servers under streams, and counts what is seen.

Each fault meets running greedy streams. Their answers are compared with those of the undisturbed
server, bit for bit. Recovery is the time from the fault until a new request is answered right.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import httpx
import msgspec

from moonpool.demo.local_server import LocalServer

MODEL = "random:hidden=64,layers=4,heads=4,kv_heads=2,inter=128,vocab=300"
SIZES = ("--kv-tokens", "8192", "--block-size", "16", "--admission", "none")
PAIR = ("--prefill", "1", "--decode", "1")
ONE = ("--prefill", "0", "--decode", "0", "--mixed", "1")
RECOVERY_S = 60.0
ANSWERS_GO_ON = "every answer right, none cut"

Victim = Callable[[LocalServer], list[int]]


class Fault(NamedTuple):
    """One row: what is done to which process of which server, and what is promised."""

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
    """Returns a row per fault, with damaged SSD files as the last. Raises ServerError."""
    chosen = [f for f in FAULTS if not only or any(word in f.name for word in only)]
    rng = random.Random(seed)
    rows = [_measure(fault, times, streams, rng) for fault in chosen]
    if not only or any("SSD" in word for word in only):
        rows.append(_damaged_disk(times, streams, rng))
    return rows


class _Streams:
    """Streams against one server: their outcomes, and the right answers to compare with."""

    def __init__(self, url: str, count: int) -> None:
        self.url = url
        self.count = count
        self.seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.expected = [self._ask(number)[1] for number in range(count)]

    def _ask(self, number: int) -> tuple[str, str]:
        """Returns (outcome, text) of one streamed answer."""
        body = {
            "prompt": [number + 5] * 40 + [7 + number] * 30,
            "max_tokens": 160,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        text, finished = "", False
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=RECOVERY_S
            ) as answer:
                if answer.status_code != 200:
                    return "refused", ""
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = msgspec.json.decode(line[6:])
                    for choice in event.get("choices") or ():
                        text += choice["text"]
                        finished |= choice["finish_reason"] is not None
        except httpx.TimeoutException:
            return "hung", text
        except httpx.HTTPError:
            return "cut", text
        return ("whole" if finished else "cut"), text

    def probe(self) -> bool:
        return self._ask(0) == ("whole", self.expected[0])

    def run(self, number: int) -> None:
        outcome, text = self._ask(number)
        if outcome == "whole":
            outcome = "right" if text == self.expected[number] else "wrong"
        with self._lock:
            self.seen[outcome] += 1

    def disturbed(self, inject: Callable[[], None], wait_s: float) -> float | None:
        """Runs all streams, injects after `wait_s`; returns seconds to recovery, or None."""
        threads = [threading.Thread(target=self.run, args=(n,)) for n in range(self.count)]
        for thread in threads:
            thread.start()
        time.sleep(wait_s)
        inject()
        injected_s = time.monotonic()
        recovered_s = None
        while recovered_s is None and time.monotonic() - injected_s < RECOVERY_S:
            if self.probe():
                recovered_s = time.monotonic() - injected_s
            else:
                time.sleep(0.05)
        for thread in threads:
            thread.join()
        return recovered_s


def _measure(fault: Fault, times: int, count: int, rng: random.Random) -> dict[str, Any]:
    recoveries: list[float | None] = []
    seen: Counter[str] = Counter()
    injected = 0
    while injected < times:
        with LocalServer([MODEL, *fault.arguments, *SIZES]) as server:
            streams = _Streams(server.url, count)
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
    return _row(fault.name, fault.promised, recoveries, seen)


def _signaller(pid: int, sign: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(pid, sign)


def _damaged_disk(times: int, count: int, rng: random.Random) -> dict[str, Any]:
    """Flips bits in all segment files while what left memory is asked for again."""
    recoveries: list[float | None] = []
    with tempfile.TemporaryDirectory() as name:
        arguments = [MODEL, *ONE, "--kv-tokens", "1024", "--block-size", "16"]
        arguments += ["--ssd-tokens", "65536", "--ssd-folder", name]
        with LocalServer(arguments) as server:
            streams = _Streams(server.url, count)
            for _ in range(times):
                recoveries.append(streams.disturbed(lambda: _flip(Path(name), rng), 0.05))
    promised = "every answer right: a damaged block is computed again"
    return _row("bits flipped in SSD files", promised, recoveries, streams.seen)


def _flip(folder: Path, rng: random.Random) -> None:
    for path in folder.rglob("segment-*"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            for at in range(rng.randrange(4096), size, 4096):
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))


def _row(
    name: str, promised: str, recoveries: list[float | None], seen: Counter[str]
) -> dict[str, Any]:
    known = sorted(r for r in recoveries if r is not None)
    cuts = quantiles(known, n=100, method="inclusive") if len(known) > 1 else known * 99
    return {
        "fault": name,
        "promised": promised,
        "times": len(recoveries),
        "seen": dict(seen),
        "not_recovered": len(recoveries) - len(known),
        "recovery_s": known,
        "p50_s": cuts[49] if known else None,
        "p99_s": cuts[98] if known else None,
    }
