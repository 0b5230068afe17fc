"""Brings up what an instance has in place of one arena: its attention workers, and what it keeps
beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
import torch

from moonpool.attention.client import Wanted, ring_bytes, spin_s
from moonpool.attention.home import HomeClient, keep_at_home
from moonpool.attention.keeper import Keeper
from moonpool.attention.partition import segment_blocks, share_heads
from moonpool.engine.builtin import LoadedModel
from moonpool.engine.ops import HeadShape, KvCache
from moonpool.engine.runner import Engine, make_layout
from moonpool.engine.split_choice import choose_split_ops
from moonpool.engine.step import SequenceStep, StepResult
from moonpool.kvcache.layout import DTYPE_BYTES, BlockLayout
from moonpool.messenger.arena import Arena
from moonpool.messenger.cut import Cut
from moonpool.runtime.cores import CoreShare, pin_thread, usable_cores
from moonpool.runtime.offload import Crew, Offload
from moonpool.runtime.protocol import Setup
from moonpool.types import BlockId, InstanceId


@dataclass(frozen=True, slots=True)
class OffloadedParts:
    """`arena` is one block, never used: the messenger at which peers come first needs one."""

    arena: Arena
    engine: Engine
    offload: Offload
    crew: Crew
    segment_blocks: int  # of a sequence that lie at one worker, if it may lie at several; else 0


def gather_crew(
    setup: Setup,
    model: LoadedModel,
    instance_id: InstanceId,
    secret: bytes,
    engine: tuple[int, CoreShare],
    listen_host: str,
) -> OffloadedParts:
    """The engine has so many threads, on these cores. Raises ValueError, ArenaError or
    AttentionError."""
    threads, share = engine
    local = choose_split_ops(setup.model.quantization)
    layout = make_layout(model, setup.pool.block_tokens, local)
    spec = model.spec
    heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    max_rows = setup.engine.chunk_tokens + setup.engine.max_sequences
    wanted = Wanted(
        owner=instance_id,
        layout=layout,
        heads=spec.num_heads,
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
        num_blocks=layout.blocks_for(setup.pool.dram_tokens_per_instance),
        threads=threads,
        ring_bytes=ring_bytes(heads, DTYPE_BYTES[model.dtype], max_rows),
        spin_s=spin_s(len(setup.attention), threads, usable_cores()),
    )
    use_shm = setup.network.use_shared_memory
    by_head = setup.sharing.partition == "head"
    head_ranges = share_heads(spec.num_kv_heads, len(setup.attention)) if by_head else ()
    offload = Offload(setup.attention, instance_id, secret, wanted, use_shm, head_ranges)
    pin_thread(share.others)  # and so the threads that move what is kept at home
    home = _home(setup, wanted, secret, listen_host)
    pin_thread(share.engine)
    crew = offload.gather(home)
    try:
        # Blocks that the engine names and never touches: no memory is behind them.
        dtype = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
        shape = (sum(crew.sizes), layout.num_layers, layout.slice_elements)
        cache = KvCache(torch.empty(1, 1, 1, dtype=dtype).expand(shape), layout)
        staggered = setup.engine.staggered_decodes
        made = Engine(model, offload.make_ops(local), cache, staggered=staggered)
        segment = segment_blocks(setup.sharing.partition, layout)
        return OffloadedParts(Arena(layout, 1), made, offload, crew, segment)
    except BaseException:
        offload.close()
        raise


def _home(setup: Setup, wanted: Wanted, secret: bytes, listen_host: str) -> HomeClient | None:
    """What the instance keeps itself, if anything."""
    num_blocks = wanted.layout.blocks_for(setup.sharing.own_tokens)
    if not num_blocks:
        return None
    name = InstanceId(f"{wanted.owner}.home")
    use_shm = setup.network.use_shared_memory
    keeper = Keeper(name, secret, choose_split_ops(), _make_arena, listen_host, use_shm)
    return keep_at_home(keeper, msgspec.structs.replace(wanted, num_blocks=num_blocks))


def _make_arena(layout: BlockLayout, num_blocks: int, cut: Cut | None) -> Arena:
    return Arena(layout, num_blocks, cut=cut)


class Spread:
    """An engine to be measured (`engine.calibrate`) with sequences in all arenas by turns, as they
    lie when it serves."""

    def __init__(self, engine: Engine, sizes: Sequence[int]) -> None:
        self.spec, self.layout = engine.spec, engine.layout
        self.ops_name = engine.ops_name
        self.num_blocks = min(sizes)
        self._engine = engine
        self._starts = [0, *accumulate(sizes)][: len(sizes)]

    def step(self, sequences: Sequence[SequenceStep]) -> StepResult:
        return self._engine.step([self._moved(i, entry) for i, entry in enumerate(sequences)])

    def _moved(self, number: int, entry: SequenceStep) -> SequenceStep:
        start = self._starts[number % len(self._starts)]
        return replace(entry, block_ids=[BlockId(b + start) for b in entry.block_ids])
