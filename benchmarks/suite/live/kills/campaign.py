"""`moonpool bench kills`: kills and stops processes of a cluster at random moments under streams.

Every kind of process is hit in turn, in a shuffled order that follows from the seed. The next fault
comes when all processes are back and all streams go on, after a random time.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import httpx

from benchmarks.errors import BenchError
from benchmarks.suite.live.damage import REPORT_S, corrupt_slices
from benchmarks.suite.live.kills.calls import calls
from benchmarks.suite.live.kills.load import OUTCOMES, Load, Reply
from benchmarks.suite.live.kills.processes import victims
from moonpool.children.stopped import LOOK_S, MOST_LOOKS
from moonpool.distributions import interpolated
from moonpool_lab.demo.local_server import LocalServer, is_alive

MODEL = "random:hidden=64,layers=4,heads=4,kv_heads=2,inter=128,vocab=300"
SIZES = ("--kv-tokens", "65536", "--block-size", "16", "--max-num-batched-tokens", "256")
PATIENT = ("--admission", "none")
PAIR = ("--prefill", "1", "--decode", "1")
ARRANGEMENTS: dict[str, tuple[str, ...]] = {
    "1M": ("--prefill", "0", "--decode", "0", "--mixed", "1"),
    "1P+1D": PAIR,
    "2M": ("--prefill", "0", "--decode", "0", "--mixed", "2"),
    "2P+2D": ("--prefill", "2", "--decode", "2"),
    "stages": (*PAIR, "--pipeline-parallel-size", "2"),
    "ranks": (*PAIR, "--decode-tensor-parallel-size", "2"),
    "attention": (*PAIR, "--attention", "2"),
}
WORKERS = ("prefill", "decode", "mixed", "attention worker")
RECOVERY_S = 60.0
CALM_S = 2.0
LEAST_STOP_S = 0.5
REPLACED_S = LOOK_S * MOST_LOOKS
FaultPlan = tuple[str, signal.Signals]


class InjectedFault(NamedTuple):
    """An injected fault, and how long the streams under way had to wait."""

    kind: str
    sign: signal.Signals
    had_twin: bool
    at_s: float
    stopped_s: float  # 0 for a kill
    recovery_s: float | None


class Campaign:
    """Faults in one arrangement."""

    def __init__(
        self,
        arrangement: Sequence[str],
        streams: int,
        rng: random.Random,
        stop_s: tuple[float, float],
        report: Callable[[str], None],
        sizes: Sequence[str] = (MODEL, *SIZES),
        only: Sequence[str] = (),
    ) -> None:
        """`stop_s`: the shortest and the longest SIGSTOP. `only`: the kinds of processes to kill;
        () means all kinds."""
        self._only = only
        self._arguments = [*sizes[:1], *arrangement, *sizes[1:], *PATIENT]
        self._calls = calls(streams, rng.randrange(1 << 30))
        self._rng = rng
        self._stop_s = stop_s
        self._report = report
        self.faults: list[InjectedFault] = []
        self.load = Load("", [])
        self._calm = (0.0, 0.0)
        self.ended_s = 0.0
        self.exit_status: int | None = None
        self.corrupt_slices = 0  # the most that a head has counted: no fault here damages memory
        self.left: list[int] = []

    def run(self, kills: int, stops: int, seconds: float) -> None:
        """Injects this number of faults, or as many as fit into `seconds`."""
        with LocalServer(self._arguments) as server:
            self.load = Load(server.url, self._calls)
            self.load.learn()
            self.load.start()
            try:
                time.sleep(CALM_S)
                began_s = time.monotonic()
                time.sleep(CALM_S)
                self._calm = (began_s, time.monotonic())
                wanted = victims(server.pid)
                if not wanted:
                    raise BenchError("the cluster's processes have no titles: none can be chosen")
                kinds = [kind for kind in wanted if not self._only or kind in self._only]
                if not kinds:
                    raise BenchError(f"this cluster has no {', '.join(self._only)}")
                for plan in self.plans(kinds, kills, stops):
                    if time.monotonic() - began_s > seconds:
                        break
                    self._inject(server, plan, wanted)
            finally:
                self.load.stop()
            self.ended_s = time.monotonic()
            self._look_for_damage(server, REPORT_S)
            pids = [pid for found in victims(server.pid).values() for pid in found]
            self.exit_status = server.stop()
            self.left = _still_alive(pids)

    def plans(self, kinds: list[str], kills: int, stops: int) -> list[FaultPlan]:
        """Returns the kinds and signals of all faults, each kind in turn, in a random order."""
        self._rng.shuffle(kinds)
        plans = [(kinds[n % len(kinds)], signal.SIGKILL) for n in range(kills)]
        plans += [(kinds[n % len(kinds)], signal.SIGSTOP) for n in range(stops)]
        self._rng.shuffle(plans)
        return plans

    def _inject(self, server: LocalServer, plan: FaultPlan, wanted: dict[str, list[int]]) -> None:
        kind, sign = plan
        time.sleep(self._rng.uniform(0.0, CALM_S))
        found = victims(server.pid).get(kind)
        if not found:
            self._report(f"there is no {kind} to hit")
            return
        pid = self._rng.choice(found)
        stopped_s = self._rng.uniform(*self._stop_s) if sign == signal.SIGSTOP else 0.0
        at_s = time.monotonic()
        try:
            os.kill(pid, sign)
        except ProcessLookupError:
            return
        if stopped_s:
            timer = threading.Timer(stopped_s, _go_on, [pid])
            timer.daemon = True
            timer.start()
            _wait(lambda: not is_alive(pid), stopped_s)
        recovery_s = self._recovery_s(server, at_s, wanted)
        fault = InjectedFault(kind, sign, len(wanted[kind]) > 1, at_s, stopped_s, recovery_s)
        self.faults.append(fault)
        self._look_for_damage(server)
        pauses = self.pauses(len(self.faults) - 1)
        longest = f"{max(pauses):.2f} s" if pauses else "-"
        self._report(f"{_name(fault)} {kind}: longest pause {longest}, back after {recovery_s} s")

    def _look_for_damage(self, server: LocalServer, wait_s: float = 0.0) -> None:
        with suppress(httpx.HTTPError):  # a head that has just died: the next one is asked
            found = corrupt_slices(server.url, wait_s)
            self.corrupt_slices = max(self.corrupt_slices, found)

    def _recovery_s(
        self, server: LocalServer, at_s: float, wanted: dict[str, list[int]]
    ) -> float | None:
        """Seconds until all streams go on and all processes are back; None if they are not."""

        def is_back() -> bool:
            now = victims(server.pid, ready=True)
            if any(len(now.get(kind, ())) < len(pids) for kind, pids in wanted.items()):
                return False
            if not _has_joined(server, wanted):
                return False
            running = [r for r in self.load.replies if r.is_stream and r.ran_at(at_s)]
            return all(r.ended_s or (r.arrivals and r.arrivals[-1] > at_s) for r in running)

        return round(time.monotonic() - at_s, 3) if _wait(is_back, RECOVERY_S) else None

    def pauses(self, number: int) -> list[float]:
        """The longest pause of each stream that ran when the fault came, until the next one."""
        fault = self.faults[number]
        later = self.faults[number + 1].at_s if number + 1 < len(self.faults) else float("inf")
        return self._pauses(fault.at_s, later)

    def calm_pauses(self) -> list[float]:
        return self._pauses(*self._calm)

    def _pauses(self, from_s: float, until_s: float) -> list[float]:
        now_s = time.monotonic()
        running = [r for r in self.load.replies if r.is_stream and r.ran_at(from_s)]
        found = [reply.pause(from_s, until_s, now_s) for reply in running]
        return sorted(pause for pause in found if pause is not None)

    def met(self, reply: Reply) -> set[tuple[str, signal.Signals, bool]]:
        """The faults that came while the call ran."""
        return {(f.kind, f.sign, f.had_twin) for f in self.faults if reply.ran_at(f.at_s)}


def bench_kills(
    names: Sequence[str],
    kills: int,
    stops: int,
    streams: int,
    seconds: float,
    stop_s: float,
    seed: int,
    only: Sequence[str],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Returns outcomes and pauses per arrangement, kind of process and signal. Raises ServerError,
    BenchError and ResponseError."""
    rng = random.Random(seed)
    arrangements = []
    for name in names:
        said = _prefixed(name, report)
        campaign = Campaign(
            ARRANGEMENTS[name], streams, rng, (LEAST_STOP_S, stop_s), said, only=only
        )
        campaign.run(kills, stops, seconds)
        arrangements.append({"arrangement": name} | figures(campaign))
    return {
        "streams": streams,
        "seed": seed,
        "longest_stop_s": stop_s,
        "arrangements": arrangements,
    }


