"""The random parts of a generated workload: samples of distributions, shared prompts, and clocks.

All draws use the one seeded generator of a workload, in a fixed order.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from moonpool.trace.profile import PROBABILITIES, GeneratorProfile, Quantiles, SharedPrompts

SHORT_S = 10.0
LONG_S = 300.0
"""Periods after which the two factors of a bursty arrival rate change."""
_MIN_RATE = 0.1  # least rate between strong bursts, relative to the mean rate


def sampler(table: Quantiles, rng: random.Random) -> Callable[[], float]:
    """Returns a function that samples the distribution with these quantiles."""
    if len(table) == 1:
        constant = table[0]
        return lambda: constant
    steps = tuple(
        (low, value, (table[number + 1] - value) / (PROBABILITIES[number + 1] - low))
        for number, (low, value) in enumerate(zip(PROBABILITIES[:-1], table[:-1], strict=True))
    )
    uniform = rng.random

    def draw() -> float:
        share = uniform()
        low, value, slope = steps[bisect_right(PROBABILITIES, share) - 1]
        return value + (share - low) * slope

    return draw


class SharedPromptPool:
    """The shared prompts of a workload: their popularity, lengths and block ids."""

    def __init__(self, shared: SharedPrompts, block_tokens: int, rng: random.Random) -> None:
        self._rng = rng
        self._share = shared.share
        draw = sampler(shared.tokens, rng)
        self.num_blocks = [max(1, round(draw() / block_tokens)) for _ in range(shared.count)]
        weights = accumulate(rank**-shared.skew for rank in range(1, shared.count + 1))
        self._cumulative = list(weights)
        self._first_ids: dict[int, int] = {}

    def draw(self) -> int | None:
        """Samples the shared prompt of a session: its number, or None for none."""
        if self._share < 1 and self._rng.random() >= self._share:
            return None
        place = self._rng.random() * self._cumulative[-1]
        return min(bisect_right(self._cumulative, place), len(self._cumulative) - 1)

    def ids(self, number: int, next_id: int) -> tuple[list[int], int]:
        """The block ids of a prompt, from `next_id` on if it is new, and the next free id."""
        first = self._first_ids.setdefault(number, next_id)
        ids = list(range(first, first + self.num_blocks[number]))
        return ids, max(next_id, ids[-1] + 1)


class BurstClock:
    """Maps even time, in which the arrival rate is constant, to real time with bursts.

    The rate is the product of two factors, each with two values: one is drawn every 10 s, the other
    every 300 s. Arrivals of new sessions and of later turns share the rate.
    """

    def __init__(self, profile: GeneratorProfile, rng: random.Random) -> None:
        self._rng = rng
        self._short = _two_rates(profile.burst_short_cv2)
        self._long = _two_rates(profile.burst_long_cv2)
        self._is_even = profile.burst_short_cv2 == profile.burst_long_cv2 == 0
        self._number = -1
        self._even_s = 0.0  # time at which the present period ends
        self._real_s = 0.0
        self._rate = 1.0
        self._long_rate = 1.0

    def real_s(self, even_s: float) -> float:
        """The real time of `even_s`, which must not decrease between calls."""
        if self._is_even:
            return even_s
        while even_s >= self._even_s:
            self._number += 1
            if self._number % round(LONG_S / SHORT_S) == 0:
                self._long_rate = self._draw(self._long)
            self._rate = self._long_rate * self._draw(self._short)
            self._even_s += SHORT_S * self._rate
            self._real_s += SHORT_S
        return self._real_s - (self._even_s - even_s) / self._rate

    def _draw(self, rates: tuple[float, float, float]) -> float:
        low, high, share_high = rates
        return high if self._rng.random() < share_high else low


class DayClock:
    """Maps even time, in which the arrival rate is constant, to a day with hourly rates."""

    def __init__(self, by_hour: tuple[float, ...], day_s: float) -> None:
        self._by_hour = by_hour
        self._hour_s = day_s / len(by_hour)
        self._hour = 0
        self._even_s = by_hour[0] * self._hour_s  # time at which the present hour ends

    def real_s(self, even_s: float) -> float:
        """The real time of `even_s`, which must not decrease between calls."""
        while even_s >= self._even_s:
            self._hour += 1
            self._even_s += self._rate * self._hour_s
        return (self._hour + 1) * self._hour_s - (self._even_s - even_s) / self._rate

    @property
    def _rate(self) -> float:
        return self._by_hour[self._hour % len(self._by_hour)]


def _two_rates(cv2: float) -> tuple[float, float, float]:
    """Returns (low, high, probability of high) with mean 1 and variance `cv2`."""
    low = max(_MIN_RATE, 1 - cv2**0.5)
    share_high = (1 - low) ** 2 / ((1 - low) ** 2 + cv2) if cv2 else 0.0
    high = low + (1 - low) / share_high if share_high else 1.0
    return low, high, share_high
