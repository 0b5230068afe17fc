"""Generates days for the benchmark of role switching, and the figures of each of their phases.

An abrupt day has phases of ten minutes. Each phase has a different share of documents, which need
prefill, and of chats, which need decode; the total is what six of the default nodes can serve if
enough of them have the right role. The seed draws the shares.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal

from moonpool.request_record import RequestRecord
from moonpool.sim.clock import Priority
from moonpool.sim.simulation import Simulation
from moonpool.trace.builtin import CHATS, DOCUMENTS, SHIFTING_DAY
from moonpool.trace.profile import Mix, MixComponent

DayKind = Literal["shifting", "abrupt"]
NUM_PHASES = 6
PHASE_S = 600.0
MOST_DOCUMENTS, MOST_CHATS = 3.2, 3.4
"""Rates relative to the rates of the profiles that keep all six nodes busy alone."""
TOTALS = (0.8, 0.95)
LEAST_SHIFT = 0.4
LEAST_SHARE = 0.05
SAMPLE_S = 1.0


def day_of(kind: DayKind, seed: int) -> Mix:
    """The day of this kind; an abrupt one is another day for each seed."""
    return SHIFTING_DAY if kind == "shifting" else abrupt_day(seed)


def abrupt_day(seed: int, num_phases: int = NUM_PHASES, phase_s: float = PHASE_S) -> Mix:
    """Shares of documents that differ by `LEAST_SHIFT` or more from phase to phase."""
    rng = Random(seed)
    documents: list[float] = []
    chats: list[float] = []
    share = rng.uniform(LEAST_SHARE, 1.0 - LEAST_SHARE)
    for _ in range(num_phases):
        total = rng.uniform(*TOTALS)
        documents.append(total * share * MOST_DOCUMENTS)
        chats.append(total * (1.0 - share) * MOST_CHATS)
        before = share
        while abs(share - before) < LEAST_SHIFT:
            share = rng.uniform(LEAST_SHARE, 1.0 - LEAST_SHARE)
    return Mix(
        name=f"abrupt-day-{seed}",
        day_s=num_phases * phase_s,
        kinds=(
            MixComponent(profile=DOCUMENTS, by_hour=tuple(documents)),
            MixComponent(profile=CHATS, by_hour=tuple(chats)),
        ),
    )


class PhaseLog:
    """Requests by their time of arrival, and the number of prefill instances each second."""

    def __init__(self) -> None:
        self._ended: list[tuple[float, bool]] = []
        self._prefills: list[int] = []

    def note(self, record: RequestRecord) -> None:
        """Notes a request that has ended; must be called for each one."""
        self._ended.append((record.arrived_s, record.effective))

    def watch(self, simulation: Simulation, until_s: float) -> None:
        """Samples the number of prefill instances until this time. Must be called before the
        simulation runs."""
        for number in range(int(until_s / SAMPLE_S)):
            simulation.clock.at(number * SAMPLE_S, Priority.TICK, self._sample, simulation)

    def _sample(self, simulation: Simulation) -> None:
        self._prefills.append(simulation.conductor.instance_table.num_prefills)

    def phases(self, day: Mix) -> list[dict[str, Any]]:
        """Returns for each phase its requests, the effective ones, and [second, prefill instances]
        at each change."""
        num = len(day.kinds[0].by_hour)
        phase_s = day.day_s / num
        found: list[dict[str, Any]] = []
        for number in range(num):
            begin_s, end_s = number * phase_s, (number + 1) * phase_s
            effective = [good for arrived_s, good in self._ended if begin_s <= arrived_s < end_s]
            samples = self._prefills[int(begin_s / SAMPLE_S) : int(end_s / SAMPLE_S)]
            changes = [
                [second * SAMPLE_S, count]
                for second, count in enumerate(samples)
                if not second or samples[second - 1] != count
            ]
            found.append(
                {"requests": len(effective), "effective": sum(effective), "prefills": changes}
            )
        return found


def phase_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how soon the run with switching roles reached the best fixed split of each phase, and
    the effective requests of both. Days whose phases last at least `PHASE_S` only."""
    phases: list[dict[str, Any]] = []
    for switching in runs:
        if switching["mode"] != "switch" or switching.get("day") != "abrupt":
            continue
        if not switching["day_s"]:
            continue
        fixed = [
            run for run in runs if run["seed"] == switching["seed"] and run["mode"] == "advise"
        ]
        for number, phase in enumerate(switching["phases"]):
            by_split = {run["prefill"]: run["phases"][number]["effective"] for run in fixed}
            if by_split:
                phases.append(_phase(switching["seed"], number, phase, by_split))
    if not phases:
        return {}
    late = [p for p in phases if p["number"] and (p["reached_s"] is None or p["reached_s"] > 60.0)]
    shifts = sum(p["number"] > 0 for p in phases)
    return {"phases": phases, "shifts": shifts, "shifts_not_followed_in_60_s": len(late)}


def _phase(
    seed: int, number: int, phase: dict[str, Any], by_split: dict[int, int]
) -> dict[str, Any]:
    most = max(by_split.values())
    # Splits that differ by less than a request in a hundred are equally good.
    best = sorted(p for p, count in by_split.items() if count >= 0.99 * most)
    reached = [second for second, count in phase["prefills"] if count in best]
    return {
        "seed": seed,
        "number": number,
        "requests": phase["requests"],
        "effective": phase["effective"],
        "best_fixed": most,
        "best_prefills": best,
        "prefills": phase["prefills"],
        "reached_s": reached[0] if reached else None,
    }