def _prefixed(name: str, report: Callable[[str], None]) -> Callable[[str], None]:
    return lambda text: report(f"{name}: {text}")


def figures(campaign: Campaign) -> dict[str, Any]:
    """Returns the results of a campaign for the JSON file."""
    replies = [r for r in campaign.load.replies if r.outcome]
    kinds = sorted({(f.kind, f.sign, f.had_twin) for f in campaign.faults})
    rows = []
    for kind, sign, had_twin in kinds:
        these = [n for n, f in enumerate(campaign.faults) if f[:3] == (kind, sign, had_twin)]
        met = [r for r in replies if (kind, sign, had_twin) in campaign.met(r)]
        pauses = sorted(p for n in these for p in campaign.pauses(n))
        back = [campaign.faults[n].recovery_s for n in these]
        rows.append(
            {
                "kind": kind,
                "signal": sign.name,
                "had_twin": had_twin,
                "times": len(these),
                "answers": _outcomes(met),
                "pause_s": _spread(pauses),
                "pauses_s": [round(pause, 3) for pause in pauses],
                "stopped_s": [round(campaign.faults[n].stopped_s, 2) for n in these],
                "recovery_s": back,
                "not_recovered": back.count(None),
            }
        )
    others = [reply for reply in replies if reply.outcome != "right"]
    troubles = [_trouble(campaign, reply) for reply in others if not _is_unheard(campaign, reply)]
    return {
        "faults": len(campaign.faults),
        "answers": _outcomes(replies),
        "undisturbed_pause_s": _spread(campaign.calm_pauses()),
        "rows": rows,
        "troubles": troubles[:20],
        "unheard": len(others) - len(troubles),
        "corrupt_slices": campaign.corrupt_slices,
        "exit_status": campaign.exit_status,
        "processes_left": len(campaign.left),
    }


