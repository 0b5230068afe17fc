"""Mean lengths of answers by kind of prompt, from the answers that have ended and those under way.

The answers that have ended are the short ones, especially while a kind is new: where answers take a
minute, no usual answer has ended after half a minute. An answer under way is at least as long as it
is now. So the means are computed by Kaplan and Meier's method, over bins of lengths. How far
answers exceed all known lengths can only be guessed. A lower and an upper guess show how much
depends on this.

A kind of prompt is defined by its length, in octaves, and by whether a part of it is cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from moonpool.conductor.forecast.estimators import FIRST_GUESS_TOKENS

NUM_OCTAVES = 24
NUM_KINDS = 2 * NUM_OCTAVES
BINS_PER_OCTAVE = 4
NUM_BINS = BINS_PER_OCTAVE * 20
MEMORY_ANSWERS = 256.0
"""When a kind has twice this weight of ended answers, all its weights are halved."""
LEAST_SEEN = 8.0
"""With fewer answers of a kind, ended or under way, the answers of all kinds are used instead."""
RELEARN_EVERY = 16
LEFT, LEFT_AT_MOST = 2.0, 4.0
"""An answer that exceeds all known lengths ends at this multiple of them, as a guess and at
most."""


class LengthRange(NamedTuple):
    """Mean tokens of the answers of a kind: the lower guess, the usual one and the upper one."""

    least: float
    mean: float
    most: float


UNKNOWN = LengthRange(0.5 * FIRST_GUESS_TOKENS, FIRST_GUESS_TOKENS, 2.0 * FIRST_GUESS_TOKENS)
"""The guess that is used until answers have ended. If all requests are refused, no answer ever
ends, and the guess must not prevent all advice."""


def kind_of(num_prompt_tokens: int, cached_tokens: int) -> int:
    octave = min(num_prompt_tokens.bit_length(), NUM_OCTAVES - 1)
    return octave + (NUM_OCTAVES if cached_tokens > 0 else 0)


class RunningLengths:
    """Learns from each answer that ends, and from the lengths so far of the answers under way."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Lengths] = {}
        self._all = _Lengths()

    def note_answer(self, kind: int, num_tokens: int) -> None:
        for lengths in (self._kinds.setdefault(kind, _Lengths()), self._all):
            lengths.note(num_tokens)

    def look(self, running: Iterable[tuple[int, int]]) -> None:
        """Takes the kind and the tokens so far of all answers under way."""
        by_kind: dict[int, list[int]] = {}
        for kind, num_tokens in running:
            by_kind.setdefault(kind, [0] * NUM_BINS)[_bin(num_tokens)] += 1
        none = [0] * NUM_BINS
        for kind in by_kind.keys() - self._kinds.keys():
            self._kinds[kind] = _Lengths()
        for kind, lengths in self._kinds.items():
            lengths.look(by_kind.get(kind, none))
        self._all.look([sum(counts) for counts in zip(none, *by_kind.values(), strict=True)])

    def of(self, kind: int) -> LengthRange:
        lengths = self._kinds.get(kind)
        if lengths is None or lengths.seen < LEAST_SEEN:
            lengths = self._all
        return lengths.range


class _Lengths:
    """Answers of one kind, by bins of their lengths."""

    def __init__(self) -> None:
        self._ended = [0.0] * NUM_BINS  # weights of ended answers, by bin
        self._tokens = [0.0] * NUM_BINS  # tokens of the ended answers, with these weights
        self._running = [0] * NUM_BINS  # number of answers under way, by bin
        self._faded = [0.0] * NUM_BINS  # weights of running answers that have reached each bin
        self._total = 0.0
        self._num_new = 0  # answers that ended since the range was computed
        self._range = UNKNOWN

    @property
    def seen(self) -> float:
        return self._total + sum(self._running)

    @property
    def range(self) -> LengthRange:
        if self._num_new >= min(RELEARN_EVERY, self._total / 4.0):
            self._range, self._num_new = self._estimate(), 0
        return self._range

    def note(self, num_tokens: int) -> None:
        place = _bin(num_tokens)
        self._ended[place] += 1.0
        self._tokens[place] += num_tokens
        self._total += 1.0
        self._num_new += 1

    def look(self, running: list[int]) -> None:
        self._running, self._num_new = running, RELEARN_EVERY
        if self._total < 2.0 * MEMORY_ANSWERS:
            return
        reached = 0
        for place in range(NUM_BINS - 1, -1, -1):
            reached += running[place]
            self._faded[place] = 0.5 * (self._faded[place] + reached)
            self._ended[place] *= 0.5
            self._tokens[place] *= 0.5
        self._total *= 0.5

    def _estimate(self) -> LengthRange:
        at_risk = self._at_risk()
        lasting, mean, longest = 1.0, 0.0, 0.0
        for place, ended in enumerate(self._ended):
            if self._running[place]:
                longest = _middle(place)
            if ended > 0.0:
                length = self._tokens[place] / ended
                ending = lasting * min(ended / at_risk[place], 1.0)
                mean += ending * length
                lasting -= ending
                longest = max(longest, length)
        if not longest:
            return UNKNOWN
        left = max(lasting, 0.0) * longest
        return LengthRange(mean + left, mean + LEFT * left, mean + LEFT_AT_MOST * left)

    def _at_risk(self) -> list[float]:
        """Returns how many answers have reached each bin of lengths. An answer within the bin
        counts half."""
        at_risk = [0.0] * NUM_BINS
        ended, reached = 0.0, 0.0
        for place in range(NUM_BINS - 1, -1, -1):
            ended += self._ended[place]
            running = self._running[place]
            reached += running
            at_risk[place] = max(ended + reached - 0.5 * running - self._faded[place], ended)
        return at_risk


def _bin(num_tokens: int) -> int:
    """Returns the bin of a length: there are four bins from each power of two to the next."""
    octave = max(num_tokens, 1).bit_length() - 1
    quarter = (max(num_tokens, 1) << 2 >> octave) & 3
    return min(BINS_PER_OCTAVE * octave + quarter, NUM_BINS - 1)


def _middle(place: int) -> float:
    octave, quarter = divmod(place, BINS_PER_OCTAVE)
    return float(2**octave) * (1.0 + (quarter + 0.5) / BINS_PER_OCTAVE)
