"""Forecasts of the decode load: how many requests will decode at a future time.

Mooncake gives every answer the same duration t_d and takes older answers for finished (v3 section
7.4). This rule misses the long answers, which are most of what decodes at any moment: with the mean
as t_d, it found less than two thirds of the load. Both remedies count requests in buckets of time,
so that a projection adds up buckets, not requests.

* `SurvivalForecast` learns the distribution of durations. The share of the answers of age a that
  still decode after a further time d is the share of answers that lasted a + d among those that
  lasted a.
* `IntervalForecast` predicts the end of each answer separately, from its expected length.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.conductor.forecast.estimators import PredictionError, RunningMean

INTERVAL_BUCKET_S = 0.25
NUM_INTERVAL_BUCKETS = 4096
"""Size of the ring: times further away than 1024 s count as 1024 s."""

SURVIVAL_BUCKET_S = 0.5
NUM_SURVIVAL_BUCKETS = 512
"""Size of the ring: times further away than 256 s, in the past or the future, count as 256 s."""
FIRST_GUESS_BUCKETS = 40
"""Until durations are learned, those up to 20 s are assumed to be equally likely."""
FIRST_GUESS_WEIGHT = 8.0
"""The first guess weighs as much as this number of answers."""
MEMORY_ANSWERS = 1024
"""When the weights of all answers reach twice this number, they are halved."""
RELEARN_EVERY = 16
RARE = 1e-4
"""Keeps the survival above zero for durations longer than any seen so far."""
ONE = float(1 << 20)
"""Shares are whole numbers of 1 / ONE: sums of whole numbers are exact in any order, so that every
machine gets the same result."""

Floats = npt.NDArray[np.float64]


@dataclass(slots=True, eq=False)
class DecodeInterval:
    """One request's expected time in the decode pool, in buckets since the clock's zero."""

    begins: int
    ends: int
    context_tokens: int
    decoding: bool = False


class Forecast(Protocol):
    """The decode load to come, whatever the prediction is based on."""

    error: PredictionError  # error of the projected number of decodes

    @property
    def mean_s(self) -> float | None:
        """Running mean of the durations of finished decodes, or None if none has finished yet."""
        ...

    @property
    def lifetime_s(self) -> float | None:
        """Mean duration of a decode, including what is known of unfinished decodes, or None if no
        decode is known yet."""
        ...

    def enter(
        self, begins_s: float, duration_s: float, context_tokens: int, now: float
    ) -> DecodeInterval:
        """Adds a request whose decode should begin at `begins_s` and last `duration_s`."""
        ...

    def begin(self, interval: DecodeInterval, duration_s: float, now: float) -> None:
        """Notes that the request's decode begins now."""
        ...

    def prolong(self, interval: DecodeInterval, duration_s: float, now: float) -> None:
        """Notes that the decode lasts at least `duration_s` longer."""
        ...

    def leave(self, interval: DecodeInterval, now: float) -> None:
        """Removes the request, whether it was answered or not."""
        ...

    def observe(self, duration_s: float) -> None:
        """A decode took `duration_s` from start to end."""
        ...

    def project(self, at_s: float, now: float) -> tuple[float, float]:
        """Number of decodes at `at_s` among the requests placed until now, and their tokens."""
        ...

    def note_projection(self, at_s: float, count: float) -> None:
        """Stores a projection, to be compared with the actual number of decodes at `at_s`. Ignores
        it unless `at_s` is in a later bucket than all projections before."""
        ...

    def validate(self, intervals: list[DecodeInterval]) -> None:
        """Asserts that the sums are those of the intervals."""
        ...


class _Measured:
    """What both forecasts measure: durations, and the error of their projections."""

    def __init__(self, bucket_s: float, num_buckets: int) -> None:
        self.error = PredictionError()
        self._mean_duration_s = RunningMean(0.0)
        self._num_decoding = 0
        self._bucket_s = bucket_s
        self._projections: deque[tuple[int, float]] = deque(maxlen=num_buckets)  # by bucket

    @property
    def mean_s(self) -> float | None:
        return self._mean_duration_s.value if self._mean_duration_s.count else None

    @property
    def lifetime_s(self) -> float | None:
        return self.mean_s

    def note_projection(self, at_s: float, count: float) -> None:
        bucket = int(at_s / self._bucket_s)
        if not self._projections or bucket > self._projections[-1][0]:
            self._projections.append((bucket, count))

    def _check_projections(self, bucket: int) -> None:
        """Compares the projections of earlier buckets with the present number."""
        while self._projections and self._projections[0][0] < bucket:
            self.error.note(self._projections.popleft()[1], self._num_decoding)


