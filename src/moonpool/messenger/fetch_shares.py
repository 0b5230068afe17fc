"""A fetch whose source keeps its blocks in several places: a fetch of each one's share, under way
together. It ends when all of them have, with the blocks of which every byte has arrived.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from moonpool.kvcache.transfers import FetchEnded
from moonpool.messenger.fetch import Fetch, together
from moonpool.messenger.landing import Landing


class FetchShares:
    """Made by the thread of the fetch that was sent on; `end` is called by those of the shares."""

    def __init__(self, whole: Fetch, num_shares: int, make_landing: Callable[[], Landing]) -> None:
        self.shares = tuple(whole.share(make_landing()) for _ in range(num_shares))
        self._whole = whole
        self._lock = threading.Lock()  # guards what follows
        self._ended: list[FetchEnded] = []

    def end(self, ended: FetchEnded) -> FetchEnded | None:
        """How all of it ended, when the last share has."""
        with self._lock:
            self._ended.append(ended)
            if len(self._ended) < len(self.shares):
                return None
        num_blocks = num_whole_blocks([share.landing for share in self.shares])
        return together(self._ended, num_blocks)


def num_whole_blocks(landings: Sequence[Landing]) -> int:
    """Blocks, up to the first that is not whole, of which the landings together have all bytes."""
    for row in range(landings[0].num_indices):
        covered = 0
        for start, end in sorted(r for landing in landings for r in landing.ranges_of(row)):
            if start <= covered:
                covered = max(covered, end)
        if covered < landings[0].slice_bytes:
            return row
    return landings[0].num_indices
