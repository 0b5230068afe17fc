"""An engine with remote attention generates the same tokens, bit for bit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import SamplingParams
from moonpool_engine.attention_offload.channel import (
    AttentionChannel,
    AttentionChannelError,
    SocketChannel,
    offer_rings,
    rings_available,
    take_rings,
)
from moonpool_engine.attention_offload.executor import AttentionExecutor
from moonpool_engine.attention_offload.partition import (
    PlacementError,
    WorkerBlockRanges,
    split_step,
)
from moonpool_engine.attention_offload.remote_ops import AttentionLostError, RemoteOps
from moonpool_engine.attention_offload.tls_channel import TlsChannel
from moonpool_engine.attention_offload.wire import ECHO, FAILED, Header
from moonpool_engine.engine import native
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import (
    SEGMENT,
    AttendArgs,
    HeadShape,
    KvCache,
    SplitOps,
    StepMeta,
    empty_cache,
)
from moonpool_engine.engine.reference import ReferenceSplitOps
from moonpool_engine.engine.runner import Engine, make_layout
from moonpool_engine.transfer.tls_frames import accepted, connected
from tests.certificates import shared_tls

NAME = "random:hidden=64,layers=2,heads=4,kv_heads=2,head_dim=16,inter=96,vocab=300,context=8192"
HEADS = HeadShape(4, 2, 16)
BLOCKS_EACH = 40
GREEDY = SamplingParams(temperature=0.0)


def make_ops() -> SplitOps:
    if native.available() is not None:
        return ReferenceSplitOps()
    from moonpool_engine.engine.native.split import NativeSplitOps

    return NativeSplitOps()


class Workers:
    """Runs attention workers as threads, each with an arena of its own."""

    def __init__(self, count: int, transport: str, dtype: str = "float32") -> None:
        self.model = open_model(NAME, dtype)
        ops = make_ops()
        self.layout = make_layout(self.model, 64, ops)
        self.caches = [empty_cache(self.layout, BLOCKS_EACH) for _ in range(count)]
        self.written: list[set[int]] = [set() for _ in range(count)]
        self.channels: list[AttentionChannel] = []
        self.theirs: list[AttentionChannel] = []
        self.threads: list[threading.Thread] = []
        for index in range(count):
            self._start(index, transport)
        placement = WorkerBlockRanges((BLOCKS_EACH,) * count)
        self.ops = RemoteOps(ops, self.channels, placement)
        nothing = torch.empty(1, 1, 1, dtype=self.caches[0].blocks.dtype)
        shape = (BLOCKS_EACH * count, self.layout.num_layers, self.layout.slice_elements)
        self.engine = Engine(self.model, self.ops, KvCache(nothing.expand(shape), self.layout))

    def _start(self, index: int, transport: str) -> None:
        ours, theirs = socket.socketpair()
        seen = self.written[index]
        executor = AttentionExecutor(
            make_ops(), self.caches[index], HEADS, 16**-0.5, lambda blocks, _: seen.update(blocks)
        )
        if transport == "ring":
            self.channels.append(offer_rings(ours, 1 << 16, 10.0, 0.0))
            self.theirs.append(take_rings(theirs, None, 0.0))
        elif transport == "tls":
            tls = shared_tls()
            near, far = connected(tls, ours), accepted(tls, theirs)
            shaking = threading.Thread(target=far.begin, args=(time.monotonic() + 60,))
            shaking.start()
            near.begin(time.monotonic() + 60)
            shaking.join()
            self.channels.append(TlsChannel(near, 10.0, reads_ahead=True))
            self.theirs.append(TlsChannel(far, None))
        else:
            self.channels.append(SocketChannel(ours, 10.0, reads_ahead=True))
            self.theirs.append(SocketChannel(theirs, None))

        def serve() -> None:
            with pytest.raises(AttentionChannelError):
                executor.serve(self.theirs[index])

        self.threads.append(threading.Thread(target=serve))
        self.threads[-1].start()

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


@contextmanager
def workers(count: int, transport: str = "socket", dtype: str = "float32") -> Iterator[Workers]:
    if transport == "ring" and not rings_available():
        pytest.skip("no native kernels")
    made = Workers(count, transport, dtype)
    try:
        yield made
    finally:
        made.close()


def local_engine(made: Workers) -> Engine:
    cache = empty_cache(made.layout, made.engine.num_blocks)
    return Engine(made.model, make_ops(), cache)


def run(engine: Engine, tables: list[list[int]], lengths: list[int], steps: int) -> list[list[int]]:
    """Runs prompts that are prefilled in two chunks, then decoded together."""
    texts = [[(7 * i + t) % 300 for t in range(length)] for i, length in enumerate(lengths)]
    for number, (text, table) in enumerate(zip(texts, tables, strict=True)):
        cut = len(text) // 2
        name = AttemptId(str(number))
        if cut:
            engine.step([StepEntry(name, text[:cut], 0, table, None)])
        result = engine.step([StepEntry(name, text[cut:], cut, table, GREEDY)])
        token = result.tokens[0]
        assert token is not None
        text.append(token.token_id)
    for _ in range(steps):
        batch = [
            StepEntry(AttemptId(str(i)), text[-1:], len(text) - 1, table, GREEDY)
            for i, (text, table) in enumerate(zip(texts, tables, strict=True))
        ]
        for text, token in zip(texts, engine.step(batch).tokens, strict=True):
            assert token is not None
            text.append(token.token_id)
    return [text[length:] for text, length in zip(texts, lengths, strict=True)]


@pytest.mark.parametrize("transport", ["socket", "ring", "tls"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_by_request(count: int, transport: str, dtype: str) -> None:
    with workers(count, transport, dtype) as made:
        lengths = [30, 300, 64, 65, 500]
        tables = []
        for i, length in enumerate(lengths):
            base = (i % count) * BLOCKS_EACH + 10 * (i // count) % BLOCKS_EACH
            tables.append([base + j for j in range(-(-(length + 8) // 64))])
        if count == 1:
            tables = [[8 * i + j for j in range(8)] for i in range(5)]
            tables[4] = list(range(31, 40))
            tables[3] = [24, 25, 26, 27, 28, 29, 30]
        assert run(made.engine, tables, lengths, 6) == run(local_engine(made), tables, lengths, 6)
        assert {b + BLOCKS_EACH * w for w in range(count) for b in made.written[w]} == {
            block
            for table, n in zip(tables, lengths, strict=True)
            for block in table[: n // 64 + 1]
        }


@pytest.mark.parametrize("transport", ["socket", "ring", "tls"])
@pytest.mark.parametrize("count", [2, 4])
def test_by_token_range(count: int, transport: str) -> None:
    """The segments of a long prompt are at different workers, and short prompts are each at one
    worker. Chunks are larger than the buffers between the processes. Nobody reads the last layer's
    answer for a chunk that draws no token, and yet the two sides must not wait for each other."""
    with workers(count, transport) as made:
        size = SEGMENT // 64
        long = [BLOCKS_EACH * (i // size % count) + i % size for i in range(66)]
        if count == 2:  # with two workers, the third segment is at the first worker again
            long = [*range(size), *(BLOCKS_EACH + i for i in range(size)), 38, 39]
        short = [BLOCKS_EACH + 33, BLOCKS_EACH + 34]
        # the second worker has rows of both sequences
        tables, lengths = [short, long], [70, 2 * SEGMENT - 3]
        assert run(made.engine, tables, lengths, 6) == run(local_engine(made), tables, lengths, 6)
        tables, lengths = tables[::-1], lengths[::-1]
        assert run(made.engine, tables, lengths, 2) == run(local_engine(made), tables, lengths, 2)


def test_two_steps_take_turns() -> None:
    """Computes one layer in each step and then waits for the other step, like two staggered
    batches."""
    with workers(2) as made:
        ops, cache, local = made.ops, empty_cache(made.layout, 1), make_ops()
        own = empty_cache(made.layout, 2 * BLOCKS_EACH)
        metas = [_decode_meta(0), _decode_meta(BLOCKS_EACH)]
        from moonpool_engine.engine.rope import rope_table

        rope = rope_table(made.model.spec.rope, 16, 100)
        qkvs = [torch.randn(1, 8 * 16, generator=torch.manual_seed(i)) for i in range(2)]
        for layer in range(2):
            sent = [
                ops.rope_store(qkv, rope, None, AttendArgs(HEADS, cache, layer, meta, 0.25))
                for qkv, meta in zip(qkvs, metas, strict=True)
            ]
            for q, qkv, meta in zip(sent, qkvs, metas, strict=True):
                local.rope_store(qkv, rope, None, AttendArgs(HEADS, own, layer, meta, 0.25))
                expected = local.attend(q, AttendArgs(HEADS, own, layer, meta, 0.25))
                assert torch.equal(
                    expected, ops.attend(q, AttendArgs(HEADS, cache, layer, meta, 0.25))
                )


def _decode_meta(block: int) -> StepMeta:
    return StepMeta(
        positions=torch.tensor([0], dtype=torch.int32),
        row_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_starts=torch.tensor([0], dtype=torch.int32),
        block_tables=torch.tensor([[block]], dtype=torch.int32),
        num_rows=1,
        num_sequences=1,
    )


@pytest.mark.parametrize("transport", ["socket", "ring", "tls"])
def test_a_lost_worker_fails_the_step_that_needs_it_and_no_other(transport: str) -> None:
    with workers(2, transport) as made:
        made.theirs[1].close()
        made.threads[1].join(60)
        near = StepEntry(AttemptId("0"), [1, 2], 0, [0], GREEDY)
        far = StepEntry(AttemptId("1"), [1, 2], 0, [BLOCKS_EACH], GREEDY)
        expected = made.engine.step([near]).tokens
        for _ in range(2):
            with pytest.raises(AttentionLostError) as failure:
                made.engine.step([near, far])
            assert failure.value.worker == 1
            assert made.engine.step([near]).tokens == expected


@pytest.mark.parametrize("transport", ["socket", "ring", "tls"])
def test_a_late_query_gives_the_same_tokens_and_workers_report_their_times(
    transport: str,
) -> None:
    with workers(2, transport) as made:
        channels = made.channels
        late = RemoteOps(
            make_ops(), channels, WorkerBlockRanges((BLOCKS_EACH,) * 2), early_query=False
        )
        nothing = torch.empty(1, 1, 1, dtype=made.caches[0].blocks.dtype)
        shape = (2 * BLOCKS_EACH, made.layout.num_layers, made.layout.slice_elements)
        engine = Engine(made.model, late, KvCache(nothing.expand(shape), made.layout))
        tables, lengths = [[0, 1, 2, 3, 4, 5], [BLOCKS_EACH]], [300, 20]
        assert run(engine, tables, lengths, 3) == run(local_engine(made), tables, lengths, 3)
        assert late.attending_ns > 0
        assert late.waited_ns > 0


@pytest.mark.parametrize("transport", ["socket", "ring", "tls"])
def test_an_echo_returns_unchanged_and_an_unknown_message_ends_the_channel(transport: str) -> None:
    with workers(1, transport) as made:
        channel = made.channels[0]
        for size in (0, 5, 1 << 17):  # the last message is larger than the ring
            sent, back = bytearray(i % 251 for i in range(size)), bytearray(size)
            channel.send(Header(size, ECHO, 3, 9), memoryview(sent))
            assert channel.receive(memoryview(back)) == Header(size, ECHO, 3, 9)
            assert back == sent
        channel.send(Header(0, 77, 0, 0))
        answer = channel.receive()
        text = bytearray(answer.num_bytes)
        channel.receive_into(memoryview(text))
        assert answer.kind == FAILED
        assert b"unknown kind 77" in text


@pytest.mark.parametrize("transport", ["socket", "ring", "tls"])
def test_a_worker_reports_an_invalid_step(transport: str) -> None:
    with workers(1, transport) as made:
        # more blocks than the worker has
        made.ops._placement = WorkerBlockRanges((2 * BLOCKS_EACH,))
        step = StepEntry(AttemptId("0"), [1], 0, [BLOCKS_EACH - 1], GREEDY)
        assert made.engine.step([step]).tokens
        meta = _decode_meta(BLOCKS_EACH + 3)
        model, cache = made.engine.model, made.engine.cache
        rows = torch.tensor([0])
        with pytest.raises(AttentionLostError, match="block table"):
            model.forward(torch.tensor([1]), cache, meta, rows)


def test_a_segment_must_not_lie_at_two_workers() -> None:
    tables = torch.tensor([[0, 5]], dtype=torch.int32)
    meta = StepMeta(
        positions=torch.tensor([70], dtype=torch.int32),
        row_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_starts=torch.tensor([70], dtype=torch.int32),
        block_tables=tables,
        num_rows=1,
        num_sequences=1,
    )
    with pytest.raises(PlacementError, match="two attention workers"):
        split_step(meta, WorkerBlockRanges((4, 4)), 64)
