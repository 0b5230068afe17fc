"""Lets a prefill compute while some of its prefix is still on its way (Mooncake 5.2): before
attention of a layer the engine waits for that layer of what it reads, while the next ones arrive.

Decides which work may, and what becomes of it when something does not come: then its step was for
nothing, and it is computed again from what is sound. Owns no work; the batch holds them.

A work begins early only when what it waits for should be there by the time it is needed, so that
the engine hardly ever waits: as soon as the rest of the transfer takes no longer than its first
step, or at the word of it that is nearest to that.
Beside decodes none does: a source that hangs would make all of their answers wait.
"""

from __future__ import annotations

from moonpool.config import InstanceConfig
from moonpool.cost.model import Chunk, CostModel
from moonpool.types import BlockId
from moonpool.workers.actions import Arriving, SendBlocks
from moonpool.workers.active import ActiveWork
from moonpool.workers.holdings import Holdings
from moonpool.workers.outbox import Outbox
from moonpool.workers.promotion import Promotion
from moonpool.workers.rest import Rest

PATIENCE = 2.0
"""A step waits so many times what the rest of its prefix should take, and GRACE_S more."""
GRACE_S = 0.1


class EarlyStart:
    """Asked by the batch, told by arrivals and by the instance."""

    def __init__(
        self,
        config: InstanceConfig,
        holdings: Holdings,
        promotion: Promotion,
        outbox: Outbox,
        cost: CostModel,
    ) -> None:
        self._stranded: list[ActiveWork] = []
        self._config = config
        self._holdings = holdings
        self._pool = holdings.pool
        self.promotion = promotion
        self._outbox = outbox
        self._cost = cost

    # Beginning

    def try_hold(self, active: ActiveWork) -> bool:
        """Holds all blocks a waiting work needs if it may compute before its prefix is there."""
        if not self.wanted or active.missed or active.asking:
            return False
        rests = self._rests(active)
        if not rests:
            return False
        run = self._run(active)
        if not run:  # what comes begins behind a gap: there is nothing to begin with
            return False
        if max(rest.due_s for rest in rests) > self._first_step_s(active, len(run)):
            return False
        return self._hold(active, run)

    @property
    def wanted(self) -> bool:
        """Whether the engine can wait for a layer: then what is loaded comes layer by layer."""
        return self._config.layer_wise_load

    def arriving(self, active: ActiveWork) -> Arriving | None:
        """What a step of the work has to wait for, layer by layer."""
        if not active.arriving:
            return None
        left_s = max((rest.left_s for rest in self._rests(active)), default=0.0)
        timeout_s = PATIENCE * left_s + GRACE_S
        fetch_id = active.work_id if active.writing else ""
        return Arriving(fetch_id, timeout_s, tuple(sorted(active.loads)))

    def _rests(self, active: ActiveWork) -> list[Rest]:
        """Of all that the work waits for. None at all: who brings it has not answered, or brings
        nothing, or not by layer."""
        rests = []
        if active.writing:
            if active.granted_blocks is None or not (active.granted_blocks or active.loads):
                return []
            rests.append(active.fetch_rest)
        for load_id in active.loads:
            rest = self.promotion.rest(load_id)
            if rest is None:
                return []
            rests.append(rest)
        return rests

    def _run(self, active: ActiveWork) -> list[BlockId]:
        """Blocks of the work's prefix that are here or surely on their way, up to the first that is
        neither."""
        run: list[BlockId] = []
        granted = active.granted_blocks or 0
        for index, key in enumerate(active.keys[: self._holdings.max_cached_blocks(active)]):
            block_id = self._pool.find(key)
            if block_id is None:
                offset = index - active.fetch_first_index
                block_id = active.fetched_blocks[offset] if 0 <= offset < granted else None
            if block_id is None:
                block_id = self.promotion.arriving(key, active.loads)
            if block_id is None:
                break
            run.append(block_id)
        return run

    def _first_step_s(self, active: ActiveWork, num_blocks: int) -> float:
        """With so many blocks of its prefix there."""
        start = num_blocks * self._holdings.layout.block_tokens
        num_tokens = min(len(active.tokens) - start, self._config.chunk_tokens)
        last = start + num_tokens == len(active.tokens)
        chunk = Chunk(num_tokens=num_tokens, start=start, cached_tokens=start, last=last)
        return self._cost.step_s((chunk,), 0, 0)

    def _hold(self, active: ActiveWork, run: list[BlockId]) -> bool:
        pool, layout, owner = self._pool, self._holdings.layout, active.owner
        here = [pool.key_of(block_id) is not None for block_id in run]
        pool.acquire(owner, [b for b, named in zip(run, here, strict=True) if named])
        pool.share(owner, [b for b, named in zip(run, here, strict=True) if not named])
        blocks = pool.allocate(owner, layout.blocks_for(len(active.tokens)) - len(run))
        if blocks is None:
            pool.release(owner)
            return False
        active.block_ids = run + blocks
        active.early_blocks = len(run)
        active.num_sealed = here.index(False) if False in here else len(run)
        active.num_computed = active.num_scheduled = len(run) * layout.block_tokens
        self._outbox.count("early_prefills")
        return True

    # What becomes of it

    def on_arrival(self, active: ActiveWork) -> None:
        """An operation that an early work waited for has ended, one way or another."""
        if active.arriving:
            return
        self._pool.release(active.fetch_owner)
        sound = self._num_sound(active)
        sent, active.num_sealed = active.num_sealed, sound
        active.tell_started(self._outbox, sound * self._holdings.layout.block_tokens)
        if active.streaming and sent < sound:
            blocks = tuple((index, active.block_ids[index]) for index in range(sent, sound))
            self._outbox.do(SendBlocks(active.work_id, blocks))
        if not active.steps_pending:
            self._settle(active, sound)

    def on_step_ended(self, active: ActiveWork, missed: bool) -> bool:
        """Whether what a step computed of the work is right."""
        if not active.early:
            return True
        if not missed and not active.arriving:
            sound = self._num_sound(active)
            if sound == active.early_blocks:
                active.early_blocks = 0
                return True
        self._outbox.count("missed_steps")
        active.missed = True
        active.num_scheduled = active.num_computed
        if not active.arriving:
            self._settle(active, self._num_sound(active))
        return False

    def take_stranded(self) -> list[ActiveWork]:
        """Works that lack the blocks to be computed again: the caller ends them."""
        stranded, self._stranded = self._stranded, []
        return stranded

    def _num_sound(self, active: ActiveWork) -> int:
        """Blocks of the run with which the work began that are what they should be."""
        has_content = self._pool.has_content
        for index in range(active.early_blocks):
            if not has_content(active.block_ids[index], active.keys[index]):
                return index
        return active.early_blocks

    def _settle(self, active: ActiveWork, sound: int) -> None:
        """All has ended, nothing of it is being computed: it goes on from what is sound, in blocks
        of its own."""
        lost = active.block_ids[sound : active.early_blocks]
        if lost:
            self._pool.release_some(active.owner, lost)
            blocks = self._pool.allocate(active.owner, len(lost))
            if blocks is None:
                active.block_ids = active.block_ids[:sound]
                self._stranded.append(active)
                blocks = []
            else:
                active.block_ids[sound : active.early_blocks] = blocks
        active.early_blocks = 0
        active.num_computed = active.num_scheduled = sound * self._holdings.layout.block_tokens
        active.num_streamed_blocks = min(active.num_streamed_blocks, sound)
