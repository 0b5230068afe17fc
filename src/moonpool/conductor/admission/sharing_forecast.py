"""Predicts how many later requests will share the blocks that a request computes.

The first request over a long document computes it for all that follow. Its prefill is expensive,
and rejecting it saves nothing: the next request over the document has to compute it then. So the
price of a prefill is shared out over the requests that are expected to use its blocks.

The forecast counts how often a block that has been asked for `n` times is asked for again. Requests
count whether they are admitted or not, because the forecast is about the demand for a prefix, not
about its cache hits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from moonpool.conductor.forecast.estimators import RunningMean
from moonpool.types import BlockKey

SAMPLE_TOKENS = 512
"""Only one block in this many tokens is counted. The sampled positions are the same in all
prompts."""
HORIZON_S = 300.0
"""Later requests are expected for no longer than this."""
LONG_PAUSE = 4.0
"""A block that is not asked for during this many mean pauses counts as not asked for again, until a
request asks for it."""
MAX_BLOCKS = 65_536
MAX_ASKED = 8
"""Blocks that were asked for this often or more belong to one class."""
PRIOR_BLOCKS = 16.0
"""A class without history starts as if this many of its blocks had not been asked for again."""
MAX_SHARE = 0.98
MAX_HISTORY = 4096.0
"""Counts of a class are halved when they reach this number, so that old demand fades."""


class SharingForecast:
    """Learns from the blocks of every arrival, admitted or not. The number of blocks is bounded by
    `MAX_BLOCKS`."""

    def __init__(self) -> None:
        # How often each block was asked for, and when last; ordered by time. The first entry of a
        # plain dict is found in linear time once others before it were deleted.
        self._asked: OrderedDict[BlockKey, tuple[int, float]] = OrderedDict()
        # (time of the request, block), oldest first, for blocks that have not expired
        self._waiting: deque[tuple[float, BlockKey]] = deque()
        self._again = [0.0] * (MAX_ASKED + 1)
        self._never = [PRIOR_BLOCKS] * (MAX_ASKED + 1)
        self._pause_s = RunningMean(HORIZON_S / LONG_PAUSE)
        self._expired_s = float("-inf")  # time of the request of the last block that expired

    def note_arrival(self, keys: Sequence[BlockKey], block_tokens: int, now: float) -> int:
        """Counts the blocks of a prompt. Returns how many of the leading blocks were asked for
        before, to the precision of a sample: the most blocks that a cache could have held."""
        self._expire(now)
        known = 0
        asked, waiting, unknown = self._asked, self._waiting, (0, now)
        asked_once = (1, now)
        stride = _stride(block_tokens)
        for key in keys[::stride]:
            times, last_s = asked.pop(key, unknown)
            if times:
                known += 1
                if last_s <= self._expired_s:
                    self._never[times] = max(self._never[times] - 1.0, 0.0)
                self._count(self._again, times)
                self._pause_s.add(now - last_s)
            asked[key] = (min(times + 1, MAX_ASKED), now) if times else asked_once
            waiting.append((now, key))
        while len(asked) > MAX_BLOCKS:
            asked.popitem(last=False)
        return min(known * stride, len(keys))

    def own_share(self, keys: Sequence[BlockKey], num_cached: int, block_tokens: int) -> float:
        """The share of the prefill of the blocks from `num_cached` on that is the request's own: 1
        if no later request is expected to use them, 1/3 if two are."""
        stride = _stride(block_tokens)
        first = -(-num_cached // stride) * stride
        computed = keys[first::stride]
        if not computed:
            return 1.0
        share_of = [1.0 / (1.0 + later) for later in self._later()]
        asked, never = self._asked.get, (1, 0.0)
        return sum([share_of[asked(key, never)[0]] for key in computed]) / len(computed)

    def _later(self) -> list[float]:
        """Returns the expected number of later requests for a block, by how often the block has
        been asked for."""
        chances = [
            min(again / (again + never), MAX_SHARE)
            for again, never in zip(self._again, self._never, strict=True)
        ]
        later = [0.0] * (MAX_ASKED + 1)
        later[MAX_ASKED] = chances[MAX_ASKED] / (1.0 - chances[MAX_ASKED])
        for times in range(MAX_ASKED - 1, -1, -1):
            later[times] = chances[times] * (1.0 + later[times + 1])
        return later

    def _expire(self, now: float) -> None:
        """A request that has not come after several usual pauses is no longer expected."""
        before_s = now - min(LONG_PAUSE * self._pause_s.value, HORIZON_S)
        while self._waiting and (self._waiting[0][0] < before_s or len(self._waiting) > MAX_BLOCKS):
            at_s, key = self._waiting.popleft()
            times, last_s = self._asked.get(key, (0, at_s))
            if times and last_s == at_s:  # no later request has asked for the block
                self._count(self._never, times)
            self._expired_s = at_s

    def _count(self, counts: list[float], times: int) -> None:
        counts[times] += 1.0
        if self._again[times] + self._never[times] > MAX_HISTORY:
            self._again[times] /= 2.0
            self._never[times] /= 2.0


def _stride(block_tokens: int) -> int:
    return max(SAMPLE_TOKENS // block_tokens, 1)
