"""Learns how likely an answer is to meet its SLOs, from the answers that have ended.

TBT is judged by the mean of the longest tenth of an answer's gaps (`RequestRecord.effective`). How
far that lies above the predicted step time depends on the length of the answer. The first gap of an
answer lasts until the step under way and its own have ended, so up to two steps. It is the longest
tenth of a short answer, and has little weight in a long one. With one factor for all answers, a few
short answers would be enough to reject everything. So the ratio is learned by length, and the
chance of a request is the mean over the lengths that answers have.

Answers of mixed instances are kept apart: chunks of prompts make their longest gaps. There the
predicted time is at least the time that the instance plans for such a step (`CHUNKED_STEP_SHARE`).
"""

from __future__ import annotations

from math import inf, sqrt

from moonpool.distributions import NUM_BINS, RatioHistogram, edge, share_at

LENGTH_CLASSES = (2, 10, 20, 40, 80, 160, 320)
"""Smallest number of tokens of an answer in each class. An answer of one token has no gap."""
LENGTH_GUESS = (0.5, 0.5, 0.5, 1.0, 2.0, 3.0, 3.0)
"""Weights of the classes until answers have ended."""
GUESS_WEIGHT = 4.0
"""A first guess weighs as much as this number of answers."""
NUM_GUESSES = 16
USUAL_SPREAD = 1.04
"""First guess: the longest tenth of the gaps of a long answer over the predicted step."""
USUAL_SPREADS = (1.0, 1.02, USUAL_SPREAD, 1.06)
LENGTH_MEMORY = 1024
RELEARN_EVERY = 16
QUEUED_SHARE = 0.125
"""TTFTs predicted below this share of the SLO say nothing about the lateness of a long queue."""
TTFT_CLASSES = (0.0, 0.35, 0.7)
"""Least shares of the SLO of each class of predicted TTFTs."""
TTFT_MIDDLES = (0.24, 0.52, 0.85)
"""A usual share of the SLO in each class."""
POOLED_WEIGHT = 8.0
"""Weight of the ratios of all classes when they are mixed into those of one class."""
TINY_WEIGHT = 0.01
LEAST_RATIO = 0.25


TRIED_RATIOS = (
    *(1.0 + 0.01 * step for step in range(-10, 40)),
    *(edge(i) for i in range(76, NUM_BINS)),
)
"""Ratios of the SLO to the step time that `best_step_s` tries."""


class TbtChances:
    """The chance that the longest tenth of an answer's gaps is within a multiple of the predicted
    step time."""

    def __init__(self, joins_between: bool = False) -> None:
        """`joins_between`: whether answers begin between two steps, so that their first gap is one
        step."""
        self._ratios = [
            RatioHistogram(
                list(USUAL_SPREADS) if joins_between else _first_guess(tokens), GUESS_WEIGHT
            )
            for tokens in LENGTH_CLASSES
        ]
        self._lengths = list(LENGTH_GUESS)
        self._no_gap = 0.0  # weight of answers that have only one token
        self._num_new = 0
        self._shares = self._mean_shares()
        self._best_steps: dict[tuple[float, float], float] = {}

    def note_answer(self, num_tokens: int, longest_s: float, predicted_s: float) -> None:
        """`longest_s`: mean of the longest tenth of the gaps of an answer of `num_tokens`.
        `predicted_s`: the step time that was predicted at admission, or 0 if no lasting step time
        was predicted."""
        if num_tokens < LENGTH_CLASSES[0]:
            self._no_gap += 1.0
        else:
            place = sum(num_tokens >= least for least in LENGTH_CLASSES) - 1
            self._lengths[place] += 1.0
            if predicted_s > 0.0 and longest_s > 0.0:
                self._ratios[place].add(longest_s / predicted_s)
        self._num_new += 1
        if self._num_new < RELEARN_EVERY:
            return
        if self._no_gap + sum(self._lengths) > 2 * LENGTH_MEMORY:
            self._lengths = [weight * 0.5 for weight in self._lengths]
            self._no_gap *= 0.5
        self._shares, self._num_new = self._mean_shares(), 0
        self._best_steps.clear()

    def chance(self, step_s: float, slo_s: float) -> float:
        """The chance to meet the SLO where a step of `step_s` is predicted."""
        if step_s <= 0.0 or slo_s == inf:
            return 1.0
        return share_at(self._shares, slo_s / step_s)

    def best_step_s(self, base_s: float, slo_s: float) -> float:
        """The step time with which the largest number of answers meet the SLO. A longer step serves
        more requests together, but a smaller share of them meets the SLO. `base_s`: the step time
        without any request. Infinite if `slo_s` is.

        The load of a step is its time above `base_s`; the result maximises load times chance.
        """
        if slo_s == inf:
            return inf
        key = (base_s, slo_s)
        best_s = self._best_steps.get(key)
        if best_s is None:
            _, best_s = max(
                (
                    max(slo_s / ratio - base_s, 0.0) * self.chance(slo_s / ratio, slo_s),
                    slo_s / ratio,
                )
                for ratio in TRIED_RATIOS
            )
            # clients may choose SLOs, so the number of cached SLOs is bounded
            if len(self._best_steps) >= 64:
                self._best_steps.clear()
            self._best_steps[key] = best_s
        return best_s

    def _mean_shares(self) -> list[float]:
        """Returns the mean shares over the lengths of answers, weighted, by edge of a bin."""
        total = self._no_gap + sum(self._lengths)
        means = [self._no_gap / total] * (NUM_BINS + 1)
        for weight, ratios in zip(self._lengths, self._ratios, strict=True):
            for index, share in enumerate(ratios.shares()):
                means[index] += weight / total * share
        return means


