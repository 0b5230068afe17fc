"""Tests that a fetch brings layer after layer of all blocks, on every transport, and that its gate
opens layer by layer, never too early and never for a corrupt layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from messenger_harness import Node, keys, make_layout, rogue_connection

from moonpool.protocol.transfer_events import FetchEnded, FetchProgress, ReadEnded, ReadRequested
from moonpool_engine.transfer import context as transfer_context
from moonpool_engine.transfer.arena import Arena, checksum_slice
from moonpool_engine.transfer.counters import Counters
from moonpool_engine.transfer.errors import PeerGoneError
from moonpool_engine.transfer.gate import LayerGate
from moonpool_engine.transfer.shm import ShmConnection
from moonpool_engine.transfer.slice_receiver import SliceReceiver
from moonpool_engine.transfer.wire import (
    ReadBlocks,
    ReadGranted,
    Slices,
    pack_offers,
    unpack_offers,
)

MakeNode = Callable[..., Node]
NUM_LAYERS = 4
# slices of 512 KiB, so that each has a frame of its own
LAYOUT = make_layout(head_dim=16384, num_layers=NUM_LAYERS)


def now() -> float:
    return time.monotonic()


class Slow:
    """A source's checksum function that stops before its n-th slice until `go_on` is set."""

    def __init__(self, num_free: int) -> None:
        self.left = num_free
        self.go_on = threading.Event()
        self.flip: int | None = None

    def __call__(self, view: memoryview) -> int:
        if self.left == 0:
            assert self.go_on.wait(60.0)
        self.left -= 1
        return checksum_slice(view) ^ (self.left == self.flip)


@pytest.fixture(autouse=True)
def one_slice_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_context, "FRAME_BYTES", LAYOUT.slice_bytes)


@pytest.fixture
def slow(make_node: MakeNode) -> Iterator[Slow]:
    slow = Slow(0)
    yield slow
    slow.go_on.set()


def begin(
    make_node: MakeNode, slow: Slow, num_free: int, blocks: int = 2
) -> tuple[Node, Node, LayerGate]:
    """Starts a fetch whose source stops after `num_free` slices."""
    source = make_node("source", layout=LAYOUT, num_blocks=4, checksum=slow)
    reader = make_node("reader", layout=LAYOUT, num_blocks=4)
    source.fill(1)
    slow.left = num_free
    gate = LayerGate()
    ids = list(range(blocks))
    reader.messenger.fetch("f", source.address, keys(blocks), ids, 120.0, gate)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, ids)
    assert reader.expect_event(FetchProgress) == FetchProgress("f", blocks)
    return source, reader, gate


def test_slices_are_offered_layer_by_layer(make_node: MakeNode, transport: str) -> None:
    source = make_node("source")
    own = Arena(source.layout, 8)
    receiver = SliceReceiver(own, [0, 1, 2], 0, Counters())
    reader = rogue_connection(source.address, transport, source.layout, own)
    reader.send(ReadBlocks(keys=tuple(keys(3)), timeout_s=120, first_layer=1), now() + 60)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [5, 3, 4])
    assert isinstance(reader.receive(now() + 60), ReadGranted)
    order = []
    last = False
    while not last:
        message = reader.receive(now() + 60)
        assert isinstance(message, Slices)
        assert reader.receive_slices(message.offers, receiver, now() + 60) == 0
        order += [(layer, index) for index, layer, _, _ in unpack_offers(message.offers)]
        last = message.last
    assert order == [(layer, index) for layer in (1, 2) for index in range(3)]
    reader.close()


def test_a_layer_that_no_block_has_is_refused(make_node: MakeNode, transport: str) -> None:
    source = make_node("source")
    reader = rogue_connection(source.address, transport, source.layout, Arena(source.layout, 1))
    reader.send(ReadBlocks(keys=tuple(keys(1)), timeout_s=120, first_layer=3), now() + 60)
    with pytest.raises(PeerGoneError):
        reader.receive(now() + 60)
    source.expect_silence()
    reader.close()


def test_the_gate_opens_with_each_layer_and_no_sooner(make_node: MakeNode, slow: Slow) -> None:
    source, reader, gate = begin(make_node, slow, 2 * 2)
    assert gate.wait(1, now() + 60)
    assert reader.arena.slice(1, 1) == source.arena.slice(1, 1)
    assert not gate.wait(2, now() + 0.05)
    slow.go_on.set()
    assert gate.wait(NUM_LAYERS - 1, now() + 60)
    assert all(reader.block(b) == source.block(b) for b in range(2))


def test_the_last_layer_opens_only_after_the_end_was_reported(
    make_node: MakeNode, slow: Slow
) -> None:
    source, reader, gate = begin(make_node, slow, -1)
    assert gate.wait(NUM_LAYERS - 1, now() + 60)
    told = []
    while not reader.events.empty():
        told.append(reader.events.get())
    assert isinstance(told[-1], FetchEnded) and told[-1].num_blocks == 2
    layers = [event.num_layers for event in told[:-1] if isinstance(event, FetchProgress)]
    assert layers == [1, 2, 3]
    source.expect_event(ReadEnded)


