"""The search for the cheapest cluster that meets the SLOs.

    demand      The cost model gives where each mix of hardware begins. Mixes that cost twice the
                cheapest, or that cannot hold the model, are left out.
    boundaries  On the busiest part of the trace: the fewest instances, for all mixes in parallel.
    tuning      On the same part, with one instance fewer: policies and chunk size.
    settling    On the whole trace, for the best mixes: up to where each meets; then, the cheapest
                mix first, down in price until no cheaper candidate meets with confidence. A mix
                that begins above the best price is not settled.
    confirming  Each cheaper neighbour of the choice, with as many seeds as necessary; and those of
                equal price that do better on the busiest part. One that meets, and is cheaper or
                better, becomes the choice.

The choice of simulations follows from their outcomes alone, not from the time they take or the
number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec

from moonpool.plan.assess import Assessment, Assessor, BudgetError, NeighbourFound
from moonpool.plan.boundary import boundary, side_by_side
from moonpool.plan.candidate import (
    ADMISSIONS,
    CACHE_STEPS,
    CHUNK_STEPS,
    PLACEMENTS,
    Candidate,
    neighbours,
    stepped,
)
from moonpool.plan.confidence import Verdict
from moonpool.types import Struct

KEPT_MIXES = 8
DEAREST = 2.0
"""Mixes above this multiple of the cheapest price, by the cost model, are not simulated."""
SETTLED_MIXES = 3
SETTLED_WITHIN = 1.3
"""At most SETTLED_MIXES mixes are settled: the cheapest by their boundaries, up to this multiple of
the cheapest price."""
GAIN = 0.01
"""Least gain of attainment that justifies another policy or chunk size."""
MAX_GROWTHS = 8
CACHE_STRIDE = 2
"""Steps of cache that a cluster gains when it misses."""
MAX_MOVES = 40
SEARCH_SHARE = 0.6
"""Share of the allowed runs for all stages before confirming, because a comparison of the choice
with its neighbours is worth more than one with every mix."""


class MixFound(Struct, frozen=True):
    """The results of one mix of hardware: `start` by the cost model, `boundary` on the busiest part
    of the trace, and `settled`, the cheapest that meets on the whole trace."""

    start: Candidate
    start_usd_per_h: float
    boundary: Candidate | None = None
    settled: Assessment | None = None


class ClusterPlan(Struct, frozen=True):
    """The result of a search. `choice` is None where nothing meets the SLOs. `assessed`: all
    candidates with more than one whole simulation, by price."""

    choice: Assessment | None
    neighbours: tuple[NeighbourFound, ...]
    mixes: tuple[MixFound, ...]
    assessed: tuple[Assessment, ...]
    runs: float
    complete: bool

    def front(self) -> list[Assessment]:
        """Returns the candidates for which nothing cheaper attains as much."""
        found: list[Assessment] = []
        for one in self.assessed:
            if not found or one.interval.mean > found[-1].interval.mean:
                found.append(one)
        return found


class Planner:
    """One search, stage by stage."""

    def __init__(self, assessor: Assessor, least_cache_tokens: int) -> None:
        self._assessor = assessor
        self._least_cache = least_cache_tokens
        self._wanted = assessor.goal.wanted
        self._best: Assessment | None = None
        self._mixes: list[MixFound] = []

    def plan(self, starts: Sequence[Candidate]) -> ClusterPlan:
        """Runs all stages. `starts`: one for each mix of hardware. Raises ConfigError."""
        complete, around = True, tuple[NeighbourFound, ...]()
        most = self._assessor.goal.max_runs
        self._assessor.allowed_runs = SEARCH_SHARE * most
        try:
            self._bound(starts)
            self._tune()
            self._settle_mixes()
        except BudgetError:
            complete = False
        self._assessor.allowed_runs = most
        try:
            around = self._confirm()
        except BudgetError:
            complete = False
            around = self._known_neighbours()
        known = [one for one in self._assessor.known.values() if len(one.outcomes) > 1]
        known.sort(key=lambda one: (one.usd_per_h, -one.interval.mean))
        mixes = sorted(self._mixes, key=self._mix_order)
        return ClusterPlan(
            self._best, around, tuple(mixes), tuple(known), self._assessor.runs, complete
        )

    # Boundaries

    def _bound(self, starts: Sequence[Candidate]) -> None:
        price = self._assessor.usd_per_h
        self._mixes = sorted((MixFound(one, price(one)) for one in starts), key=self._mix_order)
        least = self._mixes[0].start_usd_per_h
        kept = [
            number
            for number, mix in enumerate(self._mixes[:KEPT_MIXES])
            if mix.start_usd_per_h <= DEAREST * least
        ]
        self._assessor.doing = "the busiest part, by hardware"
        searches = [
            boundary(mix.start, self._wanted, self._roles(mix.start))
            for mix in (self._mixes[number] for number in kept)
        ]
        for number, found in zip(kept, side_by_side(searches, self._assessor.probe), strict=True):
            self._mixes[number] = msgspec.structs.replace(self._mixes[number], boundary=found)

    def _roles(self, candidate: Candidate) -> list[str]:
        """Returns the roles of the candidate, the dearest first."""
        if candidate.mixed:
            return ["mixed"]
        price = self._assessor.usd_per_h
        saved = {
            role: price(msgspec.structs.replace(candidate, **{role: getattr(candidate, role) + 1}))
            for role in ("prefill", "decode")
        }
        return sorted(saved, key=lambda role: -saved[role])

    def _mix_order(self, mix: MixFound) -> tuple[float, str]:
        usd = mix.start_usd_per_h
        if mix.settled is not None:
            usd = mix.settled.usd_per_h
        elif mix.boundary is not None:
            usd = self._assessor.usd_per_h(mix.boundary)
        return usd, mix.start.hardware + mix.start.counts

    def _worth_settling(self) -> list[int]:
        bound = [n for n, mix in enumerate(self._mixes) if mix.boundary is not None]
        bound.sort(key=lambda n: self._mix_order(self._mixes[n]))
        most = SETTLED_WITHIN * min((self._mix_order(self._mixes[n])[0] for n in bound), default=0)
        return [n for n in bound if self._mix_order(self._mixes[n])[0] <= most][:SETTLED_MIXES]

    # Tuning

    def _tune(self) -> None:
        """Tunes the cheapest disaggregated and the cheapest colocated mix; the others follow."""
        for colocated in (False, True):
            numbers = [
                n for n in self._worth_settling() if bool(self._mixes[n].start.mixed) is colocated
            ]
            if not numbers:
                continue
            first = self._mixes[numbers[0]].boundary
            assert first is not None
            settings = self._tuned(first)
            if not settings:
                continue
            searches = []
            for n in numbers:
                found = self._mixes[n].boundary
                assert found is not None
                start = msgspec.structs.replace(found, **settings)
                searches.append(boundary(start, self._wanted, self._roles(start)))
            for n, found in zip(numbers, side_by_side(searches, self._assessor.probe), strict=True):
                if found is not None:
                    self._mixes[n] = msgspec.structs.replace(self._mixes[n], boundary=found)

    def _tuned(self, found: Candidate) -> dict[str, Any]:
        """Returns settings better than those of `found` with one instance fewer."""
        self._assessor.doing = "policies and chunk size"
        role = self._roles(found)[0]
        count = max(getattr(found, role) - 1, 1)
        stressed = msgspec.structs.replace(found, **{role: count})
        options: list[tuple[str, Any]] = [
            *(("placement", value) for value in PLACEMENTS),
            *(("admission", value) for value in ADMISSIONS),
            *(("chunk_tokens", stepped(CHUNK_STEPS, found.chunk_tokens, n)) for n in (-2, -1, 1)),
        ]
        options = [
            (name, value)
            for name, value in options
            if value is not None and value != getattr(found, name)
        ]
        others = [msgspec.structs.replace(stressed, **{name: value}) for name, value in options]
        base, *outcomes = self._assessor.probe([stressed, *others])
        best: dict[str, tuple[float, Any]] = {}
        for (name, value), outcome in zip(options, outcomes, strict=True):
            if outcome.share > max(base.share + GAIN, best.get(name, (0.0, None))[0]):
                best[name] = (outcome.share, value)
        settings = {name: value for name, (_, value) in best.items()}
        if len(settings) > 1:
            [together] = self._assessor.probe([msgspec.structs.replace(stressed, **settings)])
            alone, name = max((share, name) for name, (share, _) in best.items())
            if together.share < alone:
                settings = {name: settings[name]}
        return settings

    # Settling

    def _settle_mixes(self) -> None:
        starts: list[tuple[float, int, Assessment]] = []
        for number in self._worth_settling():
            mix = self._mixes[number]
            assert mix.boundary is not None
            self._assessor.doing = f"the whole trace, {mix.start.hardware}"
            start = self._grown_until_it_meets(mix.boundary)
            if start is not None:
                starts.append((start.usd_per_h, number, start))
                self._note_settled(number, start)
        for usd_per_h, number, start in sorted(starts, key=lambda one: one[:2]):
            assert self._best is not None
            if usd_per_h <= self._best.usd_per_h:
                self._assessor.doing = f"down in price, {self._mixes[number].start.hardware}"
                self._note_settled(number, self._settle(start))

    def _note_settled(self, number: int, found: Assessment) -> None:
        self._mixes[number] = msgspec.structs.replace(self._mixes[number], settled=found)
        self._take(found)

    def _grown_until_it_meets(self, candidate: Candidate) -> Assessment | None:
        """Grows a candidate until it meets on the whole trace; None if it then costs too much.

        Each step takes the cheapest way that meets, or while none does, the one that helps most.
        """
        looked = [candidate, *self._dearer_moves(candidate)[:1]]  # in parallel
        for _ in range(MAX_GROWTHS):
            outcomes = self._assessor.glance(looked)
            for one, outcome in zip(looked, outcomes, strict=True):
                if outcome.share >= self._wanted:
                    [found] = self._assessor.judge([one])
                    if found.verdict is Verdict.MEETS:
                        return found
            _, best_off = max(zip(outcomes, looked, strict=True), key=lambda one: one[0].how_far())
            looked = self._dearer_moves(best_off)
            if self._best is not None:
                price, most = self._assessor.usd_per_h, self._best.usd_per_h
                looked = [one for one in looked if price(one) < most]
            if not looked:
                return None
        return None

    def _dearer_moves(self, now: Candidate) -> list[Candidate]:
        """Returns candidates with one instance more or with more cache, the cheapest first."""
        change = msgspec.structs.replace
        more = [change(now, **{role: getattr(now, role) + 1}) for role in self._roles(now)]
        cache = stepped(CACHE_STEPS, now.cache_tokens, CACHE_STRIDE)
        if cache is not None:
            more.append(change(now, cache_tokens=cache))
        return sorted(more, key=lambda one: (self._assessor.usd_per_h(one), str(one)))

    def _settle(self, now: Assessment) -> Assessment:
        for _ in range(MAX_MOVES):
            cheaper = self._cheapest_that_meets(self._cheaper_moves(now.candidate))
            if cheaper is None:
                return now
            now = cheaper
            self._take(now)
        return now

    def _cheaper_moves(self, now: Candidate) -> list[Candidate]:
        """Returns the cheaper ones of: any cache; one instance fewer or more with any cache; one
        instance fewer of one role and one more of the other."""
        change = msgspec.structs.replace
        caches = [cache for cache in CACHE_STEPS if cache >= self._least_cache]
        moves = [change(now, cache_tokens=cache) for cache in caches]
        for role in self._roles(now):
            more = change(now, **{role: getattr(now, role) + 1})
            moves += [change(more, cache_tokens=cache) for cache in caches]
            if getattr(now, role) > 1:
                fewer = change(now, **{role: getattr(now, role) - 1})
                moves += [fewer, *(change(fewer, cache_tokens=cache) for cache in caches)]
                for other in self._roles(now):
                    if other != role:
                        moves.append(change(fewer, **{other: getattr(now, other) + 1}))
        price = self._assessor.usd_per_h
        return [move for move in dict.fromkeys(moves) if price(move) < price(now)]

    def _cheapest_that_meets(self, candidates: Sequence[Candidate]) -> Assessment | None:
        """Returns the cheapest candidate that meets, or None.

        Candidates with the same instances form a group. The one with most cache is simulated first,
        because if it misses, so do the others. Groups dearer than a known success are skipped.
        """
        price = self._assessor.usd_per_h
        alike: dict[tuple[int, int, int], list[Candidate]] = {}
        for one in sorted(candidates, key=lambda c: -c.cache_tokens):
            alike.setdefault((one.prefill, one.decode, one.mixed), []).append(one)
        groups = sorted(alike.values(), key=lambda group: (price(group[-1]), str(group[-1])))
        promising: list[Candidate] = []
        for pair in (groups[i : i + 2] for i in range(0, len(groups), 2)):
            most = min(map(price, promising), default=inf)
            worth = [[one for one in group if price(one) < most] for group in pair]
            worth = [group for group in worth if group]
            outcomes = self._assessor.glance([group[0] for group in worth])
            for group, outcome in zip(worth, outcomes, strict=True):
                if outcome.share >= self._wanted:
                    promising += self._with_less_cache(group)
        for one in sorted(promising, key=lambda c: (price(c), str(c))):
            [found] = self._assessor.judge([one])
            if found.verdict is Verdict.MEETS:
                return found
        return None

    def _with_less_cache(self, group: Sequence[Candidate]) -> list[Candidate]:
        """Returns those that meet at a glance, down to the least cache, by two glances at a time.

        The first of the group is known to meet. More cache is assumed to be no worse.
        """
        meets, fails = 0, len(group)
        seen = [group[0]]
        while fails - meets > 1:
            third = max((fails - meets) // 3, 1)
            looked = sorted({meets + third, max(fails - third, meets + 1)})
            outcomes = self._assessor.glance([group[at] for at in looked])
            for at, outcome in zip(looked, outcomes, strict=True):
                if outcome.share < self._wanted:
                    fails = at
                    break
                meets = at
                seen.append(group[at])
        return seen

    def _take(self, found: Assessment) -> None:
        if self._best is None or found.usd_per_h < self._best.usd_per_h:
            self._best = found

    # Confirming

    def _confirm(self) -> tuple[NeighbourFound, ...]:
        """Moves to a neighbour while one is cheaper, or equally cheap and better; returns all.

        The allowed runs bound the moves.
        """
        if self._best is None:
            return ()
        while True:
            self._assessor.doing = "neighbours"
            better = self._better_of(self._assessor.judge(self._rivals(self._best)))
            if better is None:
                break
            self._best = better
            self._best = self._settle(better)
        around = neighbours(self._best.candidate, self._least_cache)
        dearer = [n.candidate for n in around if self._price_over_best(n.candidate) > 0]
        self._assessor.judge(dearer, max_seeds=2)
        return self._known_neighbours()

    def _rivals(self, best: Assessment) -> list[Candidate]:
        """Returns the cheaper neighbours, and those of the same price (other policies or chunks)
        that do better on the busiest part of the trace."""
        around = [n.candidate for n in neighbours(best.candidate, self._least_cache)]
        alike = [one for one in around if self._price_over_best(one) == 0]
        base, *outcomes = self._assessor.probe([best.candidate, *alike])
        better = [
            one
            for one, outcome in zip(alike, outcomes, strict=True)
            if outcome.share > base.share + GAIN
        ]
        return [one for one in around if self._price_over_best(one) < 0] + better

    def _price_over_best(self, candidate: Candidate) -> float:
        assert self._best is not None
        return self._assessor.usd_per_h(candidate) - self._best.usd_per_h

    def _better_of(self, found: Sequence[Assessment]) -> Assessment | None:
        assert self._best is not None
        best = self._best
        meeting = [one for one in found if one.verdict is Verdict.MEETS]
        cheaper = [one for one in meeting if one.usd_per_h < best.usd_per_h]
        if cheaper:
            return min(cheaper, key=lambda one: (one.usd_per_h, str(one.candidate)))
        better = [
            one
            for one in meeting
            if one.usd_per_h == best.usd_per_h
            and one.interval.low > best.interval.high
            and one.interval.mean > best.interval.mean + GAIN
        ]
        return max(better, key=lambda one: (one.interval.mean, str(one.candidate)), default=None)

    def _known_neighbours(self) -> tuple[NeighbourFound, ...]:
        if self._best is None:
            return ()
        known = self._assessor.known
        return tuple(
            NeighbourFound(neighbour.change, known[neighbour.candidate])
            for neighbour in neighbours(self._best.candidate, self._least_cache)
            if neighbour.candidate in known
        )
