"""Measures and publishes, before the runs of a model and workload: SLOs, capacity and forecasts.

SLOs are set as in the paper: 10 times the P90 of TTFT and 5 times the P90 of TBT of a single
session, measured on the slower of moonpool and vLLM. Load 1 is the rate of sessions whose requests
two mixed moonpool instances answer a second while USERS sessions never pause.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import uvloop

from benchmarks.suite.conversations.arrangements import (
    LiveArrangement,
    Machine,
    parse_arrangement,
    start_arrangement,
)
from benchmarks.suite.conversations.forecast import plan_for, simulate_arrangements
from benchmarks.suite.conversations.player import PlayedTurn, play_sessions, spread
from benchmarks.suite.conversations.sessions import (
    Session,
    SessionShape,
    make_session,
    reusable_share,
    sessions_at,
    trace_rows,
)
from moonpool.types import Slo, Struct
from moonpool_lab.profiling.live_cluster import (
    TBT_FACTOR,
    TTFT_FACTOR,
    UNBOUNDED,
    LiveWorkload,
    measure_live,
)
from moonpool_lab.profiling.live_profile import LiveProfile

REFERENCE = "2M/none"
ALONE_S, BUSY_S = 25.0, 25.0
MOST_ALONE = 4
"""Sessions that are played alone."""
USERS = 12
IGNORED_SHARE = 0.25
"""Share of the busy time that is ignored, because the users begin together."""
PLANNED_LOADS = 0.6, 0.8, 1.0
PLANNED_REQUESTS = 120
"""Least requests in the trace that is planned for."""
RIVALS = "1P+1D", "2M"
Say = Callable[[str], None]
Start = Callable[[LiveArrangement, Machine, Slo], AbstractContextManager[str]]


class SessionBasis(Struct, frozen=True):
    """The basis of all rows of one model and workload."""

    slo: Slo
    alone: dict[str, Slo]
    sessions_per_s: float
    requests_per_s: float
    reusable_share: float
    planned: str
    plans: dict[str, dict[str, Any]]
    simulated: dict[str, dict[str, dict[str, Any]]]


def measure_basis(
    shape: SessionShape,
    machine: Machine,
    peer: str,
    loads: Sequence[float],
    seconds: float,
    seed: int,
    say: Say,
    start: Start = start_arrangement,
) -> SessionBasis:
    """`peer`: the arrangement of vLLM that is also played alone, or "" without one. Raises what
    servers and profiles raise."""
    with start(parse_arrangement(REFERENCE), machine, UNBOUNDED) as url:
        profile = measure_live(url, LiveWorkload(longest_tokens=machine.longest_tokens // 2), say)
        alone = {"moonpool": _alone(url, shape, seed)}
        busy = uvloop.run(play_sessions(url, _users(shape, seed), UNBOUNDED, BUSY_S))
    requests_per_s = _rate(busy)
    if peer:
        with start(parse_arrangement(peer), machine, UNBOUNDED) as url:
            alone[peer] = _alone(url, shape, seed)
    slo = Slo(
        ttft_s=TTFT_FACTOR * max(one.ttft_s for one in alone.values()),
        tbt_s=TBT_FACTOR * max(one.tbt_s for one in alone.values()),
    )
    sessions_per_s = requests_per_s / shape.turns
    say(
        f"{shape.name}: SLOs TTFT {slo.ttft_s:.3g} s and TBT {1e3 * slo.tbt_s:.3g} ms; load 1 is"
        f" {sessions_per_s:.3g} sessions a second ({requests_per_s:.3g} requests)"
    )
    unloaded = alone["moonpool"]
    return _foretold(
        shape, machine, slo, alone, unloaded, sessions_per_s, profile, loads, seconds, seed, say
    )


def _foretold(
    shape: SessionShape,
    machine: Machine,
    slo: Slo,
    alone: dict[str, Slo],
    unloaded: Slo,
    sessions_per_s: float,
    profile: LiveProfile,
    loads: Sequence[float],
    seconds: float,
    seed: int,
    say: Say,
) -> SessionBasis:
    clusters = [parse_arrangement(name).cluster(machine, slo) for name in RIVALS]
    plans: dict[str, dict[str, Any]] = {}
    simulated: dict[str, dict[str, dict[str, Any]]] = {}
    share = 0.0
    for load in PLANNED_LOADS:
        planned_s = max(seconds, PLANNED_REQUESTS / (load * sessions_per_s * shape.turns))
        sessions = sessions_at(shape, load, sessions_per_s, planned_s, seed)
        share = reusable_share(shape, sessions)
        rows = trace_rows(shape, sessions, unloaded.ttft_s, unloaded.tbt_s)
        plans[f"{load:g}"] = plan = plan_for(rows, profile, slo, clusters[0])
        say(f"  plan for load {load:g}: {plan['named'] or 'nothing'} ({plan['why']})")
    for load in loads:
        sessions = sessions_at(shape, load, sessions_per_s, seconds, seed)
        rows = trace_rows(shape, sessions, unloaded.ttft_s, unloaded.tbt_s)
        rows = [row for row in rows if row.arrived_s <= seconds]
        if rows:
            simulated[f"{load:g}"] = found = simulate_arrangements(clusters, rows, profile)
            words = (f"{n} {one['effective']} of {one['requests']}" for n, one in found.items())
            say(f"  simulated, load {load:g}: {', '.join(words)}")
    planned = planned_for(2, (plan["named"] for plan in plans.values()))
    return SessionBasis(
        slo, alone, sessions_per_s, sessions_per_s * shape.turns, share, planned, plans, simulated
    )


def planned_for(instances: int, named: Iterable[str]) -> str:
    """The last of the plans for rising loads that has this many instances, or "" if none has."""
    fitting = ""
    for name in named:
        digits = [int(part[:-1]) for part in name.split("+") if part[:-1].isdecimal()]
        if sum(digits) == instances:
            fitting = name
    return fitting


def _alone(url: str, shape: SessionShape, seed: int) -> Slo:
    """Returns P90s of sessions that nothing else disturbs. The first session only warms the server
    up."""
    rng = random.Random(f"alone/{seed}")
    warm, *sessions = (make_session(shape, 0.0, rng, seed, 0.0) for _ in range(1 + MOST_ALONE))
    uvloop.run(play_sessions(url, [[warm]], UNBOUNDED, ALONE_S))
    played = uvloop.run(play_sessions(url, [sessions], UNBOUNDED, ALONE_S))
    whole = [turn.record for turn in played if turn.status == 200]
    return Slo(
        ttft_s=spread([record.ttft_s or 0.0 for record in whole])["p90"],
        tbt_s=spread([gap_s for record in whole for gap_s in record.gaps_s])["p90"],
    )


def _users(shape: SessionShape, seed: int) -> list[list[Session]]:
    """Returns more sessions for each user than can be played in BUSY_S."""
    rng = random.Random(f"busy/{seed}")
    count = max(2, round(4 * BUSY_S / shape.turns))
    return [[make_session(shape, 0.0, rng, seed, 0.0) for _ in range(count)] for _ in range(USERS)]


def _rate(played: Sequence[PlayedTurn]) -> float:
    """Returns the answers per second after the users have spread out."""
    from_s = IGNORED_SHARE * BUSY_S
    began_s = min((turn.record.arrived_s - turn.sent_s for turn in played), default=0.0)
    ends_s = [(turn.record.finished_s or 0.0) - began_s for turn in played if turn.status == 200]
    return sum(from_s <= end_s <= BUSY_S for end_s in ends_s) / (BUSY_S - from_s)
