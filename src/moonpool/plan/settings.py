"""Finds chunk size, cache, SSD and eviction for an arrangement, with few simulations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from moonpool.plan.arrangements import CLEAR, decode_share
from moonpool.plan.candidate import Candidate, Steps, stepped
from moonpool.plan.trial import Outcome

Price = Callable[[Candidate], float]
change = msgspec.structs.replace


class Look(Protocol):
    """Simulates candidates. The candidates in `ahead` may come next, the likeliest first. An idle
    process simulates them, which changes no outcome."""

    def __call__(
        self, candidates: Sequence[Candidate], ahead: Sequence[Candidate] = ()
    ) -> list[Outcome]: ...


def grown(candidate: Candidate, misses: Mapping[str, int], missed: float) -> Candidate:
    """Returns the candidate with more instances of each role that the misses lacked. The number of
    instances grows by the share of requests that missed, and by at least one."""
    if candidate.mixed:
        return change(candidate, mixed=_more(candidate.mixed, missed))
    decode = decode_share(misses)
    return change(
        candidate,
        prefill=candidate.prefill if decode > CLEAR else _more(candidate.prefill, missed),
        decode=candidate.decode if decode < 1 - CLEAR else _more(candidate.decode, missed),
    )


def _more(count: int, missed: float) -> int:
    return count + max(1, round(count * missed))


def with_any_chunk(
    one: Candidate,
    look: Look,
    steps: Steps,
    wanted: float,
    ahead: Sequence[Candidate] = (),
) -> tuple[Candidate, Outcome]:
    """Tries chunk sizes until one keeps the SLOs; returns the candidate that got furthest.

    If decodes are slow, smaller chunks are tried first, otherwise larger chunks. If no chunk size
    keeps the SLOs, the search may simulate the candidates `ahead` next.
    """
    others = _other_chunks(one, steps)
    # If most requests miss on split instances, no chunk size helps, so another cluster is next.
    outcome = look([one], [*others, *ahead] if one.mixed else [*ahead, *others])[0]
    best = one, outcome
    first = -1 if decode_share(outcome.misses) > 0.5 else 1
    for direction in (first, -first):
        now, so_far = one, outcome
        while best[1].share < wanted:
            chunk = stepped(steps.chunks, now.chunk_tokens, direction)
            if chunk is None:
                break
            now = change(now, chunk_tokens=chunk)
            after = stepped(steps.chunks, chunk, direction)
            further = [] if after is None else [change(one, chunk_tokens=after)]
            found = look([now], [*further, *others, *ahead])[0]
            if found.how_far() > best[1].how_far():
                best = now, found
            if found.how_far() < so_far.how_far():
                break
            so_far = found
        if best[1].share >= wanted or (not outcome.nearly() and not one.mixed):
            break  # no chunk size helps if most requests miss on split instances
    return best


def _other_chunks(one: Candidate, steps: Steps) -> list[Candidate]:
    """Returns two candidates: with the next smaller and with the next larger chunk."""
    chunks = [stepped(steps.chunks, one.chunk_tokens, direction) for direction in (-1, 1)]
    return [change(one, chunk_tokens=chunk) for chunk in chunks if chunk is not None]


def first_kept(candidates: Sequence[Candidate], look: Look, wanted: float) -> Candidate | None:
    """Returns the first candidate that keeps the SLOs. Later candidates are not looked at, but may
    run ahead."""
    for number, one in enumerate(candidates):
        if look([one], candidates[number + 1 :])[0].share >= wanted:
            return one
    return None


def cheapest_settings(
    one: Candidate, look: Look, price: Price, steps: Steps, wanted: float
) -> Candidate:
    """Returns the cheapest settings found for the instances of `one`, which keeps the SLOs."""
    best = least_cache(one, look, steps, wanted)
    while True:
        variants = [v for v in _variants(best, price, steps) if price(v) < price(best)]
        cheapest = first_kept(sorted(variants, key=price), look, wanted)
        if cheapest is None:
            return best
        best = least_cache(cheapest, look, steps, wanted)


def _variants(best: Candidate, price: Price, steps: Steps) -> list[Candidate]:
    """Returns cheaper candidates with another SSD size, eviction or chunk size, each with the most
    cache."""
    found = []
    smaller = [cache for cache in steps.caches if cache < best.cache_tokens]
    for ssd in steps.ssds:
        if ssd != best.ssd_tokens:
            caches = [
                c for c in steps.caches
                if price(change(best, cache_tokens=c, ssd_tokens=ssd)) < price(best)
            ]  # fmt: skip
            found += [change(best, cache_tokens=c, ssd_tokens=ssd) for c in caches[-1:]]
    if smaller:
        less = change(best, cache_tokens=smaller[-1])
        found += [change(less, eviction=e) for e in steps.evictions if e != best.eviction]
        others = [chunk for chunk in steps.chunks if chunk != best.chunk_tokens]
        found += [change(less, chunk_tokens=chunk) for chunk in others]
    return found


def least_cache(one: Candidate, look: Look, steps: Steps, wanted: float) -> Candidate:
    """Returns the candidate with the least cache that keeps the SLOs, without SSD if the SLOs hold
    without it. Each look divides the remaining sizes of cache into thirds."""
    bare = change(one, ssd_tokens=steps.ssds[0])
    caches = [cache for cache in steps.caches if cache < one.cache_tokens]
    best, low, high = one, -1, len(caches)  # `low` fails, `high` keeps the SLOs
    if one != bare:
        ahead = [change(bare, cache_tokens=caches[i]) for i in _thirds(low, high)]
        if look([bare], ahead)[0].share >= wanted:
            one = best = bare
    while high - low > 1:
        at = _thirds(low, high)
        looked = [change(one, cache_tokens=caches[i]) for i in at]
        while at:
            i, candidate = at.pop(), looked.pop()
            if look([candidate], looked)[0].share < wanted:
                low = i
                break
            best, high = candidate, i
    return best


def _thirds(low: int, high: int) -> list[int]:
    """Returns the one or two whole numbers that divide the range from `low` to `high` into three
    parts, or none if no number lies between them."""
    third = max((high - low) // 3, 1)
    return sorted({low + third, max(high - third, low + 1)}) if high - low > 1 else []
