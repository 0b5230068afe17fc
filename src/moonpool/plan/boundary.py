"""The smallest counts of instances that meet the SLO on given hardware, found by asking for few
simulations: up by what the misses lacked, then down role by role. More instances are taken to be no
worse. A conversation: candidates go out, outcomes come in; several are held side by side."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

import msgspec

from moonpool.plan.candidate import Candidate
from moonpool.plan.trial import Outcome
from moonpool.plan.watcher import Cause

MAX_ASKED = 40
_DECODE = (Cause.DECODE_SPEED.value, Cause.DECODE_MEMORY.value)

Asking = Generator[Candidate, Outcome, Candidate | None]


def boundary(start: Candidate, wanted: float, roles: Sequence[str]) -> Asking:
    """`roles`: the dearest first, from which is saved first. Returns None if no number helps."""
    now, fails = start, list[Candidate]()
    for _ in range(MAX_ASKED):
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
    askings: Sequence[Asking], answer: Callable[[list[Candidate]], list[Outcome]]
) -> list[Candidate | None]:
    """Carries all conversations to their ends, and asks for what they want next at once."""
    found: list[Candidate | None] = [None] * len(askings)
    wanted = {number: next(asking) for number, asking in enumerate(askings)}
    while wanted:
        outcomes = answer(list(wanted.values()))
        replies = dict(zip(wanted, outcomes, strict=True))
        wanted = {}
        for number, outcome in replies.items():
            try:
                wanted[number] = askings[number].send(outcome)
            except StopIteration as end:
                found[number] = end.value
    return found