def _is_unheard(campaign: Campaign, reply: Reply) -> bool:
    """Whether the head ended before a byte of the call's answer: a connection is lost if the head
    dies between its acceptance and its record, within some 80 us. A head that hangs is killed after
    `REPLACED_S`, unless it recovers before."""
    ended_s = reply.ended_s or reply.sent_s
    heads = [f for f in campaign.faults if f.kind == "head"]
    late_s = {signal.SIGKILL: 1.0, signal.SIGSTOP: 1.0 + REPLACED_S}
    is_met = any(reply.sent_s - 0.1 <= f.at_s <= ended_s <= f.at_s + late_s[f.sign] for f in heads)
    return reply.outcome == "cut" and not reply.status and is_met


def _trouble(campaign: Campaign, reply: Reply) -> str:
    """Describes how the call ended, its progress until then, and the last fault before its end."""
    ended_s = reply.ended_s or reply.sent_s
    text = f"{reply.outcome}: {reply.detail} ({reply.path}, status {reply.status or 'none'}, "
    text += f"{len(reply.arrivals)} pieces in {ended_s - reply.sent_s:.2f} s"
    before = [fault for fault in campaign.faults if fault.at_s < ended_s]
    if before:
        text += f", {ended_s - before[-1].at_s:.2f} s after {_name(before[-1])} {before[-1].kind}"
    return text + ")"


def _outcomes(replies: Sequence[Reply]) -> dict[str, int]:
    seen = Counter(reply.outcome for reply in replies)
    return {outcome: seen[outcome] for outcome in OUTCOMES}


def _spread(pauses: Sequence[float]) -> dict[str, float | int]:
    if not pauses:
        return {"count": 0}
    ordered = sorted(pauses)
    return {
        "count": len(ordered),
        "p50": round(interpolated(ordered, 0.5), 4),
        "p99": round(interpolated(ordered, 0.99), 4),
        "max": round(ordered[-1], 4),
    }


def _has_joined(server: LocalServer, wanted: dict[str, list[int]]) -> bool:
    """Whether the initial number of workers has joined the head."""
    try:
        joined = Counter(instance["role"] for instance in server.instances())
        joined["attention worker"] = len(server.attention_pids())
    except httpx.HTTPError:
        return False
    return all(joined[kind] >= len(wanted.get(kind, ())) for kind in WORKERS)


def _name(fault: InjectedFault) -> str:
    return f"SIGSTOP for {fault.stopped_s:.1f} s of" if fault.stopped_s else "kill -9 of"


def _go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _wait(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _still_alive(pids: Sequence[int]) -> list[int]:
    _wait(lambda: not any(map(is_alive, pids)), 10.0)
    return [pid for pid in pids if is_alive(pid)]
