"""Tracks what a vLLM server caches, from its events or by assumption. This module is pure, like
`vllm.instance`.

The server's events tell what it caches, if it publishes any. Without events, the server is assumed
to cache the prompts that it received. The truth of the events is checked: events must soon name
each prompt that was computed here. If the events miss most prompts (none arrive, or they are from
another server or about other blocks), the assumption is used until the events are right again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from moonpool.protocol.block_layout import BlockLayout
from moonpool.types import BlockKey
from moonpool.vllm.block_names import (
    AssumedBlocks,
    ExternalBlocks,
    ExternalBlocksCleared,
    ForeignEvent,
)


class PrefixCounts(NamedTuple):
    """Tokens of all prompts since the server's start: looked up in its prefix cache, found there,
    and fetched by its connector."""

    queries: float
    hits: float
    fetched: float = 0.0


DUE_S = 2.0
"""How long after a prompt's first token its blocks may be missing from the events."""
JUDGED = 8
"""How many of the last prompts the events are judged by."""
LEAST_JUDGED = 3
MAX_DUE = 256


class KnownCache:
    """The block keys that the server holds, and their changes since the last take."""

    def __init__(
        self, layout: BlockLayout, num_blocks: int, publishes_events: bool, caches: bool = True
    ) -> None:
        """`publishes_events`: whether events are requested. `caches` is False for a server without
        a prefix cache."""
        self._reported = (
            ExternalBlocks(layout.fingerprint, layout.block_tokens) if publishes_events else None
        )
        self._assumed = AssumedBlocks(num_blocks if caches else 0)
        self._caches = caches
        self.distrusts_events = self._told_distrust = False
        # maps the last block of a prompt to the time at which it counts as missing
        self._due: dict[BlockKey, float] = {}
        self._were_named: deque[bool] = deque(maxlen=JUDGED)
        self._has_named = False  # whether the events have named a prompt that was computed here
        self._told = self._used  # the part of which all changes were reported

    def __len__(self) -> int:
        return len(self._used)

    @property
    def source(self) -> str:
        """Like `CacheView.source`."""
        if self.distrusts_events:
            return "distrusted"
        return "assumed" if self._used is self._assumed else "events"

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return self._used.keys

    @property
    def other_block_tokens(self) -> int:
        """The size of blocks that the last event of another block size has; 0 means that there was
        none."""
        return 0 if self._reported is None else self._reported.other_block_tokens

    def holds(self, key: BlockKey) -> bool:
        return self._used.holds(key)

    def hear(self, events: Sequence[ForeignEvent], lost: bool, now: float) -> None:
        """`lost`: whether earlier events are void."""
        if self._reported is None:
            return
        if lost:
            self._reported.hear(ExternalBlocksCleared())
            self._due.clear()
        for event in events:
            self._reported.hear(event)
        self._judge(now)

    def note_computed(self, keys: Sequence[BlockKey], now: float, is_named: bool) -> None:
        """Notes that a prompt with these full blocks was computed or found. `is_named`: whether
        events will name the blocks."""
        self._assumed.use(keys)
        if is_named and keys and self._reported is not None and self._caches:
            if len(self._due) < MAX_DUE:
                self._due.setdefault(keys[-1], now + DUE_S)
            self._judge(now)

    def note_ended(self, keys: Sequence[BlockKey]) -> None:
        """Notes that an answer has ended; the blocks are those of prompt and output."""
        self._assumed.use(keys)

    def judge(self, now: float) -> bool:
        """Whether the events have become trusted or distrusted since the last call."""
        self._judge(now)
        before, self._told_distrust = self._told_distrust, self.distrusts_events
        return self.distrusts_events is not before

    def take_changes(self) -> tuple[tuple[BlockKey, ...], tuple[BlockKey, ...]]:
        """Returns the keys gained and the keys lost since the last call."""
        used, told = self._used, self._told
        gained, lost = told.take_changes()
        if used is told:
            return gained, lost
        self._told = used
        used.take_changes()
        known, present = set(told.keys).difference(gained).union(lost), set(used.keys)
        return (
            tuple(key for key in used.keys if key not in known),
            tuple(key for key in known if key not in present),
        )

    @property
    def _used(self) -> ExternalBlocks | AssumedBlocks:
        if self._reported is None or self.distrusts_events:
            return self._assumed
        # the events may never come, so the assumption counts until they do
        if not self._has_named and not len(self._reported):
            return self._assumed
        return self._reported

    def _judge(self, now: float) -> None:
        """Settles the prompts that were named or are overdue."""
        if self._reported is None:
            return
        for key, until_s in list(self._due.items()):
            is_there = self._reported.holds(key)
            if is_there or now >= until_s:
                del self._due[key]
                self._were_named.append(is_there)
                self._has_named = self._has_named or is_there
        if len(self._were_named) >= LEAST_JUDGED:
            self.distrusts_events = 2 * sum(self._were_named) < len(self._were_named)
