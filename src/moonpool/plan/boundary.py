"""Finds the fewest instances that meet the SLOs on given hardware, with few simulations.

The search goes up by what the misses lacked, then down role by role. It assumes that more instances
are no worse. Each search is a generator: it yields candidates and receives their outcomes, so that
several searches run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

import msgspec

from moonpool.plan.candidate import Candidate
from moonpool.plan.trial import Cause, Outcome

MAX_PROBES = 40
_DECODE = (Cause.DECODE_SPEED.value, Cause.DECODE_MEMORY.value)

Search = Generator[Candidate, Outcome, Candidate | None]


def boundary(start: Candidate, wanted: float, roles: Sequence[str]) -> Search:
    """Yields candidates; returns the smallest that meets, or None if no number helps.

    `roles`: the dearest first, because instances are saved in this order.
    """
    now, fails = start, list[Candidate]()
    for _ in range(MAX_PROBES):
        outcome = yield now
        if outcome.share >= wanted:
            break
        fails.append(now)
        now = grown(now, outcome.misses, 1.0 - outcome.share)
    else:
        return None
    for role in roles:
        low = max((getattr(f, role) for f in fails if _as_many_others(f, now, role)), default=0)
        high, step = getattr(now, role), 1
        while high - low > 1:
            middle = max(high - step, low + 1)
            less = msgspec.structs.replace(now, **{role: middle})
            outcome = yield less
            if outcome.share >= wanted:
                now, high, step = less, middle, 2 * step
            else:
                fails.append(less)
                low, step = middle, max((high - middle) // 2, 1)
    return now


def _as_many_others(failed: Candidate, now: Candidate, role: str) -> bool:
    others = [name for name in ("prefill", "decode", "mixed") if name != role]
    return all(getattr(failed, name) >= getattr(now, name) for name in others)


def grown(candidate: Candidate, misses: Mapping[str, int], missed: float) -> Candidate:
    """More of what the misses lacked, by the share that missed or at least one; of both if both
    lacked."""
    if candidate.mixed:
        return msgspec.structs.replace(candidate, mixed=_more(candidate.mixed, missed))
    decode = sum(misses.get(cause, 0) for cause in _DECODE) / max(sum(misses.values()), 1)
    return msgspec.structs.replace(
        candidate,
        prefill=candidate.prefill if decode > 0.75 else _more(candidate.prefill, missed),
        decode=candidate.decode if decode < 0.25 else _more(candidate.decode, missed),
    )


def _more(count: int, missed: float) -> int:
    return count + max(1, round(count * missed))


def side_by_side(
    searches: Sequence[Search], answer: Callable[[list[Candidate]], list[Outcome]]
) -> list[Candidate | None]:
    """Runs all searches to their ends; `answer` simulates the next candidates of all together."""
    found: list[Candidate | None] = [None] * len(searches)
    wanted = {number: next(search) for number, search in enumerate(searches)}
    while wanted:
        outcomes = answer(list(wanted.values()))
        replies = dict(zip(wanted, outcomes, strict=True))
        wanted = {}
        for number, outcome in replies.items():
            try:
                wanted[number] = searches[number].send(outcome)
            except StopIteration as end:
                found[number] = end.value
    return found
