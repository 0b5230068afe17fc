"""How many answers will be decoding at a time to come, by how long answers have lasted so far.

The paper gives every answer the same duration t_d and takes those that are older for gone (v3
section 7.4). That misses the long ones, which are most of what decodes at any moment: with the mean
as t_d it saw less than two thirds of the load. Here the whole distribution of durations is learned,
and an answer of age a is there at a time d from now with the share of those that lasted a + d
among those that lasted a.

Requests are counted in buckets of time by the beginning of their decode, so that a projection
weighs buckets, not requests.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from moonpool.conductor.decode_forecast import Stay
from moonpool.conductor.output_length import RunningMean
from moonpool.conductor.prediction_error import PredictionError

BUCKET_S = 0.5
NUM_BUCKETS = 512
"""What is further away, to either side, than 256 s counts as just that."""
FIRST_GUESS_BUCKETS = 40
"""Before any answer has ended, durations up to 20 s are taken for equally likely ..."""
FIRST_GUESS_WEIGHT = 8.0
"""... which counts as so many answers."""
MEMORY_ANSWERS = 1024
"""Twice as many halve the weight of all so far."""
RELEARN_EVERY = 16
RARE = 1e-4
"""Keeps those older than any seen before where they are."""

ONE = float(1 << 20)
"""Shares are whole numbers of this: sums of whole numbers are exact in any order, so that every
machine finds the same."""

Floats = npt.NDArray[np.float64]


class SurvivalForecast:
    """Counts stays. Never looks at a request, an instance or an SLO. Durations that callers name
    are for other forecasts: here they are learned."""

    def __init__(self) -> None:
        self.error = PredictionError()  # of the number decoding
        self._usual = RunningMean(0.0)
        self._now = 0  # bucket
        # [0] requests, [1] their tokens; by bucket of beginning modulo the ring.
        self._decoding = np.zeros((2, NUM_BUCKETS))
        self._coming = np.zeros((2, NUM_BUCKETS))
        self._old = np.zeros(2)  # decoding for longer than the ring is
        self._overdue = np.zeros(2)  # should be decoding, and are not yet
        self._num_decoding = 0
        self._lasted = np.zeros(NUM_BUCKETS)
        self._lasted[:FIRST_GUESS_BUCKETS] = FIRST_GUESS_WEIGHT / FIRST_GUESS_BUCKETS
        self._num_new = 0
        self._survival = self._learn()
        self._shares: dict[int, tuple[Floats, Floats]] = {}  # by buckets ahead
        self._said: deque[tuple[int, float]] = deque(maxlen=NUM_BUCKETS)

    @property
    def usual_s(self) -> float | None:
        """How long answers decode, by the running mean of those that ended; None: none has."""
        return self._usual.value if self._usual.count else None

    def enter(self, begins_s: float, duration_s: float, context_tokens: int, now: float) -> Stay:
        """A request is under way whose answer should begin then."""
        self._advance(now)
        begins = min(int(begins_s / BUCKET_S), self._now + NUM_BUCKETS - 1)
        stay = Stay(begins, begins, context_tokens)
        self._count(stay, 1)
        return stay

    def begin(self, stay: Stay, duration_s: float, now: float) -> None:
        """Its answer begins to decode now (mutates the stay)."""
        self._advance(now)
        self._count(stay, -1)
        stay.begins, stay.decoding = self._now, True
        self._num_decoding += 1
        self._count(stay, 1)

    def prolong(self, stay: Stay, duration_s: float, now: float) -> None:
        """Nothing to do: that it is still there says it all."""

    def leave(self, stay: Stay, now: float) -> None:
        """Whatever became of it."""
        self._advance(now)
        self._count(stay, -1)
        self._num_decoding -= stay.decoding

    def observe(self, duration_s: float) -> None:
        """An answer was decoded to its end in this time."""
        self._usual.add(duration_s)
        self._lasted[min(int(duration_s / BUCKET_S), NUM_BUCKETS - 1)] += 1.0
        self._num_new += 1
        if self._num_new >= RELEARN_EVERY:
            if self._lasted.sum() > 2 * MEMORY_ANSWERS:
                self._lasted *= 0.5
            self._survival, self._num_new = self._learn(), 0
            self._shares.clear()

    def project(self, at_s: float, now: float) -> tuple[float, float]:
        """Answers expected to be decoding at `at_s`, of requests placed until now, and their
        tokens."""
        self._advance(now)
        ahead = min(max(int(at_s / BUCKET_S) - self._now, 0), NUM_BUCKETS - 1)
        shares = self._shares.get(ahead)
        if shares is None:
            shares = self._shares[ahead] = self._share(ahead)
        staying, beginning = shares
        sums = self._old * staying[0] + self._overdue * beginning[0]
        sums += _weigh(self._decoding, (self._now + 1) % NUM_BUCKETS, staying)
        sums += _weigh(self._coming, self._now % NUM_BUCKETS, beginning)
        return sums.item(0) / ONE, sums.item(1) / ONE

    def note_projection(self, at_s: float, count: float) -> None:
        """This was said of that time, and will be compared with what comes."""
        bucket = int(at_s / BUCKET_S)
        if not self._said or bucket > self._said[-1][0]:
            self._said.append((bucket, count))

    def validate(self, stays: list[Stay]) -> None:
        """Asserts that the sums are those of the stays."""
        assert self._num_decoding == sum(s.decoding for s in stays)
        for ring, rest, decoding in (
            (self._decoding, self._old, True),
            (self._coming, self._overdue, False),
        ):
            known = [s for s in stays if s.decoding == decoding]
            assert ring[0].sum() + rest[0] == len(known)
            assert ring[1].sum() + rest[1] == sum(s.context_tokens for s in known)
            assert (ring >= 0).all() and (rest >= 0).all()

    def _count(self, stay: Stay, sign: int) -> None:
        place = stay.begins % NUM_BUCKETS
        if stay.decoding:
            sums = self._decoding[:, place] if stay.begins > self._now - NUM_BUCKETS else self._old
        else:
            sums = self._coming[:, place] if stay.begins >= self._now else self._overdue
        sums[0] += sign
        sums[1] += sign * stay.context_tokens

    def _advance(self, now: float) -> None:
        bucket = int(now / BUCKET_S)
        if bucket <= self._now:
            return
        while self._said and self._said[0][0] < bucket:
            self.error.note(self._said.popleft()[1], self._num_decoding)
        num_passed = min(bucket - self._now, NUM_BUCKETS)
        _pour(self._coming, self._now, num_passed, self._overdue)
        # The next buckets take the places of the oldest.
        _pour(self._decoding, self._now + 1, num_passed, self._old)
        self._now = bucket

    def _share(self, ahead: int) -> tuple[Floats, Floats]:
        """Of those that decode now, the oldest first, and of those that begin in each bucket from
        now to then, the share that is there then; in whole numbers of 1 / ONE."""
        survival = self._survival
        later = np.concatenate([survival[ahead:], np.full(ahead, survival[-1])])
        return np.rint((later / survival)[::-1] * ONE), np.rint(survival[ahead::-1] * ONE)

    def _learn(self) -> Floats:
        """Share of answers that last at least so many buckets."""
        lasting = np.cumsum(self._lasted[::-1])[::-1]
        survival: Floats = (lasting / lasting[0] + RARE) / (1.0 + RARE)
        return survival


def _pour(ring: Floats, start: int, count: int, rest: Floats) -> None:
    """So many of the ring's columns from `start` on into the rest: at once, since a silence may
    have lasted for all of them."""
    places = np.arange(start, start + count) % NUM_BUCKETS
    rest += ring[:, places].sum(axis=1)
    ring[:, places] = 0.0


def _weigh(ring: Floats, start: int, shares: Floats) -> Floats:
    """Sums of the ring's columns from `start` on, each times its share."""
    num_straight = min(NUM_BUCKETS - start, len(shares))
    sums: Floats = ring[:, start : start + num_straight] @ shares[:num_straight]
    if num_straight < len(shares):
        sums += ring[:, : len(shares) - num_straight] @ shares[num_straight:]
    return sums
