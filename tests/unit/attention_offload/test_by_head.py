"""Tests that attention workers that each hold some heads of all blocks give the same tokens and
blocks, bit for bit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from moonpool.config.tables import ATTENTION_SEGMENT_TOKENS
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BlockId, SamplingParams
from moonpool_engine.attention_offload.channel import AttentionChannelError, SocketChannel
from moonpool_engine.attention_offload.executor import AttentionExecutor
from moonpool_engine.attention_offload.partition import (
    Partition,
    WorkerBlockRanges,
    segment_blocks,
    share_heads,
)
from moonpool_engine.attention_offload.remote_ops import AttentionLostError, RemoteOps
from moonpool_engine.attention_offload.wire import KvHeadRange
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import SEGMENT, HeadShape, KvCache, empty_cache
from moonpool_engine.engine.runner import Engine, choose_split_ops, make_layout
from moonpool_engine.engine.slices import cut_of_heads
from moonpool_engine.transfer.reshard import NOWHERE

NAME = "random:hidden=128,layers=2,heads=8,kv_heads=4,head_dim=16,inter=96,vocab=300,context=4096"
NUM_BLOCKS = 60
GREEDY = SamplingParams(temperature=0.0)


class Workers:
    """Attention workers as threads, with the heads that `share_heads` gives them, and the engine
    that uses them."""

    def __init__(self, count: int, dtype: str) -> None:
        model = open_model(NAME, dtype)
        layout = make_layout(model, 64, choose_split_ops())
        ranges = share_heads(4, count)
        self.caches, self.channels, self.threads = [], [], []
        for heads in ranges:
            own = msgspec.structs.replace(layout, num_kv_heads=heads.count)
            self.caches.append(empty_cache(own, NUM_BLOCKS))
            shape = HeadShape(2 * heads.count, heads.count, 16)
            executor = AttentionExecutor(
                choose_split_ops(), self.caches[-1], shape, 0.25, lambda written, _: None
            )
            ours, theirs = socket.socketpair()
            self.channels.append(SocketChannel(ours, 10.0, reads_ahead=True))
            far = SocketChannel(theirs, None)
            self.threads.append(threading.Thread(target=self._serve, args=(executor, far)))
            self.threads[-1].start()
        nothing = torch.empty(1, 1, 1, dtype=self.caches[0].blocks.dtype)
        shape_all = (NUM_BLOCKS, layout.num_layers, layout.slice_elements)
        placement = WorkerBlockRanges((NUM_BLOCKS,))
        ops = RemoteOps(choose_split_ops(), self.channels, placement, head_ranges=ranges)
        self.engine = Engine(model, ops, KvCache(nothing.expand(shape_all), layout))
        self.own = empty_cache(layout, NUM_BLOCKS)
        self.local = Engine(model, choose_split_ops(), self.own)
        self.layout, self.ranges = layout, ranges

    def _serve(self, executor: AttentionExecutor, far: SocketChannel) -> None:
        with pytest.raises(AttentionChannelError):
            executor.serve(far)

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for thread in self.threads:
            thread.join(60)


@contextmanager
def workers(count: int, dtype: str = "float32") -> Iterator[Workers]:
    made = Workers(count, dtype)
    try:
        yield made
    finally:
        made.close()


def run(engine: Engine) -> list[list[int]]:
    """Runs a long and a short prompt, the long prompt in two chunks, then decodes together."""
    texts = [[(3 * t) % 300 for t in range(SEGMENT + 40)], [7, 8, 9]]
    tables = [list(range(1, 40)), [50, 51]]
    engine.step([StepEntry(AttemptId("0"), texts[0][:900], 0, tables[0], None)])
    starts = [900, 0]
    drawn: list[list[int]] = [[], []]
    for _ in range(6):
        steps = [
            StepEntry(AttemptId(str(i)), texts[i][starts[i] :], starts[i], tables[i], GREEDY)
            for i in range(2)
        ]
        starts = [len(text) for text in texts]
        for i, token in enumerate(engine.step(steps).tokens):
            assert token is not None
            texts[i].append(token.token_id)
            drawn[i].append(token.token_id)
    return drawn


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_blocks_are_those_of_one_process(count: int, dtype: str) -> None:
    """Three workers with unequal shares must each store their part of every slice."""
    with workers(count, dtype) as made:
        assert run(made.engine) == run(made.local)
        for heads, cache in zip(made.ranges, made.caches, strict=True):
            parts = cut_of_heads(made.layout, heads.first, heads.count)
            for block in (1, 20, 50):
                whole = made.own.blocks[block, 1].view(torch.uint8)
                cut = torch.cat([whole[start:end] for start, end in parts])
                assert torch.equal(cut, cache.blocks[block, 1].view(torch.uint8))


@pytest.mark.long
def test_a_lost_worker_fails_every_step() -> None:
    with workers(2) as made:
        step = [StepEntry(AttemptId("0"), [1, 2], 0, [0], GREEDY)]
        expected = made.engine.step(step).tokens
        made.channels[1].close()
        with pytest.raises(AttentionLostError) as failure:
            made.engine.step(step)
        assert failure.value.worker == 1
        assert expected


def test_more_workers_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="2 kv heads, too few for 4 attention workers"):
        share_heads(2, 4)


def test_by_head_all_workers_share_block_numbers_and_one_arena() -> None:
    partition = Partition((9, 7), share_heads(4, 2))
    assert partition.sizes == (7,)
    assert [partition.arena_of(w) for w in (0, 1)] == [0, 0]
    assert list(partition.workers_of(0)) == [0, 1]
    blocks = [BlockId(3), BlockId(6)]
    assert partition.shares(blocks) == {0: (3, 6), 1: (3, 6)}
    assert partition.runs(blocks) == [(0, 0, (3, 6)), (1, 0, (3, 6))]
    assert partition.whole(1, BlockId(6)) == 6


def test_by_block_each_worker_has_its_own_block_numbers() -> None:
    partition = Partition((4, 4))
    blocks = [BlockId(b) for b in (1, 5, 6, 2)]
    assert partition.shares(blocks) == {
        0: (1, NOWHERE, NOWHERE, 2),
        1: (NOWHERE, 1, 2, NOWHERE),
    }
    assert partition.runs(blocks) == [(0, 0, (1,)), (1, 1, (1, 2)), (0, 3, (2,))]
    assert partition.whole(1, BlockId(2)) == 6
    assert (partition.sizes, list(partition.workers_of(1))) == ((4, 4), [1])


def test_segments_are_those_of_the_kernels() -> None:
    assert ATTENTION_SEGMENT_TOKENS == SEGMENT
    layout = make_layout(open_model(NAME, "float32"), 64, choose_split_ops())
    assert segment_blocks("tokens", layout) == SEGMENT // 64
    assert segment_blocks("request", layout) == segment_blocks("head", layout) == 0
    assert KvHeadRange(1, 2).columns(HeadShape(8, 4, 16)) == slice(32, 96)