def test_a_corrupt_slice_breaks_the_gate_at_its_layer(make_node: MakeNode, slow: Slow) -> None:
    slow.flip = 0  # flips a bit in the last slice before the source stops: layer 1 of block 2
    _, reader, gate = begin(make_node, slow, 4)
    assert gate.wait(0, now() + 60)
    began_s = now()
    assert not gate.wait(1, now() + 60)
    assert now() - began_s < 50.0, "the gate broke at once, not at the deadline"
    slow.go_on.set()
    while not isinstance(event := reader.events.get(timeout=60), FetchEnded):
        pass
    assert (event.num_blocks, event.corrupt_slices) == (1, 1)


def test_a_source_that_dies_midway_breaks_the_gate(make_node: MakeNode, slow: Slow) -> None:
    source, reader, gate = begin(make_node, slow, 2 * 2)
    assert gate.wait(1, now() + 60)
    threading.Thread(target=source.messenger.close).start()
    assert not gate.wait(NUM_LAYERS - 1, now() + 60)
    slow.go_on.set()
    while not isinstance(event := reader.events.get(timeout=60), FetchEnded):
        pass
    assert event.error


@pytest.mark.parametrize("second_grant", [[0, 1], [0]])
def test_the_next_transport_continues_at_the_first_incomplete_layer(
    monkeypatch: pytest.MonkeyPatch, second_grant: list[int]
) -> None:
    """If the second grant is smaller than the first, the gate must break."""
    source = Node("source", "shm", layout=LAYOUT, num_blocks=4)
    reader = Node("reader", "shm", layout=LAYOUT, num_blocks=4)
    source.fill(1)
    take, calls = ShmConnection.receive_slices, []

    def failing(self: ShmConnection, *arguments: object) -> int:
        calls.append(arguments)
        if len(calls) == 6:
            raise PeerGoneError("shared memory broke")
        return take(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ShmConnection, "receive_slices", failing)
    gate = LayerGate()
    reader.messenger.fetch("f", source.address, keys(2), [0, 1], 120.0, gate)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [0, 1])
    # The next transport uses another connection, so its request may come before the end of the
    # first read.
    told = {type(event): event for event in (source.events.get(timeout=60) for _ in range(2))}
    ended, asked = told[ReadEnded], told[ReadRequested]
    assert isinstance(ended, ReadEnded)
    assert isinstance(asked, ReadRequested)
    assert ended.error
    source.messenger.grant(asked.read_id, second_grant)
    assert gate.wait(NUM_LAYERS - 1, now() + 60) == (len(second_grant) == 2)
    while not isinstance(event := reader.events.get(timeout=60), FetchEnded):
        pass
    assert event.num_blocks == len(second_grant)
    assert all(reader.block(b) == source.block(b) for b in second_grant)
    sent = reader.messenger.counts().received_bytes["tcp"]
    assert sent == 2 * len(second_grant) * LAYOUT.slice_bytes
    source.close()
    reader.close()


class NoCopyConnection:
    """A connection whose slices are already in the arena."""

    transport = "none"
    defers_checksums = False

    def hung_up(self) -> bool:
        return False

    def receive_slices(self, offers: bytes, receiver: SliceReceiver, deadline_s: float) -> int:
        unpacked = unpack_offers(offers)
        return receiver.verify(unpacked, receiver.offsets(unpacked))


def test_a_layer_counts_once_it_is_complete_in_any_order() -> None:
    """A peer that sends slices in another order may delay the reader, but must not open a layer
    early."""
    layout = make_layout(num_layers=2)
    arena = Arena(layout, 3)
    receiver = SliceReceiver(arena, [0, 1, 2], 0, Counters())
    checksum = checksum_slice(arena.slice(0, 0))

    def land(*cells: tuple[int, int], wrong: int = 0) -> int:
        offers = pack_offers((row, layer, 0, checksum ^ wrong) for row, layer in cells)
        receiver.receive(NoCopyConnection(), offers, now() + 1)  # type: ignore[arg-type]
        return receiver.complete_layers(3)

    assert land((0, 0), (0, 1), (1, 1), (2, 1)) == 0
    assert land((0, 1), (0, 1), (1, 1)) == 0, "a slice that arrives twice counts once"
    assert land((1, 0)) == 0
    assert land((2, 0), wrong=1) == 0
    assert land((2, 0)) == 2


def test_a_broken_gate_is_not_opened_by_the_end() -> None:
    """The operation may end as complete although it has fewer blocks than the reader relies on."""
    gate = LayerGate()
    gate.open(2)
    gate.break_gate()
    gate.end(complete=True)
    assert gate.wait(1, now())
    assert not gate.wait(2, now())
