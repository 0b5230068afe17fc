"""Stores the runs for a plan's page and tables: the search's runs, and clusters at several loads.

The search ends a run as soon as it fails. For the page, clusters run to the end, at several loads
and with several sizes of DRAM: the choice, twice the choice's instances, and the cheapest cluster
of up to OTHER_HARDWARE other mixes of hardware and layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from moonpool.plan.assess import Assessor, StoppedError
from moonpool.plan.candidate import Candidate, Priced, Steps
from moonpool.plan.room import Room
from moonpool.plan.search import ClusterPlan
from moonpool.plan.time_left import TimeLeft
from moonpool.plan.trial import Outcome, main_cause
from moonpool.types import Struct

SPEEDS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""The multiples of the trace's load at which stored runs are simulated."""
OTHER_HARDWARE = 3
"""At most this many other mixes of hardware and layout are simulated besides the choice's mix."""
MEMORY_STEPS = (-4, 0, 4)
"""The sizes of DRAM to store runs for, in search steps relative to the cluster's own size."""


class StoredRun(Struct, frozen=True):
    """One simulation of the whole trace at a multiple of its load."""

    candidate: Candidate
    speed: float
    outcome: Outcome


def stored_runs(plan: ClusterPlan, assessor: Assessor, steps: Steps) -> list[StoredRun]:
    """Runs the page's clusters at all loads, with the trace's own load first. If the limit of runs,
    the time limit or Ctrl-C ends the simulations, returns the runs so far."""
    found: list[StoredRun] = []
    clusters = page_clusters(plan, steps)
    assessor.doing = "loads of the page"
    assessor.time_left = TimeLeft({assessor.doing: float(len(clusters) * len(SPEEDS))})
    try:
        for speed in sorted(SPEEDS, key=lambda speed: abs(speed - 1.0)):
            outcomes = assessor.in_full_at(clusters, speed)
            found += [
                StoredRun(one, speed, outcome)
                for one, outcome in zip(clusters, outcomes, strict=True)
                if not outcome.error
            ]
    except (StoppedError, KeyboardInterrupt):
        pass
    return sorted(found, key=lambda run: (clusters.index(run.candidate), run.speed))


def with_room(plan: ClusterPlan, stored: Sequence[StoredRun], wanted: float) -> ClusterPlan:
    """Returns the plan with the room of its choice. If the search did not look for its room, the
    stored runs tell it."""
    if plan.choice is None or plan.rooms:
        return plan
    chosen = plan.choice.candidate
    own = sorted(
        (run for run in stored if run.candidate == chosen and run.speed > 1.0),
        key=lambda run: run.speed,
    )
    kept = 1.0
    for run in own:
        if run.outcome.share < wanted:
            room = Room(chosen, kept, run.speed, main_cause(run.outcome.misses))
            return msgspec.structs.replace(plan, rooms=(room,))
        kept = run.speed
    return msgspec.structs.replace(plan, rooms=(Room(chosen, kept, None),)) if own else plan


def page_clusters(plan: ClusterPlan, steps: Steps) -> list[Candidate]:
    """Returns the clusters of the page, with the choice first."""
    if plan.choice is None:
        return []
    chosen, change = plan.choice.candidate, msgspec.structs.replace
    bases = [chosen]
    bases.append(
        change(chosen, prefill=2 * chosen.prefill, decode=2 * chosen.decode, mixed=2 * chosen.mixed)
    )
    others = [mix.cheapest.candidate for mix in plan.mixes if mix.cheapest is not None]
    known = {(one.hardware, one.layout) for one in bases}
    bases += [one for one in others if (one.hardware, one.layout) not in known][:OTHER_HARDWARE]
    found = [
        change(base, cache_tokens=cache)
        for base in bases
        for cache in _around(steps.caches, base.cache_tokens)
    ]
    return list(dict.fromkeys([chosen, *found]))


def _around(caches: Sequence[int], own: int) -> list[int]:
    at = min(range(len(caches)), key=lambda i: abs(caches[i] - own))
    places = {min(max(at + step, 0), len(caches) - 1) for step in MEMORY_STEPS}
    return sorted({own, *(caches[place] for place in places)})


COLUMNS = (
    *("cluster", "hardware", "layout", "instances", "cache_tokens", "ssd_tokens", "chunk_tokens"),
    *("placement", "admission", "eviction", "usd_per_h", "load", "requests", "within_slos"),
    *("share", "ended_early", "ttft_p50_s", "ttft_p90_s", "tbt_p90_s", "hit_ratio", "lacked"),
    *("slo_class", "class_share"),
)
"""The columns of the table of runs. A run with several SLO classes has a row per class."""


def run_rows(
    plan: ClusterPlan, stored: Sequence[StoredRun], priced: Priced
) -> Iterator[tuple[Any, ...]]:
    """Yields a row for each run and class: first the search's runs on the original trace, then the
    page's runs."""
    for found in plan.assessed:
        yield from _rows(StoredRun(found.candidate, 1.0, found.outcomes[0]), priced)
    known = {one.candidate for one in plan.assessed if not one.gave_up}
    for run in stored:
        if run.speed != 1.0 or run.candidate not in known:
            yield from _rows(run, priced)


def _rows(run: StoredRun, priced: Priced) -> Iterator[tuple[Any, ...]]:
    one, outcome = run.candidate, run.outcome
    attained = outcome.attainment
    row = (
        *(one.roles, one.hardware, one.layout, one.num_instances),
        *(one.cache_tokens, one.ssd_tokens, one.chunk_tokens),
        *(str(one.placement), str(one.admission), str(one.eviction)),
        *(priced.usd_per_h(one), run.speed, attained.num_requests, attained.num_effective),
        *(attained.share, outcome.gave_up),
        *(outcome.ttft_p50_s, outcome.ttft_p90_s, outcome.tbt_p90_s, outcome.hit_ratio),
        main_cause(outcome.misses),
    )
    classes = outcome.classes if len(outcome.classes) > 1 else ()
    for each in classes:
        yield (*row, each.name, each.num_effective / max(each.num_requests, 1))
    if not classes:
        yield (*row, "", attained.share)
