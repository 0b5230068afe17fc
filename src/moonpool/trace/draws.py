"""The random parts a generated workload is made of: values from quantile tables, shared prompts by
popularity, and a clock that runs fast in bursts.

All draws come from the generator's one seeded source, in one order.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from moonpool.trace.profile import PROBABILITIES, GeneratorProfile, Quantiles, SharedPrompts

SHORT_S = 10.0
LONG_S = 300.0
_MIN_RATE = 0.1  # of the mean rate: what is left between strong bursts


def sampler(table: Quantiles, rng: random.Random) -> Callable[[], float]:
    """Draws from a distribution given by its quantiles."""
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


class Prompts:
    """The shared prompts: which one a session begins with, and the ids of its blocks."""

    def __init__(self, shared: SharedPrompts, block_tokens: int, rng: random.Random) -> None:
        self._rng = rng
        self._share = shared.share
        draw = sampler(shared.tokens, rng)
        self.num_blocks = [max(1, round(draw() / block_tokens)) for _ in range(shared.count)]
        weights = accumulate(rank**-shared.skew for rank in range(1, shared.count + 1))
        self._cumulative = list(weights)
        self._first_ids: dict[int, int] = {}

    def draw(self) -> int | None:
        """The number of a prompt; None: this session has none."""
        if self._share < 1 and self._rng.random() >= self._share:
            return None
        place = self._rng.random() * self._cumulative[-1]
        return min(bisect_right(self._cumulative, place), len(self._cumulative) - 1)

    def ids(self, number: int, next_id: int) -> tuple[list[int], int]:
        """Ids of a prompt's blocks, from `next_id` on if it is new, and the next free id."""
        first = self._first_ids.setdefault(number, next_id)
        ids = list(range(first, first + self.num_blocks[number]))
        return ids, max(next_id, ids[-1] + 1)


class BurstClock:
    """Turns even time, in which the mean arrival rate is constant, into real time.

    The rate is one of two values, drawn every 10 s, times one of two drawn every 300 s. All
    arrivals, of new sessions and of further turns, share it.
    """

    def __init__(self, profile: GeneratorProfile, rng: random.Random) -> None:
        self._rng = rng
        self._short = _two_rates(profile.burst_short_cv2)
        self._long = _two_rates(profile.burst_long_cv2)
        self._is_even = profile.burst_short_cv2 == profile.burst_long_cv2 == 0
        self._number = -1
        self._even_s = 0.0  # where the present stretch ends
        self._real_s = 0.0
        self._rate = 1.0
        self._long_rate = 1.0

    def real_s(self, even_s: float) -> float:
        """Real time of a moment in even time; moments must not fall."""
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


def _two_rates(cv2: float) -> tuple[float, float, float]:
    """(low, high, probability of high) with mean 1 and variance `cv2`, which takes no logarithm."""
    low = max(_MIN_RATE, 1 - cv2**0.5)
    share_high = (1 - low) ** 2 / ((1 - low) ** 2 + cv2) if cv2 else 0.0
    high = low + (1 - low) / share_high if share_high else 1.0
    return low, high, share_high
