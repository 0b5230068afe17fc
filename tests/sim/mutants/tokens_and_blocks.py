"""Plants bugs in an instance: blocks that are freed, named, kept or read at the wrong time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.kvcache.block_pool import BlockPool
from moonpool.protocol.transfer_events import FetchEnded, ReadEnded, ReceiveEnded, SendEnded
from moonpool.scheduler import kv_cache_manager
from moonpool.scheduler.actions import CancelStream, ExpectStream, GrantRead
from moonpool.scheduler.attempt_lifecycle import AttemptLifecycle
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.loading.layerwise_overlap import LayerwiseOverlap
from moonpool.scheduler.prefix_loader import PrefixLoader
from moonpool.scheduler.request_state import RequestState
from moonpool.scheduler.scheduler import Scheduler
from moonpool.types import BlockId, BlockKey
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method, edited, nothing


@plant(
    "blocks freed under a transfer",
    AttemptLifecycle,
    "_release_if_idle",
    like="vllm#52234",
)
def _free_at_once(original: Method) -> Method:
    def defective(self: AttemptLifecycle, request: RequestState) -> None:
        self._pool.release(request.owner)
        self._pool.release(request.fetch_owner)
        del self._requests[request.attempt_id]

    return defective


@plant("corrupt blocks used", AttemptLifecycle, "on_receive_ended", like="mooncake#3140")
def _ignore_corruption(original: Method) -> Method:
    def defective(self: AttemptLifecycle, event: ReceiveEnded) -> None:
        original(self, msgspec.structs.replace(event, incomplete=()))

    return defective


@plant(
    "a broken stream counts as whole",
    AttemptLifecycle,
    "on_receive_ended",
    like="sglang#30233 vllm#52234",
)
def _ignore_break(original: Method) -> Method:
    def defective(self: AttemptLifecycle, event: ReceiveEnded) -> None:
        if event.error:
            event = msgspec.structs.replace(event, incomplete=(), error="")
        original(self, event)

    return defective


@plant("keys that collide", BlockPool, "cache_block", like="sglang#22716")
def _collide(original: Method) -> Method:
    def defective(self: BlockPool, block_id: BlockId, key: BlockKey, depth: int = 0) -> bool:
        return bool(original(self, block_id, BlockKey(key[:1] * 16), depth))

    return defective


@plant("tenants share", kv_cache_manager, "root_key", like="lmcache#4385")
def _one_root(original: Method) -> Method:
    return lambda fingerprint, tenant, adapter="": BlockKey(b"r" * 16)


@plant(
    "keys differ between processes",
    kv_cache_manager,
    "root_key",
    like="lmcache#1133 lmcache#2511",
)
def _salted_root(original: Method) -> Method:
    calls = iter(range(1 << 60))
    return lambda fingerprint, tenant, adapter="": original(fingerprint, f"{tenant}{next(calls)}")


@plant("blocks that never arrived used", LayerwiseOverlap, "on_step_ended")
def _use_what_was_missed(original: Method) -> Method:
    def defective(self: LayerwiseOverlap, request: RequestState, missed: bool) -> bool:
        original(self, request, missed)
        return True

    return defective


@plant("broken streams not reported", AttemptLifecycle, "on_stop_receiving", like="sglang#10204")
def _never_stop(original: Method) -> Method:
    return nothing(original)


@plant("aborts forgotten", AttemptLifecycle, "on_abort", like="vllm#46283")
def _never_abort(original: Method) -> Method:
    return nothing(original)


@plant("preempted request resumes", Scheduler, "_preempt")
def _keep_computed(original: Method) -> Method:
    def defective(self: Scheduler, request: RequestState) -> None:
        self.running.remove(request)
        self.waiting.append(request)

    return defective


@plant(
    "blocks cached before the step that computes them ends",
    Scheduler,
    "_step_entry",
    like="vllm#45704 vllm#46278",
)
def _cache_early(original: Method) -> Method:
    def defective(self: Scheduler, request: RequestState, num_tokens: int) -> Any:
        entry = original(self, request, num_tokens)
        computed, request.num_computed = request.num_computed, request.num_scheduled
        self._kv_cache.cache_full_blocks(request)
        request.num_computed = computed
        return entry

    return defective


@plant(
    "a found prefix is held only after the allocation",
    KVCacheManager,
    "allocate",
    like="vllm#39702 vllm#43884 vllm#50454 vllm#52170",
)
def _hold_late(original: Method) -> Method:
    def defective(self: KVCacheManager, request: RequestState, num_blocks: int) -> int | None:
        cached = self.cached_prefix(request)
        blocks = self.sequences.allocate(request.owner, num_blocks - len(cached), cached)
        if blocks is None:
            return None
        self.pool.acquire(request.owner, cached)
        request.block_ids = cached + blocks
        request.num_cached_blocks = len(cached)
        request.num_computed = request.num_scheduled = len(cached) * self.layout.block_tokens
        return len(cached)

    return defective


@plant(
    "the first received block goes to the first block of the table",
    AttemptLifecycle,
    "reserve",
    like="vllm#42898",
)
def _shift(original: Method) -> Method:
    def defective(self: AttemptLifecycle, request: RequestState, patient: bool) -> None:
        def shifted(action: Any) -> Any:
            if not isinstance(action, ExpectStream):
                return action
            blocks = request.block_ids[: len(action.block_ids)]
            return ExpectStream(action.stream_id, blocks, action.first_index, action.timeout_s)

        with edited(self._actions_out, shifted):
            original(self, request, patient)

    return defective


@plant(
    "a reader's hold ends when it is granted",
    PrefixLoader,
    "_grant",
    like="mooncake#850",
)
def _no_lease(original: Method) -> Method:
    def defective(self: PrefixLoader, read_id: str, keys: Sequence[BlockKey]) -> None:
        original(self, read_id, keys)
        self._pool.release(BlockOwner("read", read_id))

    return defective


@plant(
    "a read of several blocks holds only the first",
    PrefixLoader,
    "_grant",
    like="mooncake#4239",
)
def _lease_one(original: Method) -> Method:
    def defective(self: PrefixLoader, read_id: str, keys: Sequence[BlockKey]) -> None:
        blocks = self._pool.match(keys)
        self._pool.release(BlockOwner("read", read_id))
        self._pool.acquire(BlockOwner("read", read_id), blocks[:1])
        self._actions_out.perform(GrantRead(read_id, blocks))

    return defective


@plant("the end of a read frees nothing", PrefixLoader, "on_read_ended", like="lmcache#1034")
def _leak_reads(original: Method) -> Method:
    def defective(self: PrefixLoader, event: ReadEnded) -> None:
        self._reads.pop(event.read_id, None)

    return defective


@plant(
    "an abort leaves the fetched prefix held",
    AttemptLifecycle,
    "_release_if_idle",
    like="sglang#37103",
)
def _leak_fetched(original: Method) -> Method:
    def defective(self: AttemptLifecycle, request: RequestState) -> None:
        if request.idle:
            self._pool.release(request.owner)
            del self._requests[request.attempt_id]

    return defective


@plant("a block is freed twice", BlockPool, "_end_holds", like="sglang#13483")
def _free_twice(original: Method) -> Method:
    def defective(self: BlockPool, blocks: Sequence[BlockId]) -> None:
        original(self, blocks)
        self._free.extend(b for b in blocks[:1] if b in self._free)

    return defective


@plant(
    "an evicted block keeps its key",
    BlockPool,
    "_take_keys",
    like="sglang#23020",
)
def _stale_key(original: Method) -> Method:
    def defective(self: BlockPool, block_ids: Sequence[BlockId]) -> list[BlockKey]:
        taken: list[BlockKey] = original(self, block_ids)
        if len(taken) > 1:
            self._block_of[taken[0]] = block_ids[0]
        return taken

    return defective


@plant("a failed fetch counts as whole", PrefixLoader, "on_fetch_ended", like="lmcache#3388")
def _whole_fetch(original: Method) -> Method:
    def defective(self: PrefixLoader, request: RequestState, event: FetchEnded) -> None:
        whole = len(request.fetched_blocks)
        original(self, request, msgspec.structs.replace(event, num_blocks=whole))

    return defective


@plant(
    "a lost decode instance strands the prefill's blocks",
    AttemptLifecycle,
    "on_send_ended",
    like="llm-d#1138",
)
def _strand_sender(original: Method) -> Method:
    def defective(self: AttemptLifecycle, event: SendEnded) -> None:
        if not event.error:
            original(self, event)

    return defective


@plant(
    "the receiver of an aborted request is not told",
    AttemptLifecycle,
    "_close",
    like="vllm#46283",
)
def _no_cancel(original: Method) -> Method:
    def defective(self: AttemptLifecycle, request: RequestState) -> None:
        with edited(self._actions_out, lambda a: None if isinstance(a, CancelStream) else a):
            original(self, request)

    return defective


@plant(
    "the decode computes its prompt again, silently",
    AttemptLifecycle,
    "on_receive_ended",
    like="vllm#26896 llm-d#1189",
)
def _prefill_again(original: Method) -> Method:
    def defective(self: AttemptLifecycle, event: ReceiveEnded) -> None:
        request = self._requests[event.stream_id]  # type: ignore[index]
        if not event.error and not event.incomplete:
            event = msgspec.structs.replace(event, incomplete=(request.num_cached_blocks,))
        original(self, event)

    return defective
