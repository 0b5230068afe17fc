"""Searches for the cheapest cluster that keeps the SLOs on a trace.

    starting    From the cost model's numbers, each mix of hardware grows by what its misses lacked
                until it keeps the SLOs. The cheapest cluster so far is the best.
    tuning      Other admissions are tried on the last cluster that failed.
    improving   Of the arrangements (numbers of prefill, decode and mixed instances) that cost less
                than the best and that arithmetic does not exclude, the most promising is simulated
                with all cache that its price allows, with several chunk sizes. If it keeps the
                SLOs, its cache is reduced. If not, it excludes arrangements with less of what it
                lacked.
    settling    For clusters that keep the SLOs, the cheapest SSD, eviction, cache and chunk size
                are found. Each cheaper neighbour of the best cluster is tried afterwards.
    levelling   Of the clusters at the best price, the one that bears the most load is the choice.
    drawing     Draws of the trace give the interval of the choice's attainment. The sure choice is
                the cheapest tried cluster, from the choice upwards, whose interval lies above the
                goal. At the end, all neighbours of the choice are simulated.

The choice of simulations follows from their outcomes alone, not from the time they take or the
number of processes. While the search waits for one simulation, idle processes run simulations that
it will probably choose next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product, zip_longest
from math import inf, isclose
from typing import Any

import msgspec

from moonpool.config.tables import ADMISSIONS
from moonpool.plan.arrangements import (
    MOST_INSTANCES,
    Arrangement,
    Failure,
    arrangements,
    decode_share,
    possible,
)
from moonpool.plan.assess import ROUNDING, Assessment, Assessor, NeighbourFound, StoppedError
from moonpool.plan.bounds import Bounds
from moonpool.plan.candidate import Candidate, neighbours, stepped
from moonpool.plan.confidence import least_mean
from moonpool.plan.demand import Prepared
from moonpool.plan.room import Room, rooms
from moonpool.plan.settings import (
    cheapest_settings,
    first_kept,
    grown,
    least_cache,
    with_any_chunk,
)
from moonpool.plan.trial import Outcome
from moonpool.types import Struct

KEPT_STARTS = 8
DEAREST = 2.0
"""Mixes of hardware above this multiple of the cheapest modelled price are not simulated."""
MAX_GROWTHS = 12
PATIENCE = 40
"""The search ends after this many failed arrangements in a row."""
LEAST_GAIN = 0.01
"""An arrangement that can save no more than this share of the price is not simulated."""
SEARCH_SHARE = 0.75
"""The share of the allowed runs and time for all stages before the draws."""
MOST_LEVEL = 4
"""At most this many other arrangements at the best cluster's price are simulated."""
SURE_CANDIDATES = 8
SURE_DEAREST = 2.0
SETTINGS = (*("cache_tokens", "ssd_tokens", "eviction", "chunk_tokens", "placement", "admission"),)
FIRST_LOADS = (0.5, 1.3)
"""The computed loads at which an arrangement is expected to keep and to miss the SLOs, before any
simulation of its layout."""


class MixFound(Struct, frozen=True):
    """One mix of hardware, with the cost model's first candidate and the cheapest cluster of this
    hardware that keeps the SLOs."""

    start: Candidate
    start_usd_per_h: float
    cheapest: Assessment | None = None
    num_simulated: int = 0


