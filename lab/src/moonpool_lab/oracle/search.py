"""Searches for the best schedule of a clairvoyant admission: a lower bound of what can be served.

Every schedule is a run of the simulator. The clairvoyant admission refuses requests on arrival, by
a list; the Conductor admits all others and serves them as usual. The result is therefore always a
valid run, and only the list comes from knowing the future.

The search starts from the effective requests of the policies' runs and from what the relaxed
optimum (`bound`) serves on a cluster with somewhat less capacity. The search drops requests that
miss their SLOs until none does, then adds requests in batches, the most promising first. If a batch
as a whole adds no effective requests, the search tries again the parts of it that did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np

from moonpool.config.tables import Config
from moonpool.request_record import RequestRecord
from moonpool.sim.hardware.build import Hardware
from moonpool.sim.metrics import Collector
from moonpool.sim.settings import USUAL_SETTINGS, SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool_lab.oracle.bound import Bound, Resource, upper_bound
from moonpool_lab.oracle.least_work import LeastWork

SAMPLE_S = 3600.0  # sampling interval of the simulation's series, which is not used here
CAPACITIES = (0.98, 0.94, 0.9, 0.86, 0.8, 0.7)
"""Shares of the capacity. The search begins with the relaxed optimum for each."""
FIRST_SHARE = 0.25
"""Share of the requests left out that the first batch adds."""
LEAST_BATCH = 4
SPREAD = 0.2
"""The noise that shuffles the order of candidates, as a share of the differences between
candidates."""

Chosen = frozenset[int]
WITHOUT_WAIT = " (no wait)"
"""Marks an admission whose requests do not wait for a decode batch (`conductor.decode_wait`)."""


class EffectiveCollector(Collector):
    """A collector that also notes which requests were effective, by the number of their arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.effective: set[int] = set()

    def note_ended(self, record: RequestRecord, slo_class: str = "") -> None:
        if record.effective:
            self.effective.add(int(record.request_id))
        super().note_ended(record, slo_class)


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs the simulator on some of the requests. `settings`: the settings of each run."""

    config: Config
    hardware: Hardware
    arrivals: Sequence[Arrival]
    settings: SimulationSettings = USUAL_SETTINGS

    def policy(self, name: str, decode_wait: bool = True) -> Chosen:
        """Returns the effective requests with this admission policy."""
        return self._run(name, range(len(self.arrivals)), decode_wait)

    def clairvoyant(self, chosen: Chosen) -> Chosen:
        """Returns the effective requests if exactly the chosen requests are admitted."""
        return self._run("none", sorted(chosen))

    def _run(self, admission: str, numbers: Sequence[int], decode_wait: bool = True) -> Chosen:
        conductor = msgspec.structs.replace(
            self.config.conductor, admission=admission, decode_wait=decode_wait
        )
        simulation = Simulation(
            msgspec.structs.replace(self.config, conductor=conductor),
            self.hardware,
            msgspec.structs.replace(self.settings, sample_s=SAMPLE_S),
        )
        collector = EffectiveCollector()
        simulation.collector = collector
        simulation.run(self.arrivals[number] for number in numbers)
        return frozenset(numbers[place] for place in collector.effective)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The requests that the clairvoyant admission admits, and the requests that are then
    effective."""

    admitted: Chosen
    effective: Chosen
    runs: int


@dataclass(frozen=True, slots=True)
class Budget:
    """The search ends after this many runs or seconds of the machine's clock."""

    runs: int
    seconds: float = float("inf")


def best_schedule(
    runner: Runner,
    demand: LeastWork,
    resources: Sequence[Resource],
    starts: Sequence[Chosen],
    budget: Budget,
    on_progress: Callable[[int, int], None] = lambda runs, effective: None,
) -> Schedule:
    """Searches within the budget. `starts`: effective requests of the policies' runs. `on_progress`
    gets the number of runs and the best figure after each run."""
    relaxed = [upper_bound(demand, resources, capacity) for capacity in CAPACITIES]
    search = _Search(runner, demand, relaxed, budget, on_progress)
    search.polish(max(starts, key=len, default=frozenset()))
    before = 0
    for bound in relaxed:
        found = search.polish(frozenset(np.flatnonzero(bound.shares > 0.5).tolist()))
        if found < before:
            break  # less capacity can only serve less
        before = found
    search.climb()
    return Schedule(search.admitted, search.effective, search.runs)