class TtftChances:
    """The chance that a TTFT is within a multiple of the predicted one.

    A TTFT near the SLO is mostly queueing, in which the errors of many prompts cancel out. A short
    TTFT depends on the step under way. So ratios are learned separately for each class of predicted
    TTFT as a share of the SLO. A class with few ratios uses those of all classes, scaled, because
    the relative error of a sum falls with the square root of its length.
    """

    def __init__(self) -> None:
        first_guess = [1.0 + 0.01 * step for step in range(-2, 3)]
        self._ratios = [RatioHistogram(first_guess, TINY_WEIGHT) for _ in TTFT_CLASSES]
        self._pooled = [RatioHistogram(first_guess, GUESS_WEIGHT) for _ in TTFT_CLASSES]
        self._shares = [pooled.shares() for pooled in self._pooled]
        self._num_new = 0

    def note_first_token(self, ttft_s: float, predicted_s: float, slo_s: float) -> None:
        if predicted_s < QUEUED_SHARE * slo_s or ttft_s <= 0.0:
            return
        ratio, share = ttft_s / predicted_s, predicted_s / slo_s
        self._ratios[_ttft_class(predicted_s, slo_s)].add(ratio)
        for middle, pooled in zip(TTFT_MIDDLES, self._pooled, strict=True):
            pooled.add(max(1.0 + (ratio - 1.0) * sqrt(share / middle), LEAST_RATIO))
        self._num_new += 1
        # while there are few answers, the chances are learned again more often
        if self._num_new >= min(RELEARN_EVERY, self._pooled[0].total / 2.0):
            self._num_new = 0
            self._shares = [
                _mixed(ratios, pooled.shares())
                for ratios, pooled in zip(self._ratios, self._pooled, strict=True)
            ]

    def chance(self, ttft_s: float, slo_s: float) -> float:
        """The chance to meet the SLO where `ttft_s` is predicted. Returns 0 if `slo_s`, from which
        the request's wait may have been subtracted, is 0 or less."""
        if slo_s <= 0.0:
            return 0.0
        if ttft_s <= 0.0:
            return 1.0
        return share_at(self._shares[_ttft_class(ttft_s, slo_s)], slo_s / ttft_s)


def _ttft_class(predicted_s: float, slo_s: float) -> int:
    return sum(predicted_s >= least * slo_s for least in TTFT_CLASSES[1:])


def _mixed(ratios: RatioHistogram, pooled: list[float]) -> list[float]:
    """The shares of these ratios, with `POOLED_WEIGHT` of all ratios among them."""
    own, weight = ratios.shares(), ratios.total
    return [
        (weight * one + POOLED_WEIGHT * other) / (weight + POOLED_WEIGHT)
        for one, other in zip(own, pooled, strict=True)
    ]


def _first_guess(num_tokens: int) -> list[float]:
    """Ratios of an answer whose first gap lasts 1 to 2 steps, all equally likely."""
    count = max(1, (num_tokens - 1) // 10)
    firsts = [1.0 + (index + 0.5) / NUM_GUESSES for index in range(NUM_GUESSES)]
    return [(first + (count - 1) * USUAL_SPREAD) / count for first in firsts]
