"""Tests an attention worker: which owners may attach, which blocks outlive them, and which names a
write removes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.protocol.transfer_events import PeerAddress, ReceiveEnded
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BlockId, BlockKey, InstanceId, SamplingParams
from moonpool_engine.attention_offload import service
from moonpool_engine.attention_offload.client import (
    AttachOptions,
    AttentionClient,
    AttentionError,
    connect,
)
from moonpool_engine.attention_offload.partition import WorkerBlockRanges
from moonpool_engine.attention_offload.remote_ops import AttentionLostError, RemoteOps
from moonpool_engine.attention_offload.service import AttentionService
from moonpool_engine.attention_offload.wire import (
    AttentionEvent,
    Expect,
    FetchPrefix,
    Grant,
    MarkCached,
    ReceivedBytes,
)
from moonpool_engine.attention_offload.worker_state import AttentionWorkerState
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import HeadShape, KvCache
from moonpool_engine.engine.runner import Engine, choose_split_ops, make_layout
from moonpool_engine.transfer.arena import Arena

NAME = "random:hidden=32,layers=2,heads=2,kv_heads=1,head_dim=16,inter=32,vocab=300,context=512"
SECRET = b"a secret of the tests"
ME = InstanceId("decode-0")
KEYS = [BlockKey(bytes([i]) * 16) for i in range(4)]


def options(num_blocks: int = 6, arithmetic: str | None = None) -> AttachOptions:
    layout = make_layout(open_model(NAME, "float32"), 16, choose_split_ops())
    if arithmetic is not None:
        layout = msgspec.structs.replace(layout, arithmetic=arithmetic)
    return AttachOptions(
        owner=ME,
        layout=layout,
        heads=HeadShape(2, 1, 16),
        scale=0.25,
        rules=(),
        num_blocks=num_blocks,
        threads=1,
        ring_bytes=1 << 16,
    )


@pytest.fixture
def address() -> Iterator[PeerAddress]:
    name = InstanceId("attention-0")
    state = AttentionWorkerState(name, SECRET, choose_split_ops(), Arena, "127.0.0.1", True)
    made = AttentionService(name, SECRET, state, "127.0.0.1", True)
    yield made.start()
    made.close()


class Owner:
    def __init__(self, address: PeerAddress, use_shm: bool = True, num_blocks: int = 6) -> None:
        self.told: queue.SimpleQueue[AttentionEvent] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.client: AttentionClient = connect(address, ME, SECRET, options(num_blocks), use_shm)
        self.client.listen(self.told.put, self.lost.put)

    def leave(self) -> None:
        self.client.close()
        self.lost.get(timeout=60)

    def cached(self) -> dict[BlockId, BlockKey]:
        return dict(self.client.attached.cached)

    def next_event(self) -> AttentionEvent:
        while isinstance(told := self.told.get(timeout=60), ReceivedBytes):
            pass
        return told

    def settle(self) -> None:
        """Waits until all commands so far have been performed."""
        self.told.get(timeout=60)

    def engine(self) -> tuple[Engine, RemoteOps]:
        model = open_model(NAME, "float32")
        ops = RemoteOps(choose_split_ops(), [self.client.channel], WorkerBlockRanges((6,)))
        layout = options().layout
        shape = (6, layout.num_layers, layout.slice_elements)
        return Engine(model, ops, KvCache(torch.empty(1, 1, 1).expand(shape), layout)), ops


@pytest.mark.parametrize("use_shm", [True, False])
def test_keys_outlive_their_owner_until_a_block_is_written(
    address: PeerAddress, use_shm: bool
) -> None:
    first = Owner(address, use_shm)
    assert first.cached() == {}
    blocks = tuple((BlockId(i), key) for i, key in enumerate(KEYS))
    first.client.command(MarkCached(blocks=blocks, epoch=1))
    first.settle()
    first.leave()
    second = Owner(address, use_shm)
    assert second.cached() == dict(blocks)
    # The blocks are written by a stream, by a fetch, and by a step.
    second.client.command(
        Expect(stream_id="s", block_ids=(BlockId(0),), first_index=0, timeout_s=0.1, epoch=2)
    )
    ended = second.next_event()
    assert isinstance(ended, ReceiveEnded)
    assert ended.error
    nobody = msgspec.structs.replace(address, tcp_port=1, unix_name="")
    second.client.command(
        FetchPrefix(
            fetch_id="f",
            source=nobody,
            keys=(KEYS[1],),
            block_ids=(BlockId(1),),
            timeout_s=1.0,
            epoch=3,
        )
    )
    second.next_event()
    engine, ops = second.engine()
    ops.epoch = 4
    draw = SamplingParams(temperature=0.0)
    engine.step([StepEntry(AttemptId("r"), [5], 0, [2], draw)])
    # A key that was given before the write, but arrives after it, does not count.
    second.client.command(MarkCached(blocks=((BlockId(2), KEYS[2]),), epoch=3))
    second.client.command(MarkCached(blocks=((BlockId(0), KEYS[0]),), epoch=4))
    second.client.command(Grant(read_id="unknown", block_ids=()))
    for _ in range(3):
        second.settle()
    second.leave()
    third = Owner(address, use_shm)
    assert third.cached() == {BlockId(0): KEYS[0], BlockId(3): KEYS[3]}
    third.leave()


def test_a_new_owner_replaces_the_former_one(address: PeerAddress) -> None:
    first = Owner(address)
    second = Owner(address)
    assert first.lost.get(timeout=60)
    engine, _ = first.engine()
    draw = SamplingParams(temperature=0.0)
    step = [StepEntry(AttemptId("r"), [5], 0, [2], draw)]
    with pytest.raises(AttentionLostError):
        engine.step(step)
    engine, _ = second.engine()
    assert engine.step(step).tokens
    second.leave()


def test_steps_that_open_while_their_owner_is_replaced_end(
    address: PeerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = threading.Event()
    take_rings = service.take_rings

    def late(*arguments: Any) -> Any:
        assert replaced.wait(60)
        return take_rings(*arguments)

    monkeypatch.setattr(service, "take_rings", late)
    first = Owner(address)
    monkeypatch.setattr(service, "take_rings", take_rings)
    second = Owner(address)
    assert first.lost.get(timeout=60)
    replaced.set()
    engine, _ = first.engine()
    draw = SamplingParams(temperature=0.0)
    with pytest.raises(AttentionLostError):
        engine.step([StepEntry(AttemptId("r"), [5], 0, [2], draw)])
    second.leave()


def test_an_arena_of_another_size_is_a_new_one(address: PeerAddress) -> None:
    first = Owner(address)
    first.client.command(MarkCached(blocks=((BlockId(0), KEYS[0]),), epoch=1))
    first.settle()
    first.leave()
    second = Owner(address, num_blocks=5)
    assert second.cached() == {}
    assert second.client.attached.num_blocks == 5
    second.leave()


def test_other_kernels_and_wrong_secrets_are_refused(address: PeerAddress) -> None:
    with pytest.raises(AttentionError, match="same kind of CPU"):
        connect(address, ME, SECRET, options(arithmetic="of another CPU"), True)
    with pytest.raises(AttentionError, match="secret"):
        connect(address, ME, b"another secret altogether", options(), True)
    owner = Owner(address)  # the worker still serves a new owner
    owner.leave()
