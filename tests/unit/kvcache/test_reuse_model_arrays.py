"""The reuse model computes arrays over all classes. Its figures equal, bit for bit, those of a
plain Python model that takes class after class, on every machine and version."""

from __future__ import annotations

from random import Random

import pytest

from moonpool.kvcache.eviction.survival import (
    DELAYS,
    MAX_AGE,
    NUM_AGES,
    PRIOR,
    PRIOR_BLOCKS,
    PRIOR_HITS,
    WIDTHS,
    ReuseModel,
)


def total(values: list[float]) -> float:
    """Sums from the first to the last, because Python's own `sum` compensates rounding since
    3.12."""
    found = 0.0
    for value in values:
        found += value
    return found


class PlainModel:
    """Computes one class after another, one age after another."""

    def __init__(self, period: int, decay: float) -> None:
        self.period, self.decay, self.epoch, self.num_learned = period, decay, 0, 0
        self.families: list[int] = []
        self.releases: list[list[int]] = []  # all released blocks, by epoch
        self.reuses: list[list[int]] = []
        self.exposed: list[list[float]] = []
        self.reused: list[list[float]] = []

    def add_class(self, family: int) -> None:
        self.families.append(family)
        self.releases.append([0] * (MAX_AGE + self.period + self.epoch + 1))
        self.reuses.append([0] * NUM_AGES)
        self.exposed.append([0.0] * (NUM_AGES - 1))
        self.reused.append([0.0] * (NUM_AGES - 1))

    def end_epoch(self) -> None:
        self.epoch += 1
        if self.epoch == self.period:
            self.epoch, self.num_learned = 0, len(self.families)
            for each, releases in enumerate(self.releases):
                for age, delay in enumerate(DELAYS):
                    end = len(releases) - int(delay)
                    fresh = sum(releases[end - self.period : end])
                    exposed, reused = self.exposed[each], self.reused[each]
                    exposed[age] = exposed[age] * self.decay + fresh
                    reused[age] = reused[age] * self.decay + self.reuses[each][age]
                self.reuses[each] = [0] * NUM_AGES
        for releases in self.releases:
            releases.append(0)

    def worths(self) -> list[list[float]]:
        known = range(self.num_learned)
        overall = self.curve(list(known), PRIOR.tolist()) if known else PRIOR.tolist()
        found = []
        for each, family in enumerate(self.families):
            own = [other for other in known if self.families[other] == family]
            curve = self.curve(own, overall) if own else overall
            exposed, reused = self.exposed[each], self.reused[each]
            expected = total([blocks * share for blocks, share in zip(exposed, curve, strict=True)])
            factor = (total(reused) + PRIOR_HITS) / (expected + PRIOR_HITS)
            found.append(steepest(self.curve([each], [share * factor for share in curve])))
        return found

    def curve(self, classes: list[int], prior: list[float]) -> list[float]:
        return [
            (total([self.reused[each][age] for each in classes]) + PRIOR_BLOCKS * share)
            / (total([self.exposed[each][age] for each in classes]) + PRIOR_BLOCKS)
            for age, share in enumerate(prior)
        ]


def steepest(shares: list[float]) -> list[float]:
    """Returns the concave hull from each age on, from the last age to the first."""
    survivors, steps = 1.0, []
    for share, width in zip(shares, WIDTHS, strict=True):
        gain = min(share, 0.98 * survivors)
        steps.append((gain, (survivors - gain / 2) * width))
        survivors -= gain
    hull: list[tuple[float, float]] = []
    worths = [0.0]
    for gain, cost in reversed(steps):
        while hull and hull[-1][0] * cost > gain * hull[-1][1]:
            gain, cost = gain + hull[-1][0], cost + hull.pop()[1]
        hull.append((gain, cost))
        worths.insert(0, gain / cost)
    return worths


@pytest.mark.parametrize("seed", range(6))
def test_the_arrays_are_the_plain_model_to_the_last_bit(seed: int) -> None:
    draw = Random(seed)
    period, decay = draw.choice((1, 2, 7, 32)), draw.uniform(0.5, 0.999)
    plain, model = PlainModel(period, decay), ReuseModel(period, decay)
    assert model.worths() == []
    for step in range(500):
        kind = draw.random() if plain.families else 0.0
        each = draw.randrange(max(len(plain.families), 1))
        if kind < 0.04:
            family = draw.randrange(5)
            plain.add_class(family)
            model.add_class(family)
        elif kind < 0.5:
            number = draw.randrange(300)
            plain.releases[each][-1] += number
            model.note_release(each, number)
        elif kind < 0.8:
            age, number = draw.randrange(NUM_AGES), draw.randrange(60)
            plain.reuses[each][age] += number
            model.note_reuse(each, age, number)
        else:
            plain.end_epoch()
            model.end_epoch()
        if step % 25 == 24:
            assert model.worths() == plain.worths(), step
