"""Brings up what an instance has in place of an arena of its own: its attention workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moonpool.attention.client import Wanted, ring_bytes, spin_s
from moonpool.attention.partition import segment_blocks, share_heads
from moonpool.engine.builtin import LoadedModel
from moonpool.engine.ops import HeadShape, KvCache
from moonpool.engine.runner import Engine, make_layout
from moonpool.engine.split_choice import choose_split_ops
from moonpool.kvcache.layout import DTYPE_BYTES
from moonpool.messenger.arena import Arena
from moonpool.runtime.cores import usable_cores
from moonpool.runtime.offload import Crew, Offload
from moonpool.runtime.protocol import Setup
from moonpool.types import InstanceId


@dataclass(frozen=True, slots=True)
class OffloadedParts:
    """`arena` is one block, never used: the messenger at which peers come first needs one."""

    arena: Arena
    engine: Engine
    offload: Offload
    crew: Crew
    segment_blocks: int  # of a sequence that lie at one worker, if it may lie at several; else 0


def gather_crew(
    setup: Setup, model: LoadedModel, instance_id: InstanceId, secret: bytes, threads: int
) -> OffloadedParts:
    """Raises ValueError, ArenaError or AttentionError."""
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
    by_head = setup.partition == "head"
    head_ranges = share_heads(spec.num_kv_heads, len(setup.attention)) if by_head else ()
    offload = Offload(setup.attention, instance_id, secret, wanted, use_shm, head_ranges)
    crew = offload.gather()
    try:
        # Blocks that the engine names and never touches: no memory is behind them.
        dtype = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
        shape = (sum(crew.sizes), layout.num_layers, layout.slice_elements)
        cache = KvCache(torch.empty(1, 1, 1, dtype=dtype).expand(shape), layout)
        staggered = setup.engine.staggered_decodes
        engine = Engine(model, offload.make_ops(local), cache, staggered=staggered)
        segment = segment_blocks(setup.partition, layout)
        return OffloadedParts(Arena(layout, 1), engine, offload, crew, segment)
    except BaseException:
        offload.close()
        raise