class _Ring:
    """Requests and tokens by bucket, from `first` on; earlier buckets are summed up in `past`."""

    def __init__(self) -> None:
        self.first = 0
        self.past = [0, 0]
        self.ahead = [0, 0]
        self._counts = [0] * NUM_INTERVAL_BUCKETS
        self._tokens = [0] * NUM_INTERVAL_BUCKETS

    def add(self, bucket: int, count: int, tokens: int) -> None:
        """Negative numbers subtract answers."""
        sums = self.past if bucket < self.first else self.ahead
        sums[0] += count
        sums[1] += tokens
        if bucket >= self.first:
            self._counts[bucket % NUM_INTERVAL_BUCKETS] += count
            self._tokens[bucket % NUM_INTERVAL_BUCKETS] += tokens

    def advance(self, first: int) -> None:
        """Moves the buckets before `first` to the past."""
        for bucket in range(self.first, min(first, self.first + NUM_INTERVAL_BUCKETS)):
            place = bucket % NUM_INTERVAL_BUCKETS
            count, tokens = self._counts[place], self._tokens[place]
            if count:
                self.past[0] += count
                self.past[1] += tokens
                self.ahead[0] -= count
                self.ahead[1] -= tokens
                self._counts[place] = self._tokens[place] = 0
        self.first = first

    def until(self, last: int) -> tuple[int, int]:
        """Returns the sums from bucket `first` to bucket `last`, both included."""
        begin = self.first % NUM_INTERVAL_BUCKETS
        end = begin + min(last - self.first + 1, NUM_INTERVAL_BUCKETS)
        count, tokens = sum(self._counts[begin:end]), sum(self._tokens[begin:end])
        if end > NUM_INTERVAL_BUCKETS:
            count += sum(self._counts[: end - NUM_INTERVAL_BUCKETS])
            tokens += sum(self._tokens[: end - NUM_INTERVAL_BUCKETS])
        return count, tokens


class IntervalForecast(_Measured):
    """Adds up intervals by their first and last bucket. A decode that outlasts its interval counts
    as finished, unless the caller prolongs it."""

    def __init__(self) -> None:
        super().__init__(INTERVAL_BUCKET_S, NUM_INTERVAL_BUCKETS)
        self._begins, self._ends = _Ring(), _Ring()
        self._num_intervals = self._interval_tokens = 0

    def enter(
        self, begins_s: float, duration_s: float, context_tokens: int, now: float
    ) -> DecodeInterval:
        self._advance(now)
        begins, ends = self._buckets(begins_s, duration_s)
        interval = DecodeInterval(begins, ends, context_tokens)
        self._count(interval, 1)
        return interval

    def begin(self, interval: DecodeInterval, duration_s: float, now: float) -> None:
        self._advance(now)
        self._count(interval, -1)
        interval.begins, interval.ends = self._buckets(now, duration_s)
        interval.decoding = True
        self._num_decoding += 1
        self._count(interval, 1)

    def prolong(self, interval: DecodeInterval, duration_s: float, now: float) -> None:
        self._advance(now)
        self._ends.add(interval.ends, -1, -interval.context_tokens)
        interval.ends = self._buckets(now, duration_s)[1]
        self._ends.add(interval.ends, 1, interval.context_tokens)

    def leave(self, interval: DecodeInterval, now: float) -> None:
        self._advance(now)
        self._count(interval, -1)
        self._num_decoding -= interval.decoding

    def observe(self, duration_s: float) -> None:
        self._mean_duration_s.add(duration_s)

    def project(self, at_s: float, now: float) -> tuple[float, float]:
        self._advance(now)
        ahead = max(int((at_s - now) / INTERVAL_BUCKET_S), 0)
        last = self._begins.first + min(ahead, NUM_INTERVAL_BUCKETS - 1)
        begun, begun_tokens = self._begins.until(last)
        over, over_tokens = self._ends.until(last)
        later, later_tokens = self._begins.ahead
        past, past_tokens = self._ends.past
        count = self._num_intervals - (later - begun) - past - over
        tokens = self._interval_tokens - (later_tokens - begun_tokens) - past_tokens - over_tokens
        return count, tokens

    def validate(self, intervals: list[DecodeInterval]) -> None:
        assert self._num_intervals == len(intervals)
        assert self._interval_tokens == sum(s.context_tokens for s in intervals)
        assert self._num_decoding == sum(s.decoding for s in intervals)
        for ring, buckets in (
            (self._begins, [s.begins for s in intervals]),
            (self._ends, [s.ends for s in intervals]),
        ):
            assert ring.past[0] == sum(b < ring.first for b in buckets)
            assert ring.ahead[0] == sum(b >= ring.first for b in buckets)
            assert ring.until(ring.first + NUM_INTERVAL_BUCKETS)[0] == ring.ahead[0]

    def _buckets(self, begins_s: float, duration_s: float) -> tuple[int, int]:
        furthest = self._begins.first + NUM_INTERVAL_BUCKETS - 1
        begins = min(int(begins_s / INTERVAL_BUCKET_S), furthest)
        return begins, min(max(int((begins_s + duration_s) / INTERVAL_BUCKET_S), begins), furthest)

    def _count(self, interval: DecodeInterval, sign: int) -> None:
        tokens = sign * interval.context_tokens
        self._begins.add(interval.begins, sign, tokens)
        self._ends.add(interval.ends, sign, tokens)
        self._num_intervals += sign
        self._interval_tokens += tokens

    def _advance(self, now: float) -> None:
        first = int(now / INTERVAL_BUCKET_S)
        if first <= self._begins.first:
            return
        self._check_projections(first)
        self._begins.advance(first)
        self._ends.advance(first)


