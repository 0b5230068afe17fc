"""Lets a prefill compute while part of its prefix is still arriving (Mooncake section 5.2).

Before the attention of a layer, the engine waits until that layer of the prefix has arrived, while
later layers are still in transfer. This module decides which requests may compute early. If some of
the prefix does not arrive, the step's result is void and the request continues from what is valid.
The scheduler, not this module, holds the requests.

A request computes early only if the engine will hardly ever wait: the rest of the transfer must
take no longer than the request's first step. Progress comes in reports, so the decision is made at
the report nearest to that moment. No request computes early beside decodes, because a source that
hangs would delay all of their answers.
"""

from __future__ import annotations

from moonpool.cost.model import Chunk, CostModel
from moonpool.scheduler.actions import ActionBuffer, Arriving, SendBlocks
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.request_state import RequestState, TransferEta
from moonpool.scheduler.ssd_tiering import Promotion
from moonpool.types import BlockId

PATIENCE = 2.0
"""A step waits for its prefix for up to this multiple of the expected time, plus GRACE_S."""
GRACE_S = 0.1


class LayerwiseOverlap:
    """The rules for requests that compute while their prefix arrives. The scheduler starts requests
    early (`try_allocate`, `arriving`); the instance reports the ends of steps and transfers."""

    def __init__(
        self,
        config: InstanceConfig,
        kv_cache: KVCacheManager,
        promotion: Promotion,
        actions_out: ActionBuffer,
        cost: CostModel,
    ) -> None:
        self._out_of_blocks: list[RequestState] = []
        self._config = config
        self._kv_cache = kv_cache
        self._pool = kv_cache.pool
        self.promotion = promotion
        self._actions_out = actions_out
        self._cost = cost

    # Start

    def try_allocate(self, request: RequestState) -> bool:
        """Holds all blocks of a waiting request if it may compute before its prefix is complete."""
        if not self.enabled or request.missed or request.looking_up:
            return False
        etas = self._etas(request)
        if not etas:
            return False
        run = self._usable_run(request)
        if not run:  # the first block is neither present nor arriving
            return False
        if max(eta.due_s for eta in etas) > self._first_step_s(request, len(run)):
            return False
        return self._allocate(request, run)

    @property
    def enabled(self) -> bool:
        """Whether the engine can wait for single layers; loads then arrive layer by layer."""
        return self._config.layer_wise_load

    def arriving(self, request: RequestState) -> Arriving | None:
        """Returns the transfers that a step of the request waits for, or None if there are none."""
        if not request.arriving:
            return None
        left_s = max((eta.left_s for eta in self._etas(request)), default=0.0)
        timeout_s = PATIENCE * left_s + GRACE_S
        fetch_id = request.attempt_id if request.fetching else ""
        return Arriving(fetch_id, timeout_s, tuple(sorted(request.load_ids)))

    def _etas(self, request: RequestState) -> list[TransferEta]:
        """Estimates for all transfers that the request waits for. Returns none if a transfer has no
        estimate: its source has not answered, has nothing, or does not send layer by layer."""
        etas = []
        if request.fetching:
            num_granted = request.num_granted_blocks
            if num_granted is None or not (num_granted or request.load_ids):
                return []
            etas.append(request.fetch_eta)
        for load_id in request.load_ids:
            eta = self.promotion.eta(load_id)
            if eta is None:
                return []
            etas.append(eta)
        return etas

    def _usable_run(self, request: RequestState) -> list[BlockId]:
        """Returns the longest run of the prefix's blocks of which each is present or arriving."""
        run: list[BlockId] = []
        granted = request.num_granted_blocks or 0
        for index, key in enumerate(request.keys[: self._kv_cache.max_cached_blocks(request)]):
            block_id = self._pool.find(key)
            if block_id is None:
                offset = index - request.fetch_first_index
                block_id = request.fetched_blocks[offset] if 0 <= offset < granted else None
            if block_id is None:
                block_id = self.promotion.target_of(key, request.load_ids)
            if block_id is None:
                break
            run.append(block_id)
        return run

    def _first_step_s(self, request: RequestState, num_blocks: int) -> float:
        """Returns the seconds of the request's first step after a prefix of `num_blocks`."""
        start = num_blocks * self._kv_cache.layout.block_tokens
        num_tokens = min(len(request.tokens) - start, self._config.chunk_tokens)
        last = start + num_tokens == len(request.tokens)
        chunk = Chunk(num_tokens=num_tokens, start=start, cached_tokens=start, last=last)
        return self._cost.step_s((chunk,), 0, 0)

    def _allocate(self, request: RequestState, run: list[BlockId]) -> bool:
        pool, layout, owner = self._pool, self._kv_cache.layout, request.owner
        cached = [pool.key_of(block_id) is not None for block_id in run]
        pool.acquire(owner, [b for b, hashed in zip(run, cached, strict=True) if hashed])
        pool.share(owner, [b for b, hashed in zip(run, cached, strict=True) if not hashed])
        blocks = pool.allocate(owner, layout.blocks_for(len(request.tokens)) - len(run))
        if blocks is None:
            pool.release(owner)
            return False
        request.block_ids = run + blocks
        request.num_overlap_blocks = len(run)
        request.num_cached_blocks = cached.index(False) if False in cached else len(run)
        request.num_computed = request.num_scheduled = len(run) * layout.block_tokens
        self._actions_out.count("early_prefills")
        return True

    # End

    def on_transfer_ended(self, request: RequestState) -> None:
        """Handles the end, by success or failure, of a transfer that the request waited for."""
        if request.arriving:
            return
        self._pool.release(request.fetch_owner)
        num_valid = self._num_valid(request)
        sent, request.num_cached_blocks = request.num_cached_blocks, num_valid
        request.report_started(self._actions_out, num_valid * self._kv_cache.layout.block_tokens)
        if request.streaming and sent < num_valid:
            blocks = tuple((index, request.block_ids[index]) for index in range(sent, num_valid))
            self._actions_out.perform(SendBlocks(request.attempt_id, blocks))
        if not request.steps_pending:
            self._settle(request, num_valid)

    def on_step_ended(self, request: RequestState, missed: bool) -> bool:
        """Returns whether what a step computed of the request is valid."""
        if not request.overlapping:
            return True
        if not missed and not request.arriving:
            num_valid = self._num_valid(request)
            if num_valid == request.num_overlap_blocks:
                request.num_overlap_blocks = 0
                return True
        self._actions_out.count("missed_steps")
        request.missed = True
        request.num_scheduled = request.num_computed
        if not request.arriving:
            self._settle(request, self._num_valid(request))
        return False

    def take_out_of_blocks(self) -> list[RequestState]:
        """Returns the requests that cannot get blocks to compute the invalid part again. The caller
        fails them."""
        requests, self._out_of_blocks = self._out_of_blocks, []
        return requests

    def _num_valid(self, request: RequestState) -> int:
        """Returns how many leading blocks of the request's overlap have the expected content."""
        has_content = self._pool.has_content
        for index in range(request.num_overlap_blocks):
            if not has_content(request.block_ids[index], request.keys[index]):
                return index
        return request.num_overlap_blocks

    def _settle(self, request: RequestState, num_valid: int) -> None:
        """Called when all transfers and steps of the request have ended. The request continues
        after its valid blocks, with new blocks in place of the invalid ones."""
        invalid = request.block_ids[num_valid : request.num_overlap_blocks]
        if invalid:
            self._pool.release_some(request.owner, invalid)
            blocks = self._pool.allocate(request.owner, len(invalid))
            if blocks is None:
                request.block_ids = request.block_ids[:num_valid]
                self._out_of_blocks.append(request)
                blocks = []
            else:
                request.block_ids[num_valid : request.num_overlap_blocks] = blocks
        request.num_overlap_blocks = 0
        num_tokens = num_valid * self._kv_cache.layout.block_tokens
        request.num_computed = request.num_scheduled = num_tokens
        request.num_streamed_blocks = min(request.num_streamed_blocks, num_valid)
