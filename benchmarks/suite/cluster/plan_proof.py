"""Checks by an exhaustive search, up to a number of nodes, whether the cluster that `plan` names is
the cheapest.

A candidate is an arrangement of prefill, decode and mixed instances, with a chunk size, a cache
size, an SSD and an eviction policy from the constants below. The plan chooses from the same values.
All candidates that cost at least 3 % less than the named cluster are decided. A candidate is out if

    arithmetic   a bound on what the hardware can do excludes its arrangement (plan/bounds.py),
    clear        the same arrangement and chunk size with the most cache and SSD of these prices
                 had missed its goal before half of the requests had arrived,
    simulated    its own simulation of the whole trace misses the goal.

The SSD and the eviction policy are varied where a simulation had fewer hits than an endless cache.
The first two methods are audited: a sample of what they exclude is simulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import groupby
from random import Random
from typing import Any

import msgspec

from benchmarks.suite.cluster.plan_workloads import ProofWorkload
from moonpool.config.parse import parse_config
from moonpool.config.tables import Config
from moonpool.plan.arrangements import arrangements
from moonpool.plan.assess import FRESH_SEEDS_FROM, Assessment, Assessor, PlanGoal, check
from moonpool.plan.bounds import Bounds
from moonpool.plan.candidate import Candidate, NodeKind, Priced, Steps
from moonpool.plan.demand import prepare, truth_for
from moonpool.plan.search import Planner
from moonpool.plan.simulation_pool import SimulationPool
from moonpool.plan.trial import Workload
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.prices import parse_prices

WITHIN = 0.03
ALIKE = 0.002
"""Difference of hit ratios below which a pool counts as endless."""
CACHES = (125_000, 250_000, 500_000, 1_000_000, 2_000_000, 4_000_000)
SSDS = (0, 4_000_000)
EVICTIONS = ("predictive", "lru")
DRAWS = 3
"""The number of further samples that the plan simulates; the proof draws that many and one more."""
change = msgspec.structs.replace


class PlanProof:
    """Plans one workload, and searches exhaustively below the price of the choice."""

    def __init__(
        self, workload: Workload, base: Config, kinds: list[NodeKind], max_nodes: int
    ) -> None:
        """Raises ConfigError."""
        shape = BUILT_IN.shape(base.hardware.shape)
        self.workload = workload
        self.base = truth_for(base, kinds, None)
        self.priced = Priced(parse_prices(), shape.kv_bytes_per_token)
        self._max_nodes = max_nodes
        goal = PlanGoal(num_draws=DRAWS)
        self._goal = goal
        prepared = prepare(workload, self.base, kinds, self.priced, goal.wanted)
        self.prepared = change(prepared, steps=_fewer(prepared.steps))
        self._bounds = Bounds(workload, self.base, self.prepared.demand)
        self.found: list[Candidate] = []
        self._excluded: list[Candidate] = []
        self.counts = {"candidates": 0, "arithmetic": 0, "clear": 0, "simulated": 0}

    def run(self, audits: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Returns the figures. Raises ConfigError."""
        with SimulationPool(self.workload, 1) as pool_of_runs:
            began = time.process_time()
            assessor = Assessor(pool_of_runs, self.base, self._goal, self.priced)
            planned = Planner(assessor, self.prepared, self._bounds).plan()
            plan_cpu_s, plan_runs = time.process_time() - began, planned.runs
            if planned.choice is None:
                return {"named": None, "right": False, "plan_cpu_s": round(plan_cpu_s, 1)}
            say(f"named {_words(planned.choice)} after {plan_runs:.0f} runs")
            self.search(assessor, planned.choice)
            kept = self._audit(assessor, audits)
            fresh = change(self._goal, first_seed=FRESH_SEEDS_FROM)
            checked = check(planned.choice, Assessor(pool_of_runs, self.base, fresh, self.priced))
            runs = assessor.runs - plan_runs
        best = min(self.found, key=self.priced.usd_per_h, default=None)
        return {
            "named": _figures(planned.choice),
            "sure": None if planned.sure is None else _figures(planned.sure),
            "plan_runs": plan_runs,
            "plan_cpu_s": round(plan_cpu_s, 1),
            "cheaper": None if best is None else _figures(assessor.known(best)),
            "over_best": 0.0
            if best is None
            else round(planned.choice.usd_per_h / self.priced.usd_per_h(best) - 1, 4),
            "right": best is None,
            "searched": self.counts,
            "search_runs": runs,
            "audited": min(audits, len(self._excluded)),
            "audited_kept": kept,
            "fresh_within": checked.num_within,
            "fresh": [round(o.share, 4) for o in checked.fresh.outcomes],
        }

    def search(self, assessor: Assessor, choice: Assessment) -> None:
        below = choice.usd_per_h / (1 + WITHIN)
        named = choice.candidate
        for arrangement in arrangements(
            self.prepared.starts, self.prepared.layout, self._max_nodes
        ):
            one = change(arrangement, placement=named.placement, admission=named.admission)
            settings = list(self._settings(one, below))
            self.counts["candidates"] += len(settings)
            if not settings:
                continue
            if self._bounds.most_share(one) < self._goal.wanted:
                self.counts["arithmetic"] += len(settings)
                self._excluded += settings
                continue
            for _, group in groupby(settings, key=lambda c: c.chunk_tokens):
                self._decide(assessor, list(group))

    def _settings(self, one: Candidate, below: float) -> Iterator[Candidate]:
        """Yields all settings below a price, by chunk size, the richest first."""
        steps = self.prepared.steps
        for chunk in steps.chunks:
            for cache in reversed(steps.caches):
                for ssd in reversed(steps.ssds):
                    for eviction in steps.evictions:
                        each = change(
                            one,
                            chunk_tokens=chunk,
                            cache_tokens=cache,
                            ssd_tokens=ssd,
                            eviction=eviction,
                        )
                        if self.priced.usd_per_h(each) < below:
                            yield each

    def _decide(self, assessor: Assessor, group: list[Candidate]) -> None:
        """Decides all candidates of one arrangement and chunk size, the richest first."""
        rich = assessor.look([group[0]])[0]
        if rich.gave_up and not rich.nearly():
            self.counts["simulated"] += 1
            self.counts["clear"] += len(group) - 1
            self._excluded += group[1:]
            return
        evictions = self.prepared.steps.evictions
        group.sort(key=lambda c: (-c.cache_tokens, c.ssd_tokens, evictions.index(c.eviction)))
        for one in group:
            plain = change(one, ssd_tokens=0, eviction=evictions[0])
            self.counts["simulated"] += 1
            if plain != one and self._evicts_nothing(assessor, plain):
                continue
            if self._keeps(assessor, one):
                self.found.append(one)

    def _evicts_nothing(self, assessor: Assessor, plain: Candidate) -> bool:
        """Whether the simulation of the whole trace had as many hits as with an unlimited cache."""
        outcome = assessor.looks.get(plain)
        return (
            outcome is not None
            and not outcome.gave_up
            and outcome.hit_ratio >= self._endless - ALIKE
        )

    @property
    def _endless(self) -> float:
        demand = self.prepared.demand
        return sum(demand.hit_tokens) / sum(demand.input_tokens)

    def _keeps(self, assessor: Assessor, one: Candidate) -> bool:
        return assessor.look([one])[0].share >= self._goal.wanted

    def _audit(self, assessor: Assessor, audits: int) -> int:
        """Returns how many of a sample of the excluded candidates keep the SLOs when simulated."""
        sample = Random(1).sample(self._excluded, min(audits, len(self._excluded)))
        return sum(one.share >= self._goal.wanted for one in assessor.in_full(sample))


