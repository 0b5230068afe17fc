"""Tests properties that persist over several transfers on every transport: checksums that outlive
their first send, leases of slow readers, kept connections, and the fallback to the next
transport."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest
from messenger_harness import Node, keys, make_layout, rogue_connection

from moonpool.protocol.transfer_events import (
    FetchEnded,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool_engine.transfer import context as transfer_context
from moonpool_engine.transfer import listener as inbound
from moonpool_engine.transfer import slice_receiver as receivers
from moonpool_engine.transfer.arena import Arena, checksum_slice
from moonpool_engine.transfer.counters import Counters
from moonpool_engine.transfer.errors import PeerGoneError
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.shm import ShmConnection
from moonpool_engine.transfer.slice_receiver import SliceReceiver
from moonpool_engine.transfer.wire import ReadBlocks, ReadGranted, ReadRenewed, Slices

MakeNode = Callable[..., Node]
PLAIN = pytest.mark.parametrize("slice_copier", ["plain"], indirect=True)
"""A slice copier whose hash function a test can replace."""


def fetch(reader: Node, source: Node, sources: list[int], targets: list[int]) -> FetchEnded:
    """Runs one complete read, until the source has also reported its end."""
    count = len(targets)
    reader.messenger.fetch("f", source.address, keys(count), targets, 120.0)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, sources)
    ended = reader.expect_event(FetchEnded)
    source.expect_event(ReadEnded)
    return ended


def stream(sender: Node, receiver: Node, blocks: list[int], targets: list[int]) -> ReceiveEnded:
    receiver.messenger.expect("s", targets, 0, 120.0)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    layers = range(sender.layout.num_layers)
    sender.messenger.send("s", [(i, b, layer) for layer in layers for i, b in enumerate(blocks)])
    sender.messenger.finish_stream("s")
    sender.expect_event(SendEnded)
    return receiver.expect_event(ReceiveEnded)


# Integrity:


def test_a_bit_that_flips_in_the_source_after_a_first_send_is_found(make_node: MakeNode) -> None:
    source, reader = make_node("source"), make_node("reader")
    source.fill(1)
    assert fetch(reader, source, [3, 4], [0, 1]).num_blocks == 2
    source.arena.slice(4, 2)[17] ^= 0x20
    ended = fetch(reader, source, [3, 4], [10, 11])
    assert (ended.num_blocks, ended.corrupt_slices) == (1, 1)
    assert stream(source, reader, [3, 4], [20, 21]).incomplete == (1,)
    assert reader.messenger.counts().corrupt_slices == 2


@pytest.mark.parametrize("how", [fetch, stream])
def test_a_bit_that_flips_where_a_block_was_received_is_found_at_the_next_hop(
    make_node: MakeNode, how: Callable[..., object]
) -> None:
    first, second, third = (make_node(name) for name in ("first", "second", "third"))
    first.fill(1)
    how(second, first, [3], [7]) if how is fetch else how(first, second, [3], [7])
    assert second.block(7) == first.block(3)
    second.arena.slice(7, 0)[0] ^= 1
    assert fetch(third, second, [7], [0]).num_blocks == 0


def test_a_source_learns_which_of_its_blocks_changed_and_only_those(make_node: MakeNode) -> None:
    source, reader = make_node("source"), make_node("reader")
    source.fill(1)
    fetch(reader, source, [3, 4, 5], [0, 1, 2])
    source.arena.slice(4, 0)[5] ^= 4
    reader.messenger.fetch("f", source.address, keys(3), [0, 1, 2], 120.0)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [3, 4, 5])
    assert source.expect_event(ReadEnded).corrupt == (4,)
    assert source.messenger.counts().corrupt_slices == 1


@PLAIN
def test_damage_in_transit_is_not_attributed_to_the_source(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = make_node("source"), make_node("reader")
    monkeypatch.setattr(receivers, "checksum_slice", lambda view: checksum_slice(view) ^ 1)
    reader.messenger.fetch("f", source.address, keys(1), [0], 120.0)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [3])
    ended = source.expect_event(ReadEnded)
    assert (ended.corrupt, "3 slices" in ended.error) == ((), True)
    assert source.messenger.counts().corrupt_slices == 0


def test_a_block_that_is_written_again_is_hashed_again(make_node: MakeNode) -> None:
    source, reader = make_node("source"), make_node("reader")
    source.fill(1)
    fetch(reader, source, [3, 4], [0, 1])
    tokens = source.layout.block_tokens
    # forgets the first token of the second block
    source.messenger.forget_checksums([3, 4], tokens, tokens + 1)
    source.arena.slice(4, 1)[:] = b"z" * source.layout.slice_bytes
    assert fetch(reader, source, [3, 4], [0, 1]).num_blocks == 2
    assert reader.block(1) == source.block(4)
    source.arena.slice(3, 1)[0] ^= 1  # without notice
    assert fetch(reader, source, [3, 4], [0, 1]).num_blocks == 0


def test_a_block_that_is_received_again_is_hashed_again(make_node: MakeNode) -> None:
    first, second = make_node("first"), make_node("second")
    first.fill(1)
    second.fill(2)
    fetch(second, first, [3], [7])
    fetch(second, first, [4], [7])
    stream(first, second, [5], [7])
    assert fetch(first, second, [7], [0]).num_blocks == 1
    assert first.block(0) == first.block(5)


def test_a_late_reader_detects_a_block_reused_after_the_lease() -> None:
    """Runs over shared memory only, because other transports have sent the bytes before the lease
    can end. The source may reuse the block, so this does not count as damage."""
    source = Node("source", "shm", lease_s=0.1)
    source.fill(1)
    own = Arena(source.layout, 4)
    late = rogue_connection(source.address, "shm", source.layout, own)
    by_s = time.monotonic() + 60
    late.send(ReadBlocks(keys=tuple(keys(2)), timeout_s=60), by_s)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [0, 1])
    assert isinstance(late.receive(by_s), ReadGranted)
    offered = late.receive(by_s)
    assert isinstance(offered, Slices)
    assert "lease" in source.expect_event(ReadEnded).error
    source.arena.slice(1, 0)[:] = b"the next owner's".ljust(source.layout.slice_bytes)
    receiver = SliceReceiver(own, [0, 1], 0, Counters())
    with pytest.raises(PeerGoneError, match="while its slices were copied"):
        receiver.receive(late, offered.offers, by_s)
    assert (receiver.complete_blocks(), receiver.corrupt_slices) == (1, 0)
    late.close()
    source.close()


# Leases:


@pytest.mark.long
@PLAIN
def test_a_reader_slower_than_the_lease_renews_it(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_s = 1.5
    layout = make_layout(head_dim=8192)  # 256 KiB slices: two are moved and hashed at a time
    source = make_node("source", layout=layout, num_blocks=4, lease_s=lease_s)
    reader = make_node("reader", layout=layout, num_blocks=4)

    def slow(view: memoryview) -> int:
        time.sleep(0.2)
        return checksum_slice(view)

    monkeypatch.setattr(receivers, "checksum_slice", slow)
    began_s = time.monotonic()
    assert fetch(reader, source, [0, 1, 2, 3], [0, 1, 2, 3]).error == ""
    assert time.monotonic() - began_s > 1.2 * lease_s
    assert source.messenger.counts().failed_operations == 0


def test_a_lease_cannot_be_renewed_beyond_the_requested_timeout(
    make_node: MakeNode, transport: str
) -> None:
    source = make_node("source", lease_s=0.2)
    reader = rogue_connection(source.address, transport, source.layout, Arena(source.layout, 1))
    reader.send(ReadBlocks(keys=tuple(keys(1)), timeout_s=0.6), time.monotonic() + 60)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [0])
    by_s = time.monotonic() + 60

    def renew_for_ever() -> None:
        while time.monotonic() < by_s:
            reader.send(ReadRenewed(), by_s)
            time.sleep(0.05)

    with pytest.raises(PeerGoneError):
        renew_for_ever()
    assert source.expect_event(ReadEnded).error
    reader.close()


# Connections:


def serving(node: Node) -> int:
    name = f"messenger-serve-{node.address.instance_id}"
    return sum(thread.name == name for thread in threading.enumerate())


def test_one_connection_serves_operation_after_operation(make_node: MakeNode) -> None:
    left, right = make_node("left"), make_node("right")
    left.fill(1)
    for block in range(20):
        assert fetch(right, left, [block], [block]).num_blocks == 1
        assert stream(right, left, [block], [31 - block]).incomplete == ()
    assert (serving(left), serving(right)) == (1, 0)


def test_connections_kept_to_a_peer_end_with_it(make_node: MakeNode) -> None:
    source, reader = make_node("source"), make_node("reader")
    threads = threading.active_count()
    fetch(reader, source, [0], [0])
    assert threading.active_count() == threads + 2
    source.close()
    by_s = time.monotonic() + 60
    while threading.active_count() > threads - 1:
        assert time.monotonic() < by_s, threading.enumerate()
        time.sleep(0.01)


def test_the_connection_idle_longest_makes_room_and_is_opened_again(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbound, "MAX_CONNECTIONS", 2)
    source = make_node("source")
    readers = [make_node(f"reader {number}") for number in range(3)]
    for number in (0, 1, 2, 0, 1):
        assert fetch(readers[number], source, [0], [0]).num_blocks == 1
    by_s = time.monotonic() + 60
    while serving(source) > 2:  # waits until the closed connections have ended
        assert time.monotonic() < by_s
        time.sleep(0.01)
    assert source.messenger.counts().refused_connections == 0


@pytest.mark.long
def test_an_operation_that_failed_leaves_no_connection_behind(make_node: MakeNode) -> None:
    source, reader = make_node("source"), make_node("reader")
    # The timeout is long enough for a handshake on a busy machine.
    reader.messenger.fetch("late", source.address, keys(1), [0], 3.0)
    late = source.expect_event(ReadRequested)
    assert reader.expect_event(FetchEnded).error
    source.expect_event(ReadEnded)
    source.messenger.grant(late.read_id, [9])
    source.fill(3)
    assert fetch(reader, source, [1], [0]).num_blocks == 1
    # the content is that of the present grant, not of the late one
    assert reader.block(0) == source.block(1)


def test_a_read_that_fails_midway_continues_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout(head_dim=8192)
    monkeypatch.setattr(transfer_context, "FIRST_BYTES", 2 * layout.slice_bytes)
    source = Node("source", "shm", layout=layout, num_blocks=4)
    reader = Node("reader", "shm", layout=layout, num_blocks=4)
    source.fill(1)
    take, calls = ShmConnection.receive_slices, []

    def failing(self: ShmConnection, *arguments: object) -> int:
        calls.append(arguments)
        if len(calls) == 4:
            raise PeerGoneError("shared memory broke")
        return take(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ShmConnection, "receive_slices", failing)
    reader.messenger.fetch("f", source.address, keys(4), [0, 1, 2, 3], 120.0)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [0, 1, 2, 3])
    # The source may get the next read request before it has noticed the end of the first read.
    events = {type(event): event for event in (source.events.get(timeout=60.0) for _ in range(2))}
    assert events[ReadEnded].error
    source.messenger.grant(events[ReadRequested].read_id, [0, 1, 2, 3])
    ended = reader.expect_event(FetchEnded)
    assert (ended.num_blocks, ended.error) == (4, "")
    assert all(reader.block(b) == source.block(b) for b in range(4))
    received = reader.messenger.counts().received_bytes
    # The first layer of all four blocks had arrived, and half of the second.
    assert received == {"shm": 6 * layout.slice_bytes, "tcp": 8 * layout.slice_bytes}
    source.close()
    reader.close()


def fetch_with_fallback(reader: Node, source: Node, sources: list[int], targets: list[int]) -> int:
    """Runs a fetch to its end. After each transport that fails, the source gets another read
    request, which this function grants."""
    reader.messenger.fetch("f", source.address, keys(len(targets)), targets, 120.0)
    num_open = 0
    while reader.events.empty() or num_open:
        try:
            event = source.events.get(timeout=0.02)
        except queue.Empty:
            continue
        num_open += 1 if isinstance(event, ReadRequested) else -1
        if isinstance(event, ReadRequested):
            asked = len(event.keys)
            source.messenger.grant(event.read_id, sources[len(sources) - asked :])
    return reader.expect_event(FetchEnded).num_blocks


@pytest.mark.parametrize("how", [fetch, stream])
@pytest.mark.parametrize("bit", [1, 2])
def test_a_bit_that_flips_in_an_offer_is_detected(
    make_node: MakeNode, how: Callable[..., object], bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the source offers an intact slice under the index of another, the slice would be written
    to the wrong place."""
    source, reader = make_node("source"), make_node("reader")
    source.fill(1)
    send_all, place = FrameSocket._send_all, 0

    def spoil(self: FrameSocket, buffers: list[memoryview], deadline_s: float) -> None:
        for number, buffer in enumerate(buffers):
            start = bytes(buffer).find(b"offers")
            if start >= 0 and start + place < len(buffer):
                spoiled = bytearray(buffer)
                spoiled[start + place] ^= bit
                buffers[number] = memoryview(spoiled)
        send_all(self, buffers, deadline_s)

    monkeypatch.setattr(FrameSocket, "_send_all", spoil)
    for place in range(8, 60, 3):  # noqa: B007 - `spoil` reads it
        if how is fetch:
            wrong = set(range(fetch_with_fallback(reader, source, [3, 4, 5, 6], [0, 1, 2, 9]), 4))
        else:
            wrong = set(stream(source, reader, [3, 4, 5, 6], [0, 1, 2, 9]).incomplete)
        for index, target in enumerate([0, 1, 2, 9]):
            assert index in wrong or reader.block(target) == source.block(3 + index)
