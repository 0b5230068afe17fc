"""Plants bugs in the SSD tier and the shared store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from moonpool.kvcache.block_owner import BlockOwner
from moonpool.kvcache.ssd_tier import SsdTier
from moonpool.protocol.transfer_events import LoadEnded, LoadReturned, StoreEnded
from moonpool.scheduler.actions import ForgetStored, StoreBlocks
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.prefix_loader import PrefixLoader
from moonpool.scheduler.ssd_tiering import Demotion, Promotion
from moonpool.types import BlockId, BlockKey
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method, edited, nothing


@plant(
    "a load does not hold its slots",
    SsdTier,
    "hold",
    like="mooncake#4153 mooncake#850",
)
def _no_hold(original: Method) -> Method:
    return nothing(original)


@plant(
    "a failed store leaves its keys visible",
    Demotion,
    "on_ended",
    like="lmcache#4991 mooncake#3465",
)
def _visible(original: Method) -> Method:
    def defective(self: Demotion, event: StoreEnded) -> None:
        if event.error and not event.hung:
            whole = len(self._stores[event.store_id].keys)
            event = msgspec.structs.replace(event, num_blocks=whole)
        original(self, event)

    return defective


@plant(
    "a restarted instance takes its full slots for free ones",
    Instance,
    "_adopt",
    like="mooncake#1336 mooncake#2254",
)
def _adopt_nothing(original: Method) -> Method:
    return nothing(original)


@plant(
    "an evicted slot is not forgotten before it is written again",
    Demotion,
    "_write",
    like="mooncake#1336",
)
def _overwrite(original: Method) -> Method:
    def defective(self: Demotion, *args: Any, **more: Any) -> None:
        with edited(self._actions_out, lambda a: None if isinstance(a, ForgetStored) else a):
            original(self, *args, **more)

    return defective


@plant("a lost disk keeps its keys", SsdTier, "lose", like="llm-d-kv-cache#593")
def _keep_keys(original: Method) -> Method:
    def defective(self: SsdTier, error: str) -> None:
        self.error = error

    return defective


@plant("the end of a write frees nothing", Demotion, "on_ended", like="sglang#28902")
def _leak_write(original: Method) -> Method:
    def defective(self: Demotion, event: StoreEnded) -> None:
        owner = BlockOwner("demote", event.store_id)
        if not event.error:
            self._pool.hand_over(owner, owner._replace(job=f"{owner.job} kept"))
        original(self, event)

    return defective


@plant(
    "a hung disk's blocks are used again before it returns",
    Promotion,
    "free",
    like="vllm#45704",
)
def _free_hung(original: Method) -> Method:
    def defective(self: Promotion, load_id: str) -> None:
        hung = load_id in self._hung
        self._hung.discard(load_id)
        original(self, load_id)
        if hung:
            self._hung.add(load_id)

    return defective


@plant(
    "blocks of a hung load are never freed",
    Promotion,
    "on_returned",
    like="lmcache#3187 sglang#9927",
)
def _leak_hung(original: Method) -> Method:
    def defective(self: Promotion, event: LoadReturned) -> None:
        pass

    return defective


@plant("a corrupt block on the disk is used", Promotion, "on_ended", like="mooncake#3003")
def _use_corrupt(original: Method) -> Method:
    def defective(self: Promotion, event: LoadEnded) -> tuple[BlockKey, ...]:
        if event.corrupt_slices:
            whole = len(self._loads[event.load_id].keys)
            event = msgspec.structs.replace(event, num_blocks=whole)
        result: tuple[BlockKey, ...] = original(self, event)
        return result

    return defective


@plant(
    "a snapshot leaves out what is on the disk",
    KVCacheManager,
    "take_snapshot",
    like="mooncake#2254 mooncake#1871",
)
def _no_demoted(original: Method) -> Method:
    return lambda self: msgspec.structs.replace(original(self), demoted=())


@plant(
    "a request waits for a load that has ended",
    PrefixLoader,
    "on_load_ended",
    like="sglang#9726 lmcache#2951",
)
def _wait_forever(original: Method) -> Method:
    def defective(self: PrefixLoader, event: LoadEnded) -> None:
        if event.error:
            self._waiting_for.pop(event.load_id, None)
        original(self, event)

    return defective


@plant(
    "the writes of one batch go to the disk in another order",
    Demotion,
    "_write",
    like="lmcache#2299",
)
def _mixed_order(original: Method) -> Method:
    def defective(self: Demotion, *args: Any, **more: Any) -> None:
        def mixed(action: Any) -> Any:
            if not isinstance(action, StoreBlocks):
                return action
            blocks = tuple(reversed(action.block_ids))
            return StoreBlocks(action.store_id, action.keys, blocks, action.slots)

        with edited(self._actions_out, mixed):
            original(self, *args, **more)

    return defective


@plant("touching a slot leaves it held", SsdTier, "touch", like="lmcache#1034")
def _touch_holds(original: Method) -> Method:
    def defective(self: SsdTier, slots: Iterable[BlockId]) -> None:
        self.slots.acquire("touch", slots)

    return defective
