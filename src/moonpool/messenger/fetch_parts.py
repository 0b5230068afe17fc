"""A fetch over several connections at once: each brings some of the blocks, in all layers.

Between machines one TCP connection gets what a core can take, or what the network grants a flow
(clouds: 5 or 10 Gbit/s), not what the line gives; and on a loopback one waits where two do not.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

from moonpool.kvcache.transfers import FetchEnded
from moonpool.messenger.fetch import Fetch, together
from moonpool.messenger.landing import Landing
from moonpool.messenger.progress import Progress
from moonpool.types import BlockKey, InstanceId

PART_BYTES = 4 << 20
"""Less than this is not worth a connection of its own."""


def split(num_blocks: int, block_bytes: int, most_parts: int) -> list[range]:
    """Which blocks each of at most `most_parts` connections brings: as many, but for one."""
    num_parts = max(1, min(most_parts, num_blocks * block_bytes // PART_BYTES, num_blocks))
    ends = [num_blocks * part // num_parts for part in range(num_parts + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


class FetchParts:
    """`rows` are split's. `end` is called by the thread of each part."""

    def __init__(
        self,
        fetch_id: str,
        source: InstanceId,
        keys: Sequence[BlockKey],
        rows: Sequence[range],
        make_landing: Callable[[range], Landing],
        deadline_s: float,
        progress: Progress | None,
    ) -> None:
        self.parts = tuple(
            Fetch(
                fetch_id,
                source,
                tuple(keys[part.start : part.stop]),
                make_landing(part),
                deadline_s,
                progress,
                number,
            )
            for number, part in enumerate(rows)
        )
        self._rows = rows
        self._progress = progress
        self._lock = threading.Lock()  # guards what follows
        self._ended: dict[int, FetchEnded] = {}

    def break_off(self, reason: str) -> None:
        for part in self.parts:
            part.break_off(reason)

    def end(self, part: int, ended: FetchEnded) -> FetchEnded | None:
        """How all of it ended, when the last part has."""
        if ended.error and self._progress is not None:
            self._progress.doubt()  # nobody need wait for the other parts to know it
        with self._lock:
            self._ended[part] = ended
            if len(self._ended) < len(self.parts):
                return None
        in_order = [self._ended[part] for part in range(len(self.parts))]
        return together(in_order, self._num_blocks(in_order))

    def _num_blocks(self, in_order: Sequence[FetchEnded]) -> int:
        """Up to the first that did not come."""
        total = 0
        for rows, ended in zip(self._rows, in_order, strict=True):
            total += ended.num_blocks
            if ended.num_blocks < len(rows):
                break
        return total
