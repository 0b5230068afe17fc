"""Learns how soon blocks of each class are used again, and derives what a cached block is worth.

Time is counted in touches (blocks that went through the cache), grouped in epochs. For each class
and range of ages the model keeps two decaying counts: blocks released, and blocks of these used
again at that age, whether still cached or not. The counts give the survival curve of the class, and
with it the worth of a block that has reached an age unused:

    worth(age) = max over t of  P(used within t | age) / E[cache space x time until then | age]

The worth is the number of hits per unit of cache if the block is kept for the best time from now
on: the Gittins index of the block (LHD's hit density is the same with a fixed t). With a falling
hazard, worth equals the hazard and the order is that of LRU. With a hazard that rises first,
middle-aged blocks are worth more than new ones.

A class with little history uses its family's curve, scaled to what was observed of the class. A
family with little history is drawn towards the curve of all blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

AGE_LIMITS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
"""Upper ends of the ranges of ages, in epochs; the last range is open."""
NUM_AGES = len(AGE_LIMITS) + 1
MAX_AGE = AGE_LIMITS[-1]
PRIOR_BLOCKS = 4000.0
"""Weight of the family in the shape of a class's curve, in blocks of the class's own history."""
PRIOR_HITS = 100.0
"""Weight of the family in the height of a class's curve, in hits of the class's own history."""
PRIOR_REUSE = 0.03
"""Prior without any history: the share of blocks that are used again before the first limit, and
between each age and its double. This hazard falls with age, so the order is that of LRU."""


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
DELAYS = np.array([(a + b) // 2 for a, b in zip((0, *AGE_LIMITS), AGE_LIMITS, strict=False)])
WIDTHS = tuple(b - a for a, b in zip((0, *AGE_LIMITS), AGE_LIMITS, strict=False))
PRIOR = np.array(_prior())

Floats = npt.NDArray[np.float64]


class ReuseModel:
    """The reuse statistics of all classes, which are numbered in the order of `add_class`. A lesson
    is one update of the curves, every `period` epochs. Sums are made one addend after another, so
    they are the same on every machine."""

    def __init__(self, period: int, decay: float) -> None:
        """Learns every `period` epochs; each time, older counts are multiplied by `decay`."""
        assert period > 0 and 0 < decay < 1
        self._period = period
        self._decay = decay
        self._epoch = 0  # epochs since the last lesson
        self._families: list[int] = []  # by class
        # Since the last lesson, by class: blocks released by epoch, and used again by age.
        self._released_now: list[list[int]] = []
        self._reused_now: list[list[int]] = []
        # At the last lesson, by class: the blocks released by the end of each of the latest epochs;
        # the blocks released long enough ago to have reached each age; the blocks used again at
        # each age.
        self._released_by = np.zeros((0, MAX_AGE + period + 1), dtype=np.int64)
        self._exposed: Floats = np.zeros((0, NUM_AGES - 1))
        self._reused: Floats = np.zeros((0, NUM_AGES - 1))

    def add_class(self, family: int) -> int:
        """Adds a class to a family and returns the number of the class."""
        self._families.append(family)
        self._released_now.append([0] * self._period)
        self._reused_now.append([0] * NUM_AGES)
        return len(self._families) - 1

    def note_release(self, class_id: int, num_blocks: int) -> None:
        """Notes that blocks of the class were released in this epoch."""
        self._released_now[class_id][self._epoch] += num_blocks

    def note_reuse(self, class_id: int, age_range: int, num_blocks: int) -> None:
        """Notes that blocks of the class were used again at this age."""
        self._reused_now[class_id][age_range] += num_blocks

    def end_epoch(self) -> bool:
        """Ends an epoch. Returns True if `worths` has changed."""
        self._epoch += 1
        if self._epoch < self._period:
            return False
        self._epoch = 0
        if self._families:
            self._learn()
        return True

    def worths(self) -> list[list[float]]:
        """Returns the worths of all classes by range of ages, as of the last lesson. A class that
        was added after the last lesson has the curve of its family."""
        num_learned, num_ages = self._exposed.shape
        families = self._families
        exposed, reused = np.zeros((2, len(families), num_ages))
        exposed[:num_learned], reused[:num_learned] = self._exposed, self._reused
        overall = PRIOR
        shares_of: dict[int, Floats] = {}
        if num_learned:
            overall = _shares(_total(reused[:num_learned]), _total(exposed[:num_learned]), PRIOR)
            learned = np.array(families[:num_learned])
            for family in dict.fromkeys(families[:num_learned]):
                own = (learned == family).nonzero()[0]
                shares_of[family] = _shares(_total(reused[own]), _total(exposed[own]), overall)
        if not families:
            return []
        curves = np.array([shares_of.get(family, overall) for family in families])
        shares = _own_shares(reused, exposed, curves).tolist()
        return [_worths(of_class) for of_class in shares]

    def _learn(self) -> None:
        num_classes, period = len(self._families), self._period
        missing = num_classes - len(self._exposed)
        if missing:
            self._released_by, self._exposed, self._reused = (
                np.concatenate([known, np.zeros((missing, known.shape[1]), dtype=known.dtype)])
                for known in (self._released_by, self._exposed, self._reused)
            )
        by = self._released_by
        by[:, :-period] = by[:, period:]
        by[:, -period:] = by[:, [-period - 1]] + np.cumsum(self._released_now, axis=1)
        fresh = by[:, -1 - DELAYS] - by[:, -1 - DELAYS - period]
        self._exposed = self._exposed * self._decay + fresh
        reused_now = np.array(self._reused_now)[:, :-1]
        self._reused = self._reused * self._decay + reused_now
        self._released_now = [[0] * period for _ in range(num_classes)]
        self._reused_now = [[0] * NUM_AGES for _ in range(num_classes)]


def _total(counts: Floats) -> Floats:
    """Returns the sum over all rows, from the first to the last."""
    total: Floats = np.cumsum(counts, axis=0)[-1]
    return total


def _shares(reused: Floats, exposed: Floats, prior: Floats) -> Floats:
    """Returns the share of all released blocks that is used again in each range of ages."""
    return (reused + PRIOR_BLOCKS * prior) / (exposed + PRIOR_BLOCKS)


def _own_shares(reused: Floats, exposed: Floats, families: Floats) -> Floats:
    """Returns the shares of each class: mostly its own curve if the class has much history, else
    mostly the scaled curve of its family. Both arrays are indexed by class and range of ages."""
    expected = np.cumsum(exposed * families, axis=1)[:, -1:]
    total = np.cumsum(reused, axis=1)[:, -1:]
    factor = (total + PRIOR_HITS) / (expected + PRIOR_HITS)
    return _shares(reused, exposed, families * factor)


def _worths(shares: list[float]) -> list[float]:
    """Returns the worth at the beginning of each range. It is the steepest slope from there on of
    the curve of hits over cache space x time, which is the slope of the curve's concave hull."""
    survivors = 1.0
    costs, gains = [], []
    for share, width in zip(shares, WIDTHS, strict=True):
        most = 0.98 * survivors
        gain = most if most < share else share  # same as `min`, without a call
        costs.append((survivors - gain / 2) * width)
        gains.append(gain)
        survivors -= gain
    worths = [0.0] * NUM_AGES
    # hull of the later ranges: (gain, cost), the steepest last
    hull: list[tuple[float, float]] = []
    for age in range(len(shares) - 1, -1, -1):
        gain, cost = gains[age], costs[age]
        while hull and hull[-1][0] * cost > gain * hull[-1][1]:
            next_gain, next_cost = hull.pop()
            gain += next_gain
            cost += next_cost
        hull.append((gain, cost))
        worths[age] = gain / cost
    return worths