class SurvivalForecast(_Measured):
    """Weighs decodes by their age, with the learned distribution of durations. The durations that
    callers pass are ignored."""

    def __init__(self) -> None:
        super().__init__(SURVIVAL_BUCKET_S, NUM_SURVIVAL_BUCKETS)
        self._now = 0  # bucket
        # [0] has requests, [1] their tokens, by the bucket of their start modulo the ring's length.
        self._decoding = np.zeros((2, NUM_SURVIVAL_BUCKETS))
        self._coming = np.zeros((2, NUM_SURVIVAL_BUCKETS))
        # requests and tokens of decodes that have run for longer than the ring covers
        self._old = np.zeros(2)
        # requests and tokens of decodes that should have begun, but have not
        self._overdue = np.zeros(2)
        self._lasted = np.zeros(NUM_SURVIVAL_BUCKETS)
        self._lasted[:FIRST_GUESS_BUCKETS] = FIRST_GUESS_WEIGHT / FIRST_GUESS_BUCKETS
        self._num_new = 0
        self.survival = self._learn()
        # the shares of `_share`, by number of buckets ahead
        self._shares: dict[int, tuple[Floats, Floats]] = {}

    @property
    def lifetime_s(self) -> float:
        return float(self._lifetime_s)

    def enter(
        self, begins_s: float, duration_s: float, context_tokens: int, now: float
    ) -> DecodeInterval:
        self._advance(now)
        begins = min(int(begins_s / SURVIVAL_BUCKET_S), self._now + NUM_SURVIVAL_BUCKETS - 1)
        interval = DecodeInterval(begins, begins, context_tokens)
        self._count(interval, 1)
        return interval

    def begin(self, interval: DecodeInterval, duration_s: float, now: float) -> None:
        self._advance(now)
        self._count(interval, -1)
        interval.begins, interval.decoding = self._now, True
        self._num_decoding += 1
        self._count(interval, 1)

    def prolong(self, interval: DecodeInterval, duration_s: float, now: float) -> None:
        """Does nothing: a decode that goes on is weighed by its age."""

    def leave(self, interval: DecodeInterval, now: float) -> None:
        self._advance(now)
        self._count(interval, -1)
        self._num_decoding -= interval.decoding

    def observe(self, duration_s: float) -> None:
        self._mean_duration_s.add(duration_s)
        self._lasted[min(int(duration_s / SURVIVAL_BUCKET_S), NUM_SURVIVAL_BUCKETS - 1)] += 1.0
        self._num_new += 1
        if self._num_new >= RELEARN_EVERY:
            if self._lasted.sum() > 2 * MEMORY_ANSWERS:
                self._lasted *= 0.5
            self.survival, self._num_new = self._learn(), 0
            self._shares.clear()

    def project(self, at_s: float, now: float) -> tuple[float, float]:
        self._advance(now)
        ahead = min(max(int(at_s / SURVIVAL_BUCKET_S) - self._now, 0), NUM_SURVIVAL_BUCKETS - 1)
        shares = self._shares.get(ahead)
        if shares is None:
            shares = self._shares[ahead] = self._share(ahead)
        staying, beginning = shares
        sums = self._old * staying[0] + self._overdue * beginning[0]
        sums += _weigh(self._decoding, (self._now + 1) % NUM_SURVIVAL_BUCKETS, staying)
        sums += _weigh(self._coming, self._now % NUM_SURVIVAL_BUCKETS, beginning)
        return sums.item(0) / ONE, sums.item(1) / ONE

    def validate(self, intervals: list[DecodeInterval]) -> None:
        assert self._num_decoding == sum(s.decoding for s in intervals)
        for ring, rest, decoding in (
            (self._decoding, self._old, True),
            (self._coming, self._overdue, False),
        ):
            known = [s for s in intervals if s.decoding == decoding]
            assert ring[0].sum() + rest[0] == len(known)
            assert ring[1].sum() + rest[1] == sum(s.context_tokens for s in known)
            assert (ring >= 0).all() and (rest >= 0).all()

    def _count(self, interval: DecodeInterval, sign: int) -> None:
        place = interval.begins % NUM_SURVIVAL_BUCKETS
        if interval.decoding:
            is_old = interval.begins <= self._now - NUM_SURVIVAL_BUCKETS
            sums = self._old if is_old else self._decoding[:, place]
        else:
            sums = self._coming[:, place] if interval.begins >= self._now else self._overdue
        sums[0] += sign
        sums[1] += sign * interval.context_tokens

    def _advance(self, now: float) -> None:
        bucket = int(now / SURVIVAL_BUCKET_S)
        if bucket <= self._now:
            return
        self._check_projections(bucket)
        num_passed = min(bucket - self._now, NUM_SURVIVAL_BUCKETS)
        _pour(self._coming, self._now, num_passed, self._overdue)
        # The next buckets take the places of the oldest ones in the ring.
        _pour(self._decoding, self._now + 1, num_passed, self._old)
        self._now = bucket

    def _share(self, ahead: int) -> tuple[Floats, Floats]:
        """The shares that will decode `ahead` buckets from now, in whole numbers of 1 / ONE: of the
        present decodes, oldest first, and of those that begin in each bucket until then."""
        survival = self.survival
        later = np.concatenate([survival[ahead:], np.full(ahead, survival[-1])])
        return np.rint((later / survival)[::-1] * ONE), np.rint(survival[ahead::-1] * ONE)

    def _learn(self) -> Floats:
        """Learns the share of answers that last at least as long, by number of buckets (Kaplan and
        Meier).

        The answers that have ended are the shorter ones, especially while the load rises. So the
        running answers count as well: each has lasted at least as long as its age.
        """
        ages = np.roll(self._decoding[0][::-1], self._now + 1)  # decodes by age, the youngest first
        older = np.cumsum(ages[::-1])[::-1] - ages + self._old[0]
        at_risk = np.cumsum(self._lasted[::-1])[::-1] + older
        stays = 1.0 - self._lasted / np.maximum(at_risk, 1e-9)
        lasting = np.concatenate([[1.0], np.cumprod(stays[:-1])])
        # Half a bucket is subtracted, because a decode ends within its last bucket.
        self._lifetime_s = (np.cumsum(lasting).item(-1) - 0.5) * SURVIVAL_BUCKET_S
        survival: Floats = (lasting + RARE) / (1.0 + RARE)
        return survival


def _pour(ring: Floats, start: int, count: int, rest: Floats) -> None:
    """Moves `count` columns of the ring, from `start` on, into `rest`. Removes them in one
    operation: after a long silence, that is the whole ring."""
    places = np.arange(start, start + count) % NUM_SURVIVAL_BUCKETS
    rest += ring[:, places].sum(axis=1)
    ring[:, places] = 0.0


def _weigh(ring: Floats, start: int, shares: Floats) -> Floats:
    """Returns the weighted sum of the ring's columns from `start` on."""
    num_straight = min(NUM_SURVIVAL_BUCKETS - start, len(shares))
    sums: Floats = ring[:, start : start + num_straight] @ shares[:num_straight]
    if num_straight < len(shares):
        sums += ring[:, : len(shares) - num_straight] @ shares[num_straight:]
    return sums
