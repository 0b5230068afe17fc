"""Learns how soon blocks of each class are used again, and derives what a cached block is worth.

Time is counted in touches (blocks that went through the cache), grouped in epochs. For each class
and range of ages the model keeps two decaying counts: blocks released, and blocks of these used
again at that age, whether still cached or not. They give the survival curve of the class, and with
it the worth of a block that has reached an age unused:

    worth(age) = max over t of  P(used within t | age) / E[cache space x time until then | age]

It is the number of hits per unit of cache if the block is kept for the best time from now on: the
Gittins index of the block (LHD's hit density is the same with a fixed t). With a falling hazard,
worth equals the hazard and the order is that of LRU. With a hazard that rises first, middle-aged
blocks are worth more than new ones.

A class with little history uses its family's curve, scaled to what was observed of the class. A
family with little history is drawn towards the curve of all blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

AGE_LIMITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
"""Upper ends of the ranges of ages, in epochs; the last range is open."""
NUM_AGES = len(AGE_LIMITS) + 1
MAX_AGE = AGE_LIMITS[-1]
PRIOR_BLOCKS = 4000.0
"""Weight of the family in the shape of a class's curve, in blocks of the class's own history."""
PRIOR_HITS = 100.0
"""Weight of the family in the height of a class's curve, in hits of the class's own history."""
PRIOR_REUSE = 0.03
"""Prior without any history: the share of blocks used again before the first limit, and between
each age and its double. This hazard falls with age, so the order is that of LRU."""


def _age_table() -> tuple[int, ...]:
    table = []
    for age in range(MAX_AGE + 1):
        table.append(next((i for i, end in enumerate(AGE_LIMITS) if age < end), NUM_AGES - 1))
    return tuple(table)


def _prior() -> tuple[float, ...]:
    shares, start = [], 0
    for end in AGE_LIMITS:
        shares.append(PRIOR_REUSE * ((end - start) / start if start else 1.0))
        start = end
    return tuple(shares)


AGE_RANGE = _age_table()
"""The range of each age, in whole epochs up to MAX_AGE."""
_DELAYS = tuple((a + b) // 2 for a, b in zip((0, *AGE_LIMITS), AGE_LIMITS, strict=False))
_WIDTHS = tuple(b - a for a, b in zip((0, *AGE_LIMITS), AGE_LIMITS, strict=False))
_PRIOR = _prior()


class _History:
    """Observations of one class. A lesson is one update of the curves, every `period` epochs."""

    __slots__ = ("exposed", "family", "released_by", "released_now", "reused", "reused_now")

    def __init__(self, family: int, period: int) -> None:
        self.family = family
        self.released_now = [0] * period  # by epoch since the last lesson
        self.reused_now = [0] * NUM_AGES  # since the last lesson, by age
        # All blocks released until the end of each of the latest epochs.
        self.released_by = [0] * (MAX_AGE + period + 1)
        self.exposed = [0.0] * (NUM_AGES - 1)  # released long enough ago to have reached the age
        self.reused = [0.0] * (NUM_AGES - 1)

    def learn(self, decay: float) -> None:
        period = len(self.released_now)
        released_by = self.released_by
        for count in self.released_now:
            released_by.append(released_by[-1] + count)
        del released_by[:period]
        self.released_now = [0] * period
        exposed, reused, reused_now = self.exposed, self.reused, self.reused_now
        for age, delay in enumerate(_DELAYS):
            fresh = released_by[-1 - delay] - released_by[-1 - delay - period]
            exposed[age] = exposed[age] * decay + fresh
            reused[age] = reused[age] * decay + reused_now[age]
        self.reused_now = [0] * NUM_AGES


class ReuseModel:
    """The reuse statistics of all classes, which are numbered in the order of `add_class`."""

    def __init__(self, period: int, decay: float) -> None:
        """Learns every `period` epochs; each time, older counts are multiplied by `decay`."""
        assert period > 0 and 0 < decay < 1
        self._histories: list[_History] = []
        self._period = period
        self._decay = decay
        self._epoch = 0  # since the last lesson
        self._overall: Sequence[float] = _PRIOR
        self._family_shares: dict[int, list[float]] = {}
        self._num_learned = 0  # classes that there were at the last lesson
        self._curves_known = True  # of families and overall, as of the last lesson

    def add_class(self, family: int) -> int:
        """Adds a class of a family and returns its number (mutates)."""
        self._histories.append(_History(family, self._period))
        return len(self._histories) - 1

    def note_release(self, class_id: int, num_blocks: int) -> None:
        """Blocks of the class were released in this epoch (mutates)."""
        self._histories[class_id].released_now[self._epoch] += num_blocks

    def note_reuse(self, class_id: int, age_range: int, num_blocks: int) -> None:
        """Blocks of the class were used again at this age (mutates)."""
        self._histories[class_id].reused_now[age_range] += num_blocks

    def end_epoch(self) -> bool:
        """Ends an epoch (mutates). Returns True if `worths` has changed."""
        self._epoch += 1
        if self._epoch < self._period:
            return False
        self._epoch = 0
        for history in self._histories:
            history.learn(self._decay)
        self._num_learned, self._curves_known = len(self._histories), False
        return True

    def worths(self) -> list[list[float]]:
        """The worths of all classes by range of ages, as of the last lesson. A class that came
        after it has its family's curve."""
        if not self._curves_known:
            self._learn_curves()
        return [self._worths_of(history) for history in self._histories]

    def _learn_curves(self) -> None:
        total = _Sums()
        sums: dict[int, _Sums] = {}
        for history in self._histories[: self._num_learned]:
            sums.setdefault(history.family, _Sums()).add(history)
            total.add(history)
        self._overall = _shares(total.reused, total.exposed, _PRIOR)
        self._family_shares = {
            family: _shares(part.reused, part.exposed, self._overall)
            for family, part in sums.items()
        }
        self._curves_known = True

    def _worths_of(self, history: _History) -> list[float]:
        family = self._family_shares.get(history.family, self._overall)
        return _worths(_own_shares(history, family))


