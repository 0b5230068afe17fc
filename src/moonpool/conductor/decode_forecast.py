"""How many answers will be decoding at a time to come (Mooncake v3 section 7.4), each with its own
expected end.

Every request under way is a *stay* in the decode pool, from the instant its prefill should end (or
ended) until the instant its answer should. Stays are counted in buckets of time by beginning and by
end, so that a projection adds up buckets, not requests. An answer that lasts longer than its stay
counts as gone, unless the caller prolongs it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from moonpool.conductor.output_length import RunningMean
from moonpool.conductor.prediction_error import PredictionError

BUCKET_S = 0.25
NUM_BUCKETS = 4096
"""Of the ring: what is further away than 1024 s counts as just that."""


@dataclass(slots=True, eq=False)
class Stay:
    """One request's expected time in the decode pool, in buckets since the clock's zero."""

    begins: int
    ends: int
    context_tokens: int
    decoding: bool = False


class Forecast(Protocol):
    """What the Conductor asks of a forecast, whatever it goes by."""

    error: PredictionError

    @property
    def usual_s(self) -> float | None: ...
    def enter(
        self, begins_s: float, duration_s: float, context_tokens: int, now: float
    ) -> Stay: ...
    def begin(self, stay: Stay, duration_s: float, now: float) -> None: ...
    def prolong(self, stay: Stay, duration_s: float, now: float) -> None: ...
    def leave(self, stay: Stay, now: float) -> None: ...
    def observe(self, duration_s: float) -> None: ...
    def project(self, at_s: float, now: float) -> tuple[float, float]: ...
    def note_projection(self, at_s: float, count: float) -> None: ...
    def validate(self, stays: list[Stay]) -> None: ...


class _Ring:
    """Requests and tokens by bucket, from `first` on; what is earlier is summed up in `past`."""

    def __init__(self) -> None:
        self.first = 0
        self.past = [0, 0]
        self.ahead = [0, 0]
        self._counts = [0] * NUM_BUCKETS
        self._tokens = [0] * NUM_BUCKETS

    def add(self, bucket: int, count: int, tokens: int) -> None:
        """Negative numbers take away."""
        sums = self.past if bucket < self.first else self.ahead
        sums[0] += count
        sums[1] += tokens
        if bucket >= self.first:
            self._counts[bucket % NUM_BUCKETS] += count
            self._tokens[bucket % NUM_BUCKETS] += tokens

    def advance(self, first: int) -> None:
        """Lets the time before `first` pass (mutates)."""
        for bucket in range(self.first, min(first, self.first + NUM_BUCKETS)):
            place = bucket % NUM_BUCKETS
            count, tokens = self._counts[place], self._tokens[place]
            if count:
                self.past[0] += count
                self.past[1] += tokens
                self.ahead[0] -= count
                self.ahead[1] -= tokens
                self._counts[place] = self._tokens[place] = 0
        self.first = first

    def until(self, last: int) -> tuple[int, int]:
        """Sums from `first` up to bucket `last`, which is included."""
        begin = self.first % NUM_BUCKETS
        end = begin + min(last - self.first + 1, NUM_BUCKETS)
        count, tokens = sum(self._counts[begin:end]), sum(self._tokens[begin:end])
        if end > NUM_BUCKETS:
            count += sum(self._counts[: end - NUM_BUCKETS])
            tokens += sum(self._tokens[: end - NUM_BUCKETS])
        return count, tokens


class DecodeForecast:
    """Counts stays. Never looks at a request, an instance or an SLO."""

    def __init__(self) -> None:
        self.error = PredictionError()  # of the number decoding
        self._usual = RunningMean(0.0)
        self._begins, self._ends = _Ring(), _Ring()
        self._num_stays = self._stay_tokens = 0
        self._num_decoding = 0
        self._said: deque[tuple[int, float]] = deque(maxlen=NUM_BUCKETS)

    @property
    def usual_s(self) -> float | None:
        """How long answers decode, by the running mean of those that ended; None: none has."""
        return self._usual.value if self._usual.count else None

    def enter(self, begins_s: float, duration_s: float, context_tokens: int, now: float) -> Stay:
        """A request is under way whose answer should begin then and last so long."""
        self._advance(now)
        begins, ends = self._buckets(begins_s, duration_s)
        stay = Stay(begins, ends, context_tokens)
        self._count(stay, 1)
        return stay

    def begin(self, stay: Stay, duration_s: float, now: float) -> None:
        """Its answer begins to decode now (mutates the stay)."""
        self._advance(now)
        self._count(stay, -1)
        stay.begins, stay.ends = self._buckets(now, duration_s)
        stay.decoding = True
        self._num_decoding += 1
        self._count(stay, 1)

    def prolong(self, stay: Stay, duration_s: float, now: float) -> None:
        """It lasts at least so much longer (mutates the stay)."""
        self._advance(now)
        self._ends.add(stay.ends, -1, -stay.context_tokens)
        stay.ends = self._buckets(now, duration_s)[1]
        self._ends.add(stay.ends, 1, stay.context_tokens)

    def leave(self, stay: Stay, now: float) -> None:
        """Whatever became of it."""
        self._advance(now)
        self._count(stay, -1)
        self._num_decoding -= stay.decoding

    def observe(self, duration_s: float) -> None:
        """An answer was decoded to its end in this time."""
        self._usual.add(duration_s)

    def project(self, at_s: float, now: float) -> tuple[float, float]:
        """Number of answers decoding at `at_s`, of requests placed until now, and their tokens."""
        self._advance(now)
        last = self._begins.first + min(max(int((at_s - now) / BUCKET_S), 0), NUM_BUCKETS - 1)
        begun, begun_tokens = self._begins.until(last)
        over, over_tokens = self._ends.until(last)
        later, later_tokens = self._begins.ahead
        past, past_tokens = self._ends.past
        count = self._num_stays - (later - begun) - past - over
        tokens = self._stay_tokens - (later_tokens - begun_tokens) - past_tokens - over_tokens
        return count, tokens

    def note_projection(self, at_s: float, count: float) -> None:
        """This was said of that time, and will be compared with what comes."""
        bucket = int(at_s / BUCKET_S)
        if not self._said or bucket > self._said[-1][0]:
            self._said.append((bucket, count))

    def validate(self, stays: list[Stay]) -> None:
        """Asserts that the sums are those of the stays."""
        assert self._num_stays == len(stays)
        assert self._stay_tokens == sum(s.context_tokens for s in stays)
        assert self._num_decoding == sum(s.decoding for s in stays)
        for ring, buckets in (
            (self._begins, [s.begins for s in stays]),
            (self._ends, [s.ends for s in stays]),
        ):
            assert ring.past[0] == sum(b < ring.first for b in buckets)
            assert ring.ahead[0] == sum(b >= ring.first for b in buckets)
            assert ring.until(ring.first + NUM_BUCKETS)[0] == ring.ahead[0]

    def _buckets(self, begins_s: float, duration_s: float) -> tuple[int, int]:
        furthest = self._begins.first + NUM_BUCKETS - 1
        begins = min(int(begins_s / BUCKET_S), furthest)
        return begins, min(max(int((begins_s + duration_s) / BUCKET_S), begins), furthest)

    def _count(self, stay: Stay, sign: int) -> None:
        tokens = sign * stay.context_tokens
        self._begins.add(stay.begins, sign, tokens)
        self._ends.add(stay.ends, sign, tokens)
        self._num_stays += sign
        self._stay_tokens += tokens

    def _advance(self, now: float) -> None:
        first = int(now / BUCKET_S)
        if first <= self._begins.first:
            return
        while self._said and self._said[0][0] < first:
            self.error.note(self._said.popleft()[1], self._num_decoding)
        self._begins.advance(first)
        self._ends.advance(first)
