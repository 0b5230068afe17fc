"""Loads blocks from the SSD before a request needs them, as the Conductor commands.

Requests have priority. A prefetch reads `BATCH_BLOCKS` at a time, so a load that a request starts
shares the disk with one batch at most. A batch begins only while no other load runs, and fills free
blocks only: `Demotion` makes room for the next batch. Prefetched blocks that no request has used
yet are at most 1 / `MAX_SHARE` of the pool's blocks.

A prefetch counts as a use of its blocks, so they are as safe from eviction as those of a request
that has just ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from moonpool.cost.model import CostModel
from moonpool.kvcache.block_owner import BlockOwner
from moonpool.protocol.messages import PrefetchBlocks
from moonpool.scheduler.actions import ActionBuffer
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.ssd_tiering import Promotion
from moonpool.types import BlockKey

BATCH_BLOCKS = 16
MAX_SHARE = 4
MAX_COMMANDS = 64
"""Most commands that wait for their turn; the oldest are dropped."""
_TOUCH = BlockOwner("touch")


class Prefetch:
    """Runs the prefetches of one instance. Counters: `prefetched_blocks`; `used_prefetched_blocks`
    (a request needed them); `wasted_prefetched_blocks` (they left DRAM before)."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        promotion: Promotion,
        actions_out: ActionBuffer,
        cost: CostModel,
    ) -> None:
        self._kv_cache = kv_cache
        self._cost = cost
        self._pool = kv_cache.pool
        self._promotion = promotion
        self._actions_out = actions_out
        self._commands: deque[Sequence[BlockKey]] = deque(maxlen=MAX_COMMANDS)
        self._load_id = ""  # id of the load of the batch in progress
        self._batch: Sequence[BlockKey] = ()
        self._unused: dict[BlockKey, None] = {}

    def on_command(self, command: PrefetchBlocks) -> None:
        """Queues a prefetch."""
        if self._kv_cache.num_slots:
            self._commands.append(command.keys)

    def run(self) -> None:
        """Starts the next batch, if nothing prevents it. The instance calls this after all changes
        of an event."""
        while self._commands and not self._promotion.num_loads and self._kv_cache.num_slots:
            keys = self._commands[0]
            num_local, absent = self._promotion.reach(keys)
            if not absent:
                self._commands.popleft()
                self._refresh(keys[:num_local])
                continue
            if not self._pays(num_local, len(absent)):
                self._commands.popleft()
                continue
            batch = absent[: min(BATCH_BLOCKS, self._pool.num_free)]
            if not batch:
                return
            if len(self._unused) + len(batch) > self._pool.num_blocks // MAX_SHARE:
                self._commands.popleft()
                continue
            load_ids = self._promotion.load(batch)
            if load_ids:
                (self._load_id,) = load_ids
                self._batch = batch
            return

    def on_load_ended(self, load_id: str) -> None:
        """Notes which blocks of a batch arrived. A batch that failed ends its prefetch."""
        if load_id != self._load_id:
            return
        self._load_id = ""
        arrived = [key for key in self._batch if self._pool.find(key) is not None]
        self._unused.update(dict.fromkeys(arrived))
        self._actions_out.count("prefetched_blocks", len(arrived))
        if len(arrived) < len(self._batch) and self._commands:
            self._commands.popleft()

    def note_used(self, keys: Iterable[BlockKey]) -> None:
        """Notes that a request needs these blocks."""
        if self._unused:
            self._actions_out.count("used_prefetched_blocks", self._take(keys))

    def note_gone(self, keys: Iterable[BlockKey]) -> None:
        """Notes that these blocks left DRAM."""
        if self._unused:
            self._actions_out.count("wasted_prefetched_blocks", self._take(keys))

    def _take(self, keys: Iterable[BlockKey]) -> int:
        before = len(self._unused)
        for key in keys:
            self._unused.pop(key, None)
        return before - len(self._unused)

    def _pays(self, num_blocks: int, num_absent: int) -> bool:
        """Whether the disk is faster than computing; if it is not, a request would not read these
        blocks."""
        layout = self._kv_cache.layout
        num_tokens = num_blocks * layout.block_tokens
        present_tokens = num_tokens - num_absent * layout.block_tokens
        load_s = self._cost.load_s(num_absent * layout.block_bytes, 1)
        return load_s < self._cost.prefill_s(num_tokens, present_tokens)

    def _refresh(self, keys: Sequence[BlockKey]) -> None:
        """Counts a use of the whole prefix, because its later blocks are worthless without the
        first ones."""
        self._pool.acquire(_TOUCH, self._pool.find_all(keys))
        self._pool.release(_TOUCH)

    def validate(self) -> None:
        """Asserts that the unused prefetched blocks are in DRAM, and that their number is within
        the bound."""
        assert len(self._unused) <= self._pool.num_blocks // MAX_SHARE
        assert all(self._pool.find(key) is not None for key in self._unused)
