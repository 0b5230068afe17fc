"""Plants bugs in the code that moves and stores real bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.storage import store_folder
from moonpool_engine.storage.tier_store import ArenaBlocks
from moonpool_engine.transfer.reshard import ShardView
from moonpool_engine.transfer.slice_receiver import VERIFIED, SliceReceiver
from tests.sim.mutants.mutant import plant
from tests.sim.mutants.patches import Method, nothing


@plant(
    "an arriving slice is not verified",
    SliceReceiver,
    "verify",
    like="mooncake#3140 mooncake#3003",
    check="wire",
)
def _unverified(original: Method) -> Method:
    def defective(self: SliceReceiver, offers: Sequence[Any], *rest: Any) -> int:
        for index, layer, _, _ in offers:
            self.states[(index - self.first_index) * self.num_layers + layer] = VERIFIED
        return 0

    return defective


@plant(
    "two layers of a block share a place",
    SliceReceiver,
    "offsets",
    like="vllm#57661",
    check="wire",
)
def _shared_place(original: Method) -> Method:
    def defective(self: SliceReceiver, offers: Sequence[Any]) -> list[int]:
        return list(original(self, [(i, layer // 2, *rest) for i, layer, *rest in offers]))

    return defective


@plant(
    "blocks of another model pass as ours",
    BlockLayout,
    "fingerprint",
    like="sglang#17212 dynamo#14416",
    check="wire",
)
def _one_layout(original: Any) -> Any:
    return property(lambda self: bytes(32))


@plant(
    "a shard takes the wrong part of a slice",
    ShardView,
    "of",
    like="sglang#15674 llm-d#2433",
    check="wire",
)
def _wrong_part(original: Method) -> Method:
    def defective(self: ShardView, whole: memoryview) -> list[memoryview]:
        return [whole[: end - start] for start, end in self.ranges]

    return defective


@plant(
    "a damaged slot on the disk is not noticed",
    ArenaBlocks,
    "count_wrong",
    like="mooncake#4153",
    check="disk",
)
def _undamaged(original: Method) -> Method:
    def defective(self: Any, block_id: Any, key: Any, header: Any, *rest: Any) -> int:
        return int(header is None or header.key != key)

    return defective


@plant(
    "a slot is trusted to hold what the index says",
    ArenaBlocks,
    "count_wrong",
    like="mooncake#3465 mooncake#1336",
    check="disk",
)
def _trusted(original: Method) -> Method:
    def defective(self: Any, block_id: Any, key: Any, header: Any, *rest: Any) -> int:
        return 0 if header is None else int(original(self, block_id, key, header, *rest))

    return defective


@plant(
    "the folder of another model is used",
    store_folder,
    "check_geometry",
    like="lmcache#4463 lmcache#4247",
    check="disk",
)
def _any_folder(original: Method) -> Method:
    return nothing(original)