class _Sums:
    """Sums over the histories of several classes."""

    __slots__ = ("exposed", "reused")

    def __init__(self) -> None:
        self.exposed = [0.0] * (NUM_AGES - 1)
        self.reused = [0.0] * (NUM_AGES - 1)

    def add(self, history: _History) -> None:
        self.exposed = list(map(add, self.exposed, history.exposed))
        self.reused = list(map(add, self.reused, history.reused))


def _shares(
    reused: Sequence[float], exposed: Sequence[float], prior: Sequence[float]
) -> list[float]:
    """The share of all released blocks that is used again in each range of ages."""
    return [
        (hits + PRIOR_BLOCKS * expected) / (blocks + PRIOR_BLOCKS)
        for hits, blocks, expected in zip(reused, exposed, prior, strict=True)
    ]


def _own_shares(history: _History, family: Sequence[float]) -> list[float]:
    """The shares of the class: the family's curve, scaled, where the class has little history, and
    its own curve where it has much."""
    expected = sum(blocks * share for blocks, share in zip(history.exposed, family, strict=True))
    factor = (sum(history.reused) + PRIOR_HITS) / (expected + PRIOR_HITS)
    return _shares(history.reused, history.exposed, [share * factor for share in family])


def _worths(shares: list[float]) -> list[float]:
    """The worth at the beginning of each range: the steepest slope from there on of the curve of
    hits over cache space x time, which is the slope of its concave hull."""
    survivors = 1.0
    costs, gains = [], []
    for share, width in zip(shares, _WIDTHS, strict=True):
        gain = min(share, 0.98 * survivors)
        costs.append((survivors - gain / 2) * width)
        gains.append(gain)
        survivors -= gain
    worths = [0.0] * NUM_AGES
    hull: list[tuple[float, float]] = []  # of the later ranges: (gain, cost), steepest last
    for age in range(len(shares) - 1, -1, -1):
        gain, cost = gains[age], costs[age]
        while hull and hull[-1][0] * cost > gain * hull[-1][1]:
            next_gain, next_cost = hull.pop()
            gain += next_gain
            cost += next_cost
        hull.append((gain, cost))
        worths[age] = gain / cost
    return worths