class _Search:
    def __init__(
        self,
        runner: Runner,
        demand: LeastWork,
        relaxed: Sequence[Bound],
        budget: Budget,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self.admitted: Chosen = frozenset()
        self.effective: Chosen = frozenset()
        self.runs = 0
        self._runner = runner
        self._demand = demand
        self._budget = budget
        self._on_progress = on_progress
        self._rng = Random(0)
        self._promise = _promise(demand, relaxed)
        self._until_s = time.perf_counter() + budget.seconds
        # A part is so long that a request mostly affects only requests of its own part.
        span_s = float((demand.decode_until_s - demand.arrived_s).mean()) if len(demand) else 1.0
        self._part = (demand.arrived_s // max(span_s, 1e-9)).astype(int)

    @property
    def over(self) -> bool:
        return self.runs >= self._budget.runs or time.perf_counter() >= self._until_s

    def _try(self, chosen: Chosen) -> Chosen:
        """Runs the simulation with these requests admitted, and keeps the run if it is the best."""
        effective = self._runner.clairvoyant(chosen)
        self.runs += 1
        if len(effective) > len(self.effective):
            self.admitted, self.effective = chosen, effective
        self._on_progress(self.runs, len(self.effective))
        return effective

    def polish(self, chosen: Chosen) -> int:
        """Drops requests that miss their SLOs, until no request misses them or dropping no longer
        helps. Returns the most effective requests of any run."""
        most = 0
        while chosen and not self.over:
            effective = self._try(chosen)
            more, most = len(effective) > most, max(most, len(effective))
            if len(effective) == len(chosen) or not more:
                break
            chosen = effective
        return most

    def climb(self) -> None:
        """Adds batches of requests to the best set; a batch has the size that has recently paid."""
        size = int(FIRST_SHARE * (len(self._demand) - len(self.effective)))
        while not self.over:
            kept = self.effective
            batch = self._candidates(max(size, LEAST_BATCH))
            if not batch:
                return
            found = self._try(kept | batch)
            if len(found) > len(kept):
                size = int(size * 1.5)
                continue
            paying = batch & self._paying(kept, found)
            if paying and paying != batch and not self.over:
                found = self._try(kept | paying)
            if len(found) <= len(kept):
                if size <= LEAST_BATCH:
                    size = len(self._demand) // 8
                size //= 2

    def _candidates(self, size: int) -> Chosen:
        """Returns the most promising of the requests that are not effective, somewhat shuffled."""
        outside = [
            number
            for number in np.flatnonzero(self._demand.possible).tolist()
            if number not in self.effective
        ]
        spread = SPREAD * (self.runs + 1)
        order = sorted(
            outside, key=lambda n: self._promise[n] + spread * self._rng.random(), reverse=True
        )
        return frozenset(order[:size])

    def _paying(self, before: Chosen, after: Chosen) -> Chosen:
        """Returns the requests in parts of the trace in which more requests are effective than
        before."""
        num_parts = int(self._part.max(initial=0)) + 1
        gain = np.zeros(num_parts)
        np.add.at(gain, self._part[list(after - before)], 1.0)
        np.subtract.at(gain, self._part[list(before - after)], 1.0)
        return frozenset(np.flatnonzero(gain[self._part] > 0).tolist())


def _promise(demand: LeastWork, relaxed: Sequence[Bound]) -> list[float]:
    """Returns a rank that is higher for requests that the relaxed optima serve, then for requests
    with less work."""
    work_s = demand.prefill_s + demand.decode_s.max(axis=0)
    rank = np.argsort(np.argsort(-work_s)) / max(len(work_s), 1)
    return [float(value) for value in sum(bound.shares for bound in relaxed) + rank]