class ClusterPlan(Struct, frozen=True):
    """The result of a search. `choice` is None if no cluster keeps the SLOs. `sure` keeps the SLOs
    at the wanted confidence; it may be the choice. `assessed` has all simulated candidates, by
    price. `stopped` says why the search ended early, or is "". `num_left` counts the arrangements
    that cost less than the choice and were not excluded when the search ended."""

    choice: Assessment | None
    sure: Assessment | None
    neighbours: tuple[NeighbourFound, ...]
    mixes: tuple[MixFound, ...]
    assessed: tuple[Assessment, ...]
    runs: float
    stopped: str
    num_left: int = 0
    rooms: tuple[Room, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.stopped

    def front(self) -> list[Assessment]:
        """Returns the candidates for which no cheaper candidate attains as much."""
        found: list[Assessment] = []
        for one in self.assessed:
            if not one.gave_up and (not found or one.share > found[-1].share):
                found.append(one)
        return found


class Planner:
    """Runs one search, stage by stage."""

    def __init__(self, assessor: Assessor, prepared: Prepared, bounds: Bounds) -> None:
        self._assessor = assessor
        self._prepared = prepared
        self._bounds = bounds
        self._steps = prepared.steps
        self._wanted = assessor.goal.wanted
        self._stage = ""
        self._best: Candidate | None = None
        self._last_failed: Candidate | None = None
        self._settings: dict[str, Any] = {}
        self._chunks: dict[str, int] = {}  # chunk size of the best cluster by layout
        self._new_failures: list[Failure] = []  # failures since the last exclusion
        self._visited: set[Candidate] = set()
        self._open: list[Arrangement] = []
        self._loads: dict[str, tuple[float, float]] = {}  # like FIRST_LOADS, by layout
        self._kept: list[Candidate] = []  # the cheapest candidates that keep the SLOs
        self._rooms: tuple[Room, ...] = ()

    def plan(self) -> ClusterPlan:
        """Runs all stages and returns the plan. Raises ConfigError."""
        choice = sure = None
        stopped = ""
        self._assessor.limit(SEARCH_SHARE)
        try:
            self._start()
            self._tune()
            self._improve()
            self._settle()
            self._level()
        except StoppedError as error:
            stopped = str(error)
        except KeyboardInterrupt:
            stopped = "interrupted"
        self._assessor.limit(1.0)
        if self._best is not None:
            choice = self._assessor.known(self._best)
        try:
            if choice is not None and stopped != "interrupted":
                self._assessor.doing = "draws of the trace"
                choice = self._assessor.drawn(choice.candidate)
                sure = self._sure(choice)
                self._look_around(choice.candidate)
        except StoppedError as error:
            stopped = stopped or str(error)
        except KeyboardInterrupt:
            stopped = stopped or "interrupted"
        return self._result(choice, sure, stopped)

    # Simulating

    def _price(self, candidate: Candidate) -> float:
        return self._assessor.usd_per_h(candidate)

    @property
    def _most(self) -> float:
        """The price that a candidate must be below."""
        return inf if self._best is None else self._price(self._best)

    def _look(
        self, candidates: Sequence[Candidate], ahead: Sequence[Candidate] = ()
    ) -> list[Outcome]:
        """Simulates the candidates, and takes the cheapest that keeps the SLOs as the best. An idle
        process simulates the candidates `ahead`, which changes only the time."""
        if not candidates:
            return []
        best = "" if self._best is None else f"; best so far {self._named(self._best)}"
        self._assessor.doing = f"{self._stage}, {candidates[0].roles}{best}"
        outcomes = self._assessor.look(candidates, ahead)
        for one, outcome in zip(candidates, outcomes, strict=True):
            if outcome.share < self._wanted:
                self._last_failed = one
            elif self._price(one) < self._most:
                self._best = one
                self._chunks[one.layout] = one.chunk_tokens
        return outcomes

    def _named(self, one: Candidate) -> str:
        return f"{one.roles} of {one.hardware} at {self._price(one):,.2f} USD/h"

    # Starting

    def _start(self) -> None:
        self._stage = "starting"
        starts = sorted(self._prepared.starts, key=lambda one: (self._price(one), str(one)))
        least = self._price(starts[0])
        kept = [s for s in starts[:KEPT_STARTS] if self._price(s) <= DEAREST * least]
        for start, after in zip_longest(kept, kept[1:]):
            self._grow(start, after)

    def _grow(self, now: Candidate, after: Candidate | None) -> None:
        """Grows a candidate until it keeps the SLOs or costs more than the best. The search grows
        `after` next."""
        for _ in range(MAX_GROWTHS):
            roomy = self._richest(now)
            if roomy is None:
                return
            rich = None if after is None else self._richest(after)
            ahead = [] if rich is None else [rich]
            found, outcome = with_any_chunk(roomy, self._look, self._steps, self._wanted, ahead)
            self._learn(found, outcome)
            if outcome.share >= self._wanted:
                return
            more = grown(found, outcome.misses, 1.0 - outcome.share)
            now = msgspec.structs.replace(more, cache_tokens=now.cache_tokens)

    def _richest(self, one: Candidate) -> Candidate | None:
        """Returns the candidate with the most cache, then the most SSD, below the best price, or
        None if there is none."""
        for cache, ssd in product(reversed(self._steps.caches), reversed(self._steps.ssds)):
            rich = msgspec.structs.replace(one, cache_tokens=cache, ssd_tokens=ssd)
            if self._price(rich) < self._most:
                return rich
        return None

    # Tuning

    def _tune(self) -> None:
        """Takes another admission if the last cluster that failed does better with it."""
        failed = self._last_failed
        if failed is None:
            return
        self._stage = "policies"
        now = self._look([failed])[0]
        options = [{"admission": name} for name in ADMISSIONS if name != failed.admission]
        others = [msgspec.structs.replace(failed, **option) for option in options]
        for option, outcome in zip(options, self._look(others), strict=True):
            if outcome.how_far() > now.how_far():
                now, self._settings = outcome, option

    # Improving

    def _improve(self) -> None:
        self._stage = "improving"
        self._list_arrangements()
        failed = 0
        while failed < PATIENCE:
            chosen = self._most_promising()
            if chosen is None:
                return
            failed = 0 if self._visit(chosen) else failed + 1

    def _list_arrangements(self) -> None:
        starts = self._prepared.starts
        cheapest = min(
            kind.usd_per_h(self._assessor.prices)
            for start in starts
            for kind in (start.kind, start.decode_kind)
        )
        if self._best is not None:
            most = int(self._most / max(cheapest, 1e-9))
        else:
            most = 2 * max(start.num_instances for start in starts)
        listed = arrangements(starts, self._prepared.layout, min(max(most, 1), MOST_INSTANCES))
        least = {"cache_tokens": self._steps.caches[0], "ssd_tokens": 0} | self._settings
        cheap = (msgspec.structs.replace(one, **least) for one in listed)
        cheap = (one for one in cheap if self._price(one) < self._most)
        self._open = [
            Arrangement(one, self._price(one), load, f"{one.counts} {one.hardware}")
            for one, load in possible(cheap, self._bounds, self._wanted)
        ]

    def _most_promising(self) -> Arrangement | None:
        """Returns the arrangement with the largest saving times its chance to keep the SLOs, or
        None if there is none."""
        most = self._most * (1 - LEAST_GAIN)
        self._open = [
            each
            for each in self._open
            if each.usd_per_h < most
            and each.one not in self._visited
            and not any(failure.excludes(each.one) for failure in self._new_failures)
        ]
        self._new_failures.clear()
        return self._promising(self._open, self._loads)

    def _promising(
        self, open_ones: Sequence[Arrangement], loads: Mapping[str, tuple[float, float]]
    ) -> Arrangement | None:
        if not open_ones:
            return None
        # While no cluster keeps the SLOs yet, the cheapest of equally likely arrangements comes
        # first.
        top = 1.1 * max(each.usd_per_h for each in open_ones)
        if self._best is not None:
            top = self._most * (1 - LEAST_GAIN)
        return max(
            open_ones, key=lambda e: (_chance(e, loads) * (top - e.usd_per_h), -e.load, e.name)
        )

    def _next_if_failed(self, chosen: Arrangement) -> list[Candidate]:
        """Returns the candidates to simulate next, probably, if this arrangement fails for lack of
        both roles."""
        kept, missed = self._loads.get(chosen.one.layout, FIRST_LOADS)
        missed = min(missed, max(chosen.load, 1.05 * kept))
        failure = Failure(chosen.one, 0.5)
        left = [e for e in self._open if e.one != chosen.one and not failure.excludes(e.one)]
        after = self._promising(left, self._loads | {chosen.one.layout: (kept, missed)})
        rich = None if after is None else self._rich(after)
        return [] if rich is None else [rich]

    def _rich(self, chosen: Arrangement) -> Candidate | None:
        """Returns the arrangement with the most cache below the best price and with its layout's
        best chunk size, or None if no cache is cheap enough."""
        rich = self._richest(chosen.one)
        if rich is None:
            return None
        like = rich.layout if rich.layout in self._chunks or not rich.mixed else "mixed"
        chunk_tokens = self._chunks.get(like, rich.chunk_tokens)
        return msgspec.structs.replace(rich, chunk_tokens=chunk_tokens)

    def _learn(self, one: Candidate, outcome: Outcome) -> None:
        """Notes at which load a layout keeps or misses the SLOs."""
        load = self._bounds.load(one)
        kept, missed = self._loads.get(one.layout, FIRST_LOADS)
        if outcome.share >= self._wanted:
            kept = max(kept, load)
            missed = max(missed, 1.05 * kept)
        else:
            missed = min(missed, max(load, 1.05 * kept))
        self._loads[one.layout] = kept, missed

    def _visit(self, chosen: Arrangement) -> bool:
        """Searches the settings of an arrangement, and returns whether any keep the SLOs."""
        self._visited.add(chosen.one)
        rich = self._rich(chosen)
        if rich is None:
            return False
        ahead = self._next_if_failed(chosen)
        # needed next if `rich` keeps the SLOs
        bare = msgspec.structs.replace(rich, ssd_tokens=self._steps.ssds[0])
        likely = _chance(chosen, self._loads) > 0.5
        ahead = [bare, *ahead] if likely else [*ahead, bare]
        found, outcome = with_any_chunk(rich, self._look, self._steps, self._wanted, ahead)
        self._chunks[rich.layout] = found.chunk_tokens
        if outcome.share < self._wanted and outcome.nearly():
            found, outcome = self._otherwise(found, outcome)
        if outcome.error:
            return False
        self._learn(found, outcome)
        if outcome.share < self._wanted:
            self._new_failures.append(Failure(chosen.one, decode_share(outcome.misses)))
            return False
        self._kept.append(least_cache(found, self._look, self._steps, self._wanted))
        return True

    def _otherwise(self, now: Candidate, outcome: Outcome) -> tuple[Candidate, Outcome]:
        """Tries a candidate that nearly keeps the SLOs without SSD, and with less cache.

        A smaller pool may refuse requests that would slow down others.
        """
        bare = msgspec.structs.replace(now, ssd_tokens=0)
        caches = [cache for cache in self._steps.caches if cache <= now.cache_tokens]
        others = [
            msgspec.structs.replace(bare, cache_tokens=cache)
            for cache in (caches[-1], caches[len(caches) // 2], caches[len(caches) // 4])
        ]
        others = [one for one in dict.fromkeys(others) if one != now]
        kept = first_kept(others, self._look, self._wanted)
        return (now, outcome) if kept is None else (kept, self._look([kept])[0])

    # Settling

    def _settle(self) -> None:
        self._stage = "settling"
        if self._best is not None:
            self._kept.append(self._best)
        for one in sorted(dict.fromkeys(self._kept), key=lambda c: (self._price(c), str(c))):
            least = msgspec.structs.replace(
                one, cache_tokens=self._steps.caches[0], ssd_tokens=self._steps.ssds[0]
            )
            if self._price(least) < self._most * (1 - LEAST_GAIN):
                cheapest_settings(one, self._look, self._price, self._steps, self._wanted)
        self._try_cheaper_neighbours()

    def _try_cheaper_neighbours(self) -> None:
        done: Candidate | None = None
        while self._best is not None and self._best != done:
            done = self._best
            around = [near.candidate for near in neighbours(done, self._steps)]
            cheaper = [one for one in around if self._price(one) < self._most]
            first_kept(sorted(cheaper, key=self._price), self._look, self._wanted)

    # Equal prices

    def _level(self) -> None:
        """Takes the cluster with the most room among the clusters at the best price."""
        self._stage = "clusters at the same price"
        done: Candidate | None = None
        while self._best is not None and self._best != done:
            others = self._others_at_price(self._best)
            outcomes = zip(others, self._look(others), strict=True)
            level = [one for one, outcome in outcomes if outcome.share >= self._wanted]
            found = rooms([self._best, *level], self._assessor.look_faster, self._wanted)
            self._rooms = tuple(found)
            self._best = done = found[0].candidate
            self._try_cheaper_neighbours()

    def _others_at_price(self, best: Candidate) -> list[Candidate]:
        """Returns up to MOST_LEVEL other arrangements at the price of the best, with its settings
        and with the least load first."""
        alike = {name: getattr(best, name) for name in SETTINGS}
        starts = [msgspec.structs.replace(start, **alike) for start in self._prepared.starts]
        listed = arrangements(starts, self._prepared.layout, best.num_instances)
        chunks = self._chunks
        same = (
            msgspec.structs.replace(one, chunk_tokens=chunks.get(one.layout, one.chunk_tokens))
            for one in listed
            if isclose(self._price(one), self._price(best))
        )
        known = best.counts, best.hardware
        same = (one for one in same if (one.counts, one.hardware) != known)
        by_load = sorted(possible(same, self._bounds, self._wanted), key=lambda found: found[1])
        return [one for one, _ in by_load[:MOST_LEVEL]]

    def _look_around(self, choice: Candidate) -> None:
        self._assessor.doing = "neighbours"
        around = [near.candidate for near in neighbours(choice, self._steps)]
        self._assessor.look([one for one in around if self._price(one) < inf])

    # Being sure

    def _sure(self, choice: Assessment) -> Assessment | None:
        """Returns the cheapest found cluster whose interval is above the goal, or None."""
        assert choice.interval is not None
        if choice.interval.low >= self._wanted:
            return choice
        num_requests = self._requests_of_draws(choice)
        if num_requests is not None:
            confidence = self._assessor.goal.confidence
            if least_mean(num_requests, self._wanted - ROUNDING, confidence) > 1.0:
                return None  # with too few requests, no interval is narrow enough
        self._assessor.doing = "a sure choice"
        known = [
            one for one, outcome in self._assessor.looks.items() if outcome.share >= self._wanted
        ]
        wider = [*known, *self._grown_variants(choice.candidate)]
        wider = [
            one
            for one in dict.fromkeys(wider)
            if choice.usd_per_h < self._price(one) <= SURE_DEAREST * choice.usd_per_h
        ]
        wider.sort(key=lambda one: (self._price(one), str(one)))
        every = max(len(wider) // SURE_CANDIDATES, 1)
        draws = [(outcome.share, seed) for seed, outcome in enumerate(choice.outcomes)][1:]
        worst_first = [seed for _, seed in sorted(draws)]
        for one in wider[::every]:
            found = self._assessor.sure(one, worst_first, num_requests)
            if found is not None:
                return found
        return None

    def _requests_of_draws(self, choice: Assessment) -> int | None:
        """Returns the mean number of requests of the trace and its draws, or None if clusters are
        judged by different classes of requests."""
        if self._prepared.base.slo.classes:
            return None
        numbers = [outcome.attainment.num_requests for outcome in choice.outcomes]
        return max(round(sum(numbers) / len(numbers)), 1)

    def _grown_variants(self, one: Candidate) -> list[Candidate]:
        """Returns the candidate with up to two more instances, each with its cache and with a cache
        that is two steps larger."""
        found = []
        roles = [role for role in ("prefill", "decode", "mixed") if getattr(one, role)]
        for adds in product((0, 1, 2), repeat=len(roles)):
            counts = {role: getattr(one, role) + add for role, add in zip(roles, adds, strict=True)}
            for step in (0, 2):
                cache = stepped(self._steps.caches, one.cache_tokens, step)
                if cache is not None and sum(adds) <= 2:
                    found.append(msgspec.structs.replace(one, cache_tokens=cache, **counts))
        return found

    # The result

    def _result(
        self, choice: Assessment | None, sure: Assessment | None, stopped: str
    ) -> ClusterPlan:
        assessor = self._assessor
        allowed = [one for one in assessor.looks if self._price(one) < inf]
        assessed = [assessor.known(one) for one in allowed]
        if choice is not None:
            assessed = [choice if one.candidate == choice.candidate else one for one in assessed]
        assessed.sort(key=lambda one: (one.usd_per_h, -one.share, str(one.candidate)))
        around = []
        if choice is not None:
            around = [
                NeighbourFound(near.change, assessor.known(near.candidate))
                for near in neighbours(choice.candidate, self._steps)
                if near.candidate in allowed
            ]
        left = [each for each in self._open if each.usd_per_h < self._most]
        left = [each for each in left if each.one not in self._visited]
        mixes = self._mixes(assessed)
        return ClusterPlan(
            choice,
            sure,
            tuple(around),
            mixes,
            tuple(assessed),
            assessor.runs,
            stopped,
            len(left),
            self._rooms,
        )

    def _mixes(self, assessed: Sequence[Assessment]) -> tuple[MixFound, ...]:
        """Returns one entry for each hardware and layout, with the cheapest first."""
        found: dict[tuple[str, str], MixFound] = {}
        for start in self._prepared.starts:
            found[start.hardware, start.layout] = MixFound(start, self._price(start))
        for one in assessed:
            key = one.candidate.hardware, one.candidate.layout
            mix = found.get(key) or MixFound(one.candidate, one.usd_per_h)
            cheapest = mix.cheapest
            if cheapest is None and one.meets(self._wanted):
                cheapest = one
            found[key] = MixFound(mix.start, mix.start_usd_per_h, cheapest, mix.num_simulated + 1)
        return tuple(sorted(found.values(), key=_mix_order))


def _chance(each: Arrangement, loads: Mapping[str, tuple[float, float]]) -> float:
    kept, missed = loads.get(each.one.layout, FIRST_LOADS)
    if each.load >= missed:
        return 0.02 * missed / each.load
    return min(1.0, 0.02 + 0.98 * (missed - each.load) / max(missed - kept, 1e-9))


def _mix_order(mix: MixFound) -> tuple[bool, float, str]:
    usd = mix.start_usd_per_h if mix.cheapest is None else mix.cheapest.usd_per_h
    return mix.cheapest is None, usd, mix.start.hardware + mix.start.layout