def prove(workload: ProofWorkload, num_requests: int, max_nodes: int) -> PlanProof:
    """Prepares the proof of one generated workload. Raises ConfigError."""
    slo = {"slo": {"ttft_s": workload.ttft_s, "tbt_s": workload.tbt_s}}
    device, _, number = workload.devices.partition(":")
    rows = workload.rows(num_requests)
    return PlanProof(
        Workload(rows, workload.block_tokens),
        parse_config("", slo, DEFAULTS),
        [NodeKind(device, int(number))],
        max_nodes,
    )


def _fewer(steps: Steps) -> Steps:
    """Returns the steps that the proof varies."""
    caches = [cache for cache in steps.caches if cache in CACHES]
    return change(
        steps,
        caches=tuple(caches or steps.caches[-1:]),
        ssds=tuple(ssd for ssd in steps.ssds if ssd in SSDS),
        evictions=tuple(name for name in steps.evictions if name in EVICTIONS),
    )


def _words(found: Assessment) -> str:
    one = found.candidate
    return f"{one.counts} of {one.hardware} at {found.usd_per_h:.2f} USD/h, {found.share:.1%}"


def _figures(found: Assessment) -> dict[str, Any]:
    one = found.candidate
    return {
        "cluster": one.counts,
        "hardware": one.hardware,
        "cache_tokens": one.cache_tokens,
        "ssd_tokens": one.ssd_tokens,
        "eviction": one.eviction,
        "chunk_tokens": one.chunk_tokens,
        "admission": one.admission,
        "usd_per_h": round(found.usd_per_h, 2),
        "share": round(found.share, 4),
        "another_sample": None
        if found.interval is None
        else [round(found.interval.low, 4), round(found.interval.high, 4)],
    }
