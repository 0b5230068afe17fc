"""How long an answer will be, learned from the answers before it.

Two sources: what the conversation it continues answered last (found under the block keys that the
prompt shares with earlier ones), and the mean of prompts of about this length. Bounded memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from moonpool.conductor.prediction_error import PredictionError
from moonpool.types import BlockKey

FIRST_GUESS_TOKENS = 256.0
MEMORY = 0.02
"""Weight of the newest answer in a running mean, once there are 1 / MEMORY of them."""
MAX_PREFIXES = 65_536
MAX_LOOK_BACK = 64
"""Blocks of the shared prefix, from its end, under which an earlier answer is looked for."""
NUM_BUCKETS = 64
OWN_WEIGHT = 0.5
"""Of a conversation's last answer, against the mean: one answer says little about the next."""


class RunningMean:
    """A plain mean at first; old values fade once there are enough."""

    __slots__ = ("count", "value")

    def __init__(self, first_guess: float) -> None:
        self.value = first_guess
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(1.0 / self.count, MEMORY) * (value - self.value)


class OutputLengths:
    """Learns from each finished answer; predicts in constant time."""

    def __init__(self) -> None:
        self.error = PredictionError()
        self.mean = RunningMean(FIRST_GUESS_TOKENS)
        self._by_length = [RunningMean(FIRST_GUESS_TOKENS) for _ in range(NUM_BUCKETS)]
        self._by_prefix: OrderedDict[BlockKey, int] = OrderedDict()

    def predict(self, num_prompt_tokens: int, keys: Sequence[BlockKey], num_shared: int) -> float:
        """Tokens of the answer; the first `num_shared` of the prompt's `keys` were seen before."""
        similar = self._by_length[_bucket(num_prompt_tokens)]
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
        """An answer is complete; `predicted_tokens` is what was said of it (mutates)."""
        self.error.note(predicted_tokens, num_generated)
        self.mean.add(num_generated)
        self._by_length[_bucket(num_prompt_tokens)].add(num_generated)
        if not keys:
            return
        self._by_prefix[keys[-1]] = num_generated
        self._by_prefix.move_to_end(keys[-1])
        if len(self._by_prefix) > MAX_PREFIXES:
            self._by_prefix.popitem(last=False)


def _bucket(num_prompt_tokens: int) -> int:
    """Half an octave of lengths each."""
    octave = num_prompt_tokens.bit_length()
    upper = octave > 1 and num_prompt_tokens >> (octave - 2) & 1
    return min(2 * octave + int(upper), NUM_BUCKETS - 1)
