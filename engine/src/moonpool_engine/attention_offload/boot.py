"""Starts the engine and messenger of an instance whose blocks are at attention workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import torch

from moonpool.cores import CoreShare, pin_thread, usable_cores
from moonpool.protocol.block_layout import DTYPE_BYTES, BlockLayout
from moonpool.protocol.frames import Setup
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BlockId, InstanceId
from moonpool_engine.attention_offload.client import (
    AttachOptions,
    LocalAttentionWorker,
    ring_bytes,
    spin_s,
    start_local_attention,
)
from moonpool_engine.attention_offload.partition import segment_blocks, share_heads
from moonpool_engine.attention_offload.remote_messenger import (
    AttentionGroup,
    RemoteAttentionMessenger,
)
from moonpool_engine.attention_offload.wire import LayerRule
from moonpool_engine.attention_offload.worker_state import AttentionWorkerState
from moonpool_engine.engine.builtin import LoadedModel
from moonpool_engine.engine.layers import attend_rules
from moonpool_engine.engine.model import head_shape
from moonpool_engine.engine.ops import KvCache, block_dtype
from moonpool_engine.engine.runner import Engine, choose_split_ops, make_layout
from moonpool_engine.engine.step import StepResult
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.reshard import ShardView


@dataclass(frozen=True, slots=True)
class OffloadedParts:
    """The parts that such an instance has in place of one arena and its messenger. `arena` has one
    block and is never used; it exists because the messenger that peers connect to first needs an
    arena."""

    arena: Arena
    engine: Engine
    offload: RemoteAttentionMessenger
    group: AttentionGroup
    segment_blocks: int  # blocks of a segment, or 0 if a sequence lies at one worker only


def boot_attention_group(
    setup: Setup,
    model: LoadedModel,
    peer: LocalPeer,
    threads: int,
    share: CoreShare,
) -> OffloadedParts:
    """Connects to the attention workers and makes the engine that uses them. The engine has
    `threads` threads on the cores of `share`. Raises ValueError, ArenaError or AttentionError."""
    local_ops = choose_split_ops(setup.model.quantization)
    layout = make_layout(model, setup.pool.block_tokens, local_ops)
    spec = model.spec
    heads = head_shape(spec)
    max_rows = setup.engine.chunk_tokens + setup.engine.max_sequences
    options = AttachOptions(
        owner=peer.instance_id,
        layout=layout,
        heads=heads,
        scale=spec.scale(),
        rules=tuple(LayerRule.of(rule) for rule in attend_rules(spec, model.weights)),
        num_blocks=layout.blocks_for(setup.pool.dram_tokens_per_instance),
        threads=threads,
        ring_bytes=ring_bytes(heads, DTYPE_BYTES[model.dtype], max_rows),
        spin_s=spin_s(len(setup.attention), threads, usable_cores()),
    )
    by_head = setup.sharing.partition == "head"
    head_ranges = share_heads(spec.num_kv_heads, len(setup.attention)) if by_head else ()
    offload = RemoteAttentionMessenger(setup.attention, peer, options, head_ranges)
    pin_thread(share.others)  # inherited by the threads that move the local worker's blocks
    local = _local_worker(setup, options, peer)
    pin_thread(share.engine)
    group = offload.connect(local)
    try:
        # The engine addresses these blocks but never touches them, because no memory is behind
        # them.
        dtype = block_dtype(layout)
        shape = (sum(group.sizes), layout.num_layers, layout.slice_elements)
        cache = KvCache(torch.empty(1, 1, 1, dtype=dtype).expand(shape), layout)
        staggered = setup.engine.staggered_decodes
        made = Engine(model, offload.make_ops(local_ops), cache, staggered=staggered)
        segment = segment_blocks(setup.sharing.partition, layout)
        return OffloadedParts(Arena(layout, 1), made, offload, group, segment)
    except BaseException:
        offload.close()
        raise


def _local_worker(
    setup: Setup,
    options: AttachOptions,
    peer: LocalPeer,
) -> LocalAttentionWorker | None:
    """Returns the local worker for the tokens that the instance keeps itself, or None if it keeps
    none."""
    num_blocks = options.layout.blocks_for(setup.sharing.own_tokens)
    if not num_blocks:
        return None
    name = InstanceId(f"{options.owner}.home")
    state = AttentionWorkerState(
        name,
        peer.secret,
        choose_split_ops(),
        _make_arena,
        peer.listen_host,
        peer.use_shared_memory,
        peer.tls,
    )
    return start_local_attention(state, msgspec.structs.replace(options, num_blocks=num_blocks))


def _make_arena(layout: BlockLayout, num_blocks: int, view: ShardView | None) -> Arena:
    return Arena(layout, num_blocks, shard_view=view)


class CalibrationEngine:
    """An engine for `engine.calibrate` that distributes its sequences over all arenas, as when the
    instance serves."""

    def __init__(self, engine: Engine, sizes: Sequence[int]) -> None:
        """`sizes`: number of blocks of each arena."""
        self.spec, self.layout = engine.spec, engine.layout
        self.ops_name = engine.ops_name
        self.num_blocks = min(sizes)
        self._engine = engine
        self._starts = [0, *accumulate(sizes)][: len(sizes)]

    def step(self, entries: Sequence[StepEntry]) -> StepResult:
        return self._engine.step([self._moved(i, entry) for i, entry in enumerate(entries)])

    def _moved(self, number: int, entry: StepEntry) -> StepEntry:
        start = self._starts[number % len(self._starts)]
        return entry._replace(block_ids=[BlockId(b + start) for b in entry.block_ids])
