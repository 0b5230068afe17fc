"""A local partition next to attention workers gives the same bits, and needs no messages."""

from __future__ import annotations

import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool_engine.attention_offload.executor import AttentionExecutor
from moonpool_engine.attention_offload.partition import WorkerBlockRanges
from moonpool_engine.attention_offload.remote_ops import LocalPartition, RemoteOps
from moonpool_engine.engine.ops import SEGMENT, KvCache, empty_cache
from moonpool_engine.engine.runner import Engine
from tests.unit.attention_offload.test_remote_ops import (
    BLOCKS_EACH,
    GREEDY,
    HEADS,
    Workers,
    local_engine,
    make_ops,
    run,
    workers,
)

HOME_BLOCKS = 36


def with_local(made: Workers, staggered: bool = False) -> tuple[Engine, set[int]]:
    """Returns the workers' engine, with local blocks after theirs, and the local blocks that were
    written."""
    written: set[int] = set()
    cache = empty_cache(made.layout, HOME_BLOCKS)
    executor = AttentionExecutor(
        make_ops(), cache, HEADS, 16**-0.5, lambda blocks, _: written.update(blocks)
    )
    sizes = (*(BLOCKS_EACH for _ in made.channels), HOME_BLOCKS)
    local = LocalPartition(len(made.channels), executor)
    ops = RemoteOps(make_ops(), made.channels, WorkerBlockRanges(sizes), local_partition=local)
    nothing = torch.empty(1, 1, 1, dtype=cache.blocks.dtype)
    shape = (sum(sizes), made.layout.num_layers, made.layout.slice_elements)
    whole = KvCache(nothing.expand(shape), made.layout)
    return Engine(made.model, ops, whole, staggered=staggered), written


@pytest.mark.parametrize("staggered", [False, True])
@pytest.mark.parametrize("transport", ["socket", "ring"])
def test_local_and_remote_requests(transport: str, staggered: bool) -> None:
    with workers(1, transport) as made:
        engine, written = with_local(made, staggered)
        # the lengths have enough blocks for two batches
        lengths = [30, 300, 64, 65, 20, 21, 22, 200, 10]
        bases = [0, 40, 2, 46, 4, 48, 5, 50, 10]
        tables = [
            [base + i for i in range(-(-(length + 8) // 64))]
            for base, length in zip(bases, lengths, strict=True)
        ]
        reference = Engine(made.model, make_ops(), empty_cache(made.layout, 76))
        assert run(engine, tables, lengths, 6) == run(reference, tables, lengths, 6)
        assert written == {b - BLOCKS_EACH for t in tables for b in t if b >= BLOCKS_EACH}


def test_local_and_remote_segments() -> None:
    """The partial results of both must be merged in the order of their tokens, not of their
    arrival."""
    with workers(1) as made:
        engine, _ = with_local(made)
        size = SEGMENT // 64
        first = [*range(size), *(BLOCKS_EACH + i for i in range(2))]
        second = [*(BLOCKS_EACH + 4 + i for i in range(size)), 34, 35]
        for tables in ([first], [second]):
            lengths = [SEGMENT + 20]
            reference = Engine(made.model, make_ops(), empty_cache(made.layout, 76))
            assert run(engine, tables, lengths, 4) == run(reference, tables, lengths, 4)


def test_a_local_request_needs_no_worker() -> None:
    with workers(1) as made:
        engine, _ = with_local(made)
        made.channels[0].close()
        near = StepEntry(AttemptId("0"), [1, 2], 0, [BLOCKS_EACH], GREEDY)
        assert engine.step([near]).tokens == local_engine(made).step([_at_zero(near)]).tokens


def _at_zero(step: StepEntry) -> StepEntry:
    return StepEntry(step.attempt_id, step.new_token_ids, step.start, [0], step.draw)
