"""Estimators that the Conductor learns online: running means, errors, lengths of answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.distributions import nearest_bin, place_of, ratio_at
from moonpool.types import BlockKey

FIRST_GUESS_TOKENS = 256.0
MEMORY = 0.02
"""Weight of the newest value in a running mean, once there are 1 / MEMORY values."""
MAX_PREFIXES = 65_536
MAX_LOOK_BACK = 64
"""An earlier answer is looked up by this many of the last blocks of the shared prefix."""
NUM_LENGTH_BUCKETS = 64
OWN_WEIGHT = 0.5
"""Weight of a conversation's last answer against the mean: it predicts the next one poorly."""


class RunningMean:
    """A plain mean at first; old values fade once there are 1 / MEMORY values."""

    __slots__ = ("count", "value")

    def __init__(self, first_guess: float) -> None:
        self.value = first_guess
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(1.0 / self.count, MEMORY) * (value - self.value)


@dataclass(slots=True)
class PredictionError:
    """Error of a series of predictions, in their unit; positive: the predictions were too high."""

    count: int = 0
    too_much: float = 0.0  # sum of the errors of predictions that were too high
    too_little: float = 0.0  # sum of the errors of predictions that were too low
    num_ratios: int = 0
    _ratios: dict[int, int] = field(default_factory=dict)  # by bin

    def note(self, predicted: float, actual: float) -> None:
        self.count += 1
        if predicted >= actual:
            self.too_much += predicted - actual
        else:
            self.too_little += actual - predicted
        if predicted > 0 and actual > 0:
            place = round(place_of(predicted / actual))
            self._ratios[place] = self._ratios.get(place, 0) + 1
            self.num_ratios += 1

    @property
    def mean(self) -> float:
        return (self.too_much - self.too_little) / self.count if self.count else 0.0

    @property
    def mean_absolute(self) -> float:
        return (self.too_much + self.too_little) / self.count if self.count else 0.0

    def ratio(self, share: float) -> float:
        """The quantile `share` of predicted over actual, to 3 %. Pairs with a 0 have no ratio and
        are left out; returns 0 without any ratio."""
        if not self.num_ratios:
            return 0.0
        return ratio_at(nearest_bin(self._ratios, share, self.num_ratios))

    def summary(self) -> dict[str, float]:
        return {
            "count": self.count,
            "mean": self.mean,
            "mean_absolute": self.mean_absolute,
            "ratio_p50": self.ratio(0.5),
            "ratio_p90": self.ratio(0.9),
        }


class OutputLengths:
    """Predicts the length of an answer in constant time, with bounded memory.

    Learns from each finished answer. The prediction combines the last answer of the same
    conversation, found by the block keys that the prompts share, with the mean of prompts of
    similar length.
    """

    def __init__(self) -> None:
        self.error = PredictionError()
        self.mean = RunningMean(FIRST_GUESS_TOKENS)
        self._by_length = [RunningMean(FIRST_GUESS_TOKENS) for _ in range(NUM_LENGTH_BUCKETS)]
        self._by_prefix: OrderedDict[BlockKey, int] = OrderedDict()

    def predict(self, num_prompt_tokens: int, keys: Sequence[BlockKey], num_shared: int) -> float:
        """Returns the predicted tokens of the answer. `num_shared`: how many of the prompt's first
        `keys` are indexed."""
        similar = self._by_length[length_bucket(num_prompt_tokens)]
        usual = similar.value if similar.count else self.mean.value
        for index in range(num_shared - 1, max(num_shared - 1 - MAX_LOOK_BACK, -1), -1):
            last = self._by_prefix.get(keys[index])
            if last is not None:
                return usual + OWN_WEIGHT * (last - usual)
        return usual

    def learn(
        self,
        num_prompt_tokens: int,
        keys: Sequence[BlockKey],
        num_generated: int,
        predicted_tokens: float,
    ) -> None:
        """Adds a complete answer. `predicted_tokens`: what was predicted for it."""
        self.error.note(predicted_tokens, num_generated)
        self.mean.add(num_generated)
        self._by_length[length_bucket(num_prompt_tokens)].add(num_generated)
        if not keys:
            return
        self._by_prefix[keys[-1]] = num_generated
        self._by_prefix.move_to_end(keys[-1])
        if len(self._by_prefix) > MAX_PREFIXES:
            self._by_prefix.popitem(last=False)


def length_bucket(num_prompt_tokens: int) -> int:
    """Each bucket spans half an octave of lengths."""
    octave = num_prompt_tokens.bit_length()
    upper = octave > 1 and num_prompt_tokens >> (octave - 2) & 1
    return min(2 * octave + int(upper), NUM_LENGTH_BUCKETS - 1)
