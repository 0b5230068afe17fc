"""Puts the same instances behind each router in turn, and measures the requests that are served
within both SLOs.

SLOs are set as in the paper: 10 times the P90 of TTFT and 5 times the P90 of TBT of a single
session on one instance. Capacity is the number of requests per second that all instances answer to
users who never pause and stay with one instance. Each row is written to a file immediately, so an
interrupted run continues where it stopped. A router that fails has a row with the reason.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.suite.conversations.player import (
    PlayedTurn,
    play_sessions,
    program_figures,
    run_figures,
)
from benchmarks.suite.conversations.sessions import SessionShape, make_session
from benchmarks.suite.kept_runs import KeptRuns
from benchmarks.suite.live.vllm_shapes import reset_prefix_cache
from benchmarks.suite.routers.engines import EngineFleet, RunningEngine, counters, start_engines
from benchmarks.suite.routers.fronts import (
    FrontPythons,
    RunningFront,
    start_front,
    tree_cpu_s,
)
from benchmarks.suite.routers.workloads import RouterWorkload, arriving, at_once
from moonpool.distributions import percentiles
from moonpool.http_client.client import ConnectionFailedError
from moonpool.types import Slo, Struct
from moonpool_lab.demo.local_server import ServerError
from moonpool_lab.profiling.live_cluster import TBT_FACTOR, TTFT_FACTOR, UNBOUNDED
from moonpool_lab.replay.server import ServerUnfitError

ROW_KEY = ("workload", "router", "load", "round")
USERS_OF_EACH = 12
IGNORED_SHARE = 0.25
"""Share of the measured time that is not counted, because the users begin together."""
TAILS = (50, 90, 99)
MOST_ALONE = 4
PROGRAMS_GO_ON_S = 60.0
"""Programs go on for this long after the last one could begin, or for twice the length of the run
if that is longer."""
Say = Callable[[str], None]


class RouterPlan(Struct, frozen=True):
    """The routers, workloads and loads to run. `again`: whether to repeat runs that are already in
    the file."""

    fleet: EngineFleet
    pythons: FrontPythons
    workloads: tuple[RouterWorkload, ...]
    routers: tuple[str, ...]
    loads: tuple[float, ...]
    rounds: int
    seconds: float
    seed: int
    again: bool = False


class RouterBasis(Struct, frozen=True):
    """The SLOs of one workload, and the load that is called 1."""

    slo: Slo
    sessions_per_s: float
    requests_per_s: float


def router_runs(
    path: Path | None, fleet: EngineFleet, origin: dict[str, str]
) -> KeptRuns[RouterBasis]:
    """Raises BenchError."""
    return KeptRuns(path, ROW_KEY, RouterBasis, origin, fleet=fleet)


def bench_routers(plan: RouterPlan, runs: KeptRuns[RouterBasis], say: Say) -> dict[str, Any]:
    """All rows. Raises ServerError if the instances themselves do not start."""
    with start_engines(plan.fleet) as engines:
        for workload in plan.workloads:
            if workload.name not in runs.bases:
                runs.bases[workload.name] = _measure_basis(workload, plan, engines, say)
                runs.write()
            for number in range(plan.rounds):
                # Each round begins with another router, so that no router always follows the same
                # one.
                turned = number % len(plan.routers)
                for router in plan.routers[turned:] + plan.routers[:turned]:
                    _run_router(router, workload, number, plan, engines, runs, say)
    return runs.found()


def _run_router(
    router: str,
    workload: RouterWorkload,
    number: int,
    plan: RouterPlan,
    engines: Sequence[RunningEngine],
    runs: KeptRuns[RouterBasis],
    say: Say,
) -> None:
    """Runs all loads of one round behind one router, the light ones first."""
    key = {"workload": workload.name, "router": router, "round": number}
    loads = [load for load in plan.loads if plan.again or not runs.has(**key, load=load)]
    if not loads:
        return
    basis = runs.bases[workload.name]
    done = 0
    try:
        for engine in engines:
            reset_prefix_cache(engine.url)
        with start_front(router, plan.fleet, engines, plan.pythons, basis.slo) as front:
            _warm_up(front, workload, plan, number)
            for load in loads:
                row = (
                    key | {"load": load} | _run(front, workload, load, number, plan, engines, basis)
                )
                runs.add(row)
                say(f"{number + 1}: {_words(row)}")
                done += 1
    except (ServerError, ServerUnfitError, ConnectionFailedError, httpx.HTTPError) as error:
        why = str(error) or type(error).__name__
        say(f"{number + 1}: {workload.name}, {router}: does not run: {why}")
        for load in loads[done:]:
            runs.add(key | {"load": load, "absent": why})


def _run(
    front: RunningFront,
    workload: RouterWorkload,
    load: float,
    number: int,
    plan: RouterPlan,
    engines: Sequence[RunningEngine],
    basis: RouterBasis,
) -> dict[str, Any]:
    """Returns the figures of one router, workload, load and round. All routers get the same
    sessions in a round."""
    seed = plan.seed + 1009 * number + round(101 * load)
    sessions = arriving(workload, load * basis.sessions_per_s, plan.seconds, seed)
    before, cpu_s = counters(engines), tree_cpu_s(front.pid)
    go_on_s = max(PROGRAMS_GO_ON_S, 2 * plan.seconds) if workload.programs else 0.0
    chains = [[session] for session in sessions]
    played = uvloop.run(
        play_sessions(front.url, chains, basis.slo, plan.seconds, front.others, go_on_s)
    )
    cpu_s = tree_cpu_s(front.pid) - cpu_s
    counted = {name: value - before[name] for name, value in counters(engines).items()}
    timed = [turn for turn in played if turn.sent_s <= plan.seconds] if go_on_s else played
    whole = [turn.record for turn in timed if turn.status == 200]
    asked = counted["prefix_cache_queries"]
    programs = {"programs": program_figures(played)} if go_on_s else {}
    return (
        programs
        | run_figures(timed, plan.seconds)
        | {
            "engine_hit_ratio": counted["prefix_cache_hits"] / asked if asked else 0.0,
            "preemptions": counted["num_preemptions"],
            "cpu_ms_per_request": 1e3 * cpu_s / max(len(played), 1),
            "ttft_s": _tails([record.ttft_s or 0.0 for record in whole]),
            "tbt_s": _tails([gap_s for record in whole for gap_s in record.gaps_s]),
        }
    )


def _tails(values: Sequence[float]) -> dict[str, float]:
    return percentiles(values, *TAILS)


def _warm_up(front: RunningFront, workload: RouterWorkload, plan: RouterPlan, number: int) -> None:
    """Runs some sessions with other prompts first, so that connections are open and code is
    loaded."""
    rng = random.Random(f"warm/{plan.seed}/{number}")
    shape = workload.parts[0][0]
    chains = [[make_session(shape, 0.0, rng, -1 - number, 0.0)] for _ in plan.fleet.speeds]
    uvloop.run(play_sessions(front.url, chains, UNBOUNDED, plan.seconds, front.others))


# Basis


def _measure_basis(
    workload: RouterWorkload, plan: RouterPlan, engines: Sequence[RunningEngine], say: Say
) -> RouterBasis:
    """Raises ServerUnfitError, ServerError."""
    # The slowest instance sets the SLO: with an SLO that it cannot meet, the ranking of routers
    # would depend on luck.
    slowest = max(range(len(engines)), key=lambda number: plan.fleet.speeds[number])
    alone = [_alone(engines[slowest].url, shape, plan) for shape, _ in workload.parts]
    slo = Slo(
        ttft_s=TTFT_FACTOR * max(one.ttft_s for one in alone),
        tbt_s=TBT_FACTOR * max(one.tbt_s for one in alone),
    )
    requests_per_s = sum(uvloop.run(_busy(workload, plan, engines)))
    if not requests_per_s:
        raise ServerError(f"{workload.name}: the instances answered nothing in {plan.seconds:g} s")
    basis = RouterBasis(slo, requests_per_s / workload.turns, requests_per_s)
    say(
        f"{workload.name}: SLOs TTFT {slo.ttft_s:.3g} s and TBT {1e3 * slo.tbt_s:.3g} ms; load 1 is"
        f" {requests_per_s:.3g} requests a second"
    )
    return basis


def _alone(url: str, shape: SessionShape, plan: RouterPlan) -> Slo:
    """P90s of sessions that nothing else disturbs. The first session only warms the server up."""
    rng = random.Random(f"alone/{plan.seed}")
    warm, *sessions = (make_session(shape, 0.0, rng, plan.seed, 0.0) for _ in range(1 + MOST_ALONE))
    uvloop.run(play_sessions(url, [[warm]], UNBOUNDED, plan.seconds))
    played = uvloop.run(play_sessions(url, [sessions], UNBOUNDED, plan.seconds))
    whole = [turn.record for turn in played if turn.status == 200]
    if not whole:
        raise ServerError(
            f"{url} answered no session in {plan.seconds:g} s: give it more --seconds"
        )
    return Slo(
        ttft_s=_tails([record.ttft_s or 0.0 for record in whole])["p90"],
        tbt_s=_tails([gap_s for record in whole for gap_s in record.gaps_s])["p90"],
    )


async def _busy(
    workload: RouterWorkload, plan: RouterPlan, engines: Sequence[RunningEngine]
) -> list[float]:
    """Returns how many answers a second each instance gives if its users never pause."""

    async def one(number: int, url: str) -> float:
        # As many sessions as no instance can answer, at a rate that does not matter.
        sessions = arriving(workload, 50.0, plan.seconds, plan.seed + 7 * number)
        chains = at_once(sessions, USERS_OF_EACH)
        return _rate(await play_sessions(url, chains, UNBOUNDED, plan.seconds), plan.seconds)

    return await asyncio.gather(*(one(n, engine.url) for n, engine in enumerate(engines)))


def _rate(played: Sequence[PlayedTurn], seconds: float) -> float:
    from_s = IGNORED_SHARE * seconds
    began_s = min((turn.record.arrived_s - turn.sent_s for turn in played), default=0.0)
    ends_s = [(turn.record.finished_s or 0.0) - began_s for turn in played if turn.status == 200]
    return sum(from_s <= end_s <= seconds for end_s in ends_s) / (seconds - from_s)


def _words(row: dict[str, Any]) -> str:
    return (
        f"{row['workload']} {row['load']:g} x, {row['router']}: {row['effective']} of"
        f" {row['requests']} within both SLOs, {row['rejected']} refused, {row['failed']} failed,"
        f" TTFT P99 {row['ttft_s']['p99']:.2f} s, hits {row['engine_hit_ratio']:.0%},"
        f" {row['cpu_ms_per_request']:.1f} ms CPU"
    )
