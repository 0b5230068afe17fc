"""Every transport between correct peers brings the right bytes, and reports each end once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
from messenger_harness import NUM_BLOCKS, Node, keys, make_layout

from moonpool.protocol.transfer_events import (
    FetchEnded,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.types import BlockId
from moonpool_engine.transfer.arena import checksum_slice
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.shm import ShmConnection

MakeNode = Callable[..., Node]


@pytest.fixture
def pair(make_node: MakeNode) -> tuple[Node, Node]:
    sender, receiver = make_node("sender"), make_node("receiver")
    sender.fill(1)
    receiver.fill(2)
    return sender, receiver


def all_slices(node: Node, num_blocks: int) -> list[tuple[int, int, int]]:
    return [(i, i, layer) for layer in range(node.layout.num_layers) for i in range(num_blocks)]


def test_fetch_brings_the_blocks_of_the_keys_in_order(
    pair: tuple[Node, Node], transport: str
) -> None:
    source, reader = pair
    reader.messenger.fetch("f", source.address, keys(4), [10, 11, 12, 13], 120.0)
    asked = source.expect_event(ReadRequested)
    assert list(asked.keys) == keys(4)
    source.messenger.grant(asked.read_id, [7, 3, 5, 0])
    ended = reader.expect_event(FetchEnded)
    assert (ended.num_blocks, ended.corrupt_slices, ended.error) == (4, 0, "")
    assert ended.num_bytes == 4 * source.layout.block_bytes
    for here, there in zip([10, 11, 12, 13], [7, 3, 5, 0], strict=True):
        assert reader.block(here) == source.block(there)
    assert source.expect_event(ReadEnded).error == ""
    assert source.messenger.counts().sent_bytes == {transport: ended.num_bytes}
    assert reader.messenger.counts().received_bytes == {transport: ended.num_bytes}


def test_a_partial_grant_leaves_the_other_blocks_alone(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    before = reader.block(2)
    reader.messenger.fetch("f", source.address, keys(3), [0, 1, 2], 120.0)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [4, 5])
    assert reader.expect_event(FetchEnded).num_blocks == 2
    assert reader.block(2) == before
    assert reader.block(1) == source.block(5)


def test_unknown_keys_are_an_empty_fetch_not_an_error(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    reader.messenger.fetch("f", source.address, keys(3), [0, 1, 2], 120.0)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [])
    ended = reader.expect_event(FetchEnded)
    assert (ended.num_blocks, ended.error) == (0, "")
    assert source.expect_event(ReadEnded).error == ""


def test_a_corrupt_slice_ends_the_fetched_prefix(make_node: MakeNode) -> None:
    hashed = iter(range(1000))
    wrong = 1 * 4 + 2  # Layers come in order, so this is layer 1 of the third block.

    def lie_once(view: memoryview) -> int:
        return checksum_slice(view) ^ (next(hashed) == wrong)

    source, reader = make_node("source", checksum=lie_once), make_node("reader")
    reader.messenger.fetch("f", source.address, keys(4), [0, 1, 2, 3], 120.0)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [0, 1, 2, 3])
    ended = reader.expect_event(FetchEnded)
    assert (ended.num_blocks, ended.corrupt_slices) == (2, 1)
    assert "1 slices corrupt" in source.expect_event(ReadEnded).error
    assert reader.messenger.counts().corrupt_slices == 1


def test_stream_slices_may_come_in_any_order_and_twice(pair: tuple[Node, Node]) -> None:
    sender, receiver = pair
    rng = random.Random(7)
    slices = all_slices(sender, 20)
    slices += rng.sample(slices, 10)
    rng.shuffle(slices)
    receiver.messenger.expect("s", list(range(31, 11, -1)), 0, 120.0)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    while slices:
        sender.messenger.send("s", slices[:7])
        del slices[:7]
    sender.messenger.finish_stream("s")
    ended = receiver.expect_event(ReceiveEnded)
    assert (ended.incomplete, ended.error) == ((), "")
    assert sender.expect_event(SendEnded).error == ""
    assert all(receiver.block(31 - i) == sender.block(i) for i in range(20))


def test_indices_the_receiver_has_are_not_sent(pair: tuple[Node, Node]) -> None:
    sender, receiver = pair
    before = receiver.block(0)
    receiver.messenger.expect("s", [8, 9], 3, 120.0)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    sender.messenger.send("s", all_slices(sender, 5))
    sender.messenger.finish_stream("s")
    ended = receiver.expect_event(ReceiveEnded)
    assert (ended.incomplete, ended.error) == ((), "")
    assert ended.num_bytes == sender.expect_event(SendEnded).num_bytes
    assert ended.num_bytes == 2 * sender.layout.block_bytes
    assert [receiver.block(8), receiver.block(9)] == [sender.block(3), sender.block(4)]
    assert receiver.block(0) == before


def test_corrupt_and_missing_slices_are_named_by_index(make_node: MakeNode) -> None:
    sender, receiver = make_node("sender"), make_node("receiver")
    sender.arena.checksums.set(BlockId(5), 2, checksum_slice(sender.arena.slice(5, 2)))
    sender.arena.slice(5, 2)[0] ^= 99
    receiver.messenger.expect("s", list(range(4)), 4, 120.0)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    lost = (6, 6, 0)
    sender.messenger.send("s", [item for item in all_slices(sender, 8) if item != lost])
    sender.messenger.finish_stream("s")
    ended = receiver.expect_event(ReceiveEnded)
    assert (ended.incomplete, ended.corrupt_slices) == ((5, 6), 1)
    assert "2 blocks arrived corrupt" in sender.expect_event(SendEnded).error


def test_a_first_send_gives_both_sides_the_checksums(pair: tuple[Node, Node]) -> None:
    """Whether changes in either memory are detected after the first send, whichever side computed
    the checksums."""
    sender, receiver = pair
    sender.arena.checksums.set(BlockId(1), 0, checksum_slice(sender.arena.slice(1, 0)))
    for stream, first in (("s", 4), ("t", 8)):
        receiver.messenger.expect(stream, list(range(first, first + 4)), 0, 120.0)
        sender.messenger.open_stream(stream, receiver.address, 120.0)
        sender.messenger.send(stream, all_slices(sender, 4))
        sender.messenger.finish_stream(stream)
        ended = receiver.expect_event(ReceiveEnded)
        assert (ended.incomplete, ended.error) == ((2,) if first == 8 else (), "")
        sender.expect_event(SendEnded)
        for block in range(4):
            for layer in range(sender.layout.num_layers):
                there = receiver.arena.checksums.get(BlockId(first + block), layer)
                here = sender.arena.checksums.get(BlockId(block), layer)
                changed = first == 8 and (block, layer) == (2, 1)
                assert here == checksum_slice(receiver.arena.slice(4 + block, layer))
                assert there == (0 if changed else here)
        sender.arena.slice(2, 1)[5] ^= 1


@pytest.mark.parametrize("named", [False, True], ids=["without checksums", "with checksums"])
def test_slices_are_missing_if_the_sender_hung_up_while_they_were_copied(
    monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Without checksums, the receiver could not detect that the sender reused its blocks. With
    checksums, the receiver would report the new bytes as damage, although no data was damaged."""
    sender, receiver = Node("sender", "shm"), Node("receiver", "shm")
    monkeypatch.setattr(ShmConnection, "defers_checksums", not named)
    if named:
        for block in (0, 1):
            for layer in range(sender.layout.num_layers):
                checksum = checksum_slice(sender.arena.slice(BlockId(block), layer))
                sender.arena.checksums.set(BlockId(block), layer, checksum)
            sender.arena.slice(BlockId(block), 0)[0] ^= 1
    try:
        monkeypatch.setattr(FrameSocket, "hung_up", lambda frames: True)
        receiver.messenger.expect("s", [4, 5], 0, 120.0)
        sender.messenger.open_stream("s", receiver.address, 120.0)
        sender.messenger.send("s", all_slices(sender, 2))
        sender.messenger.finish_stream("s")
        ended = receiver.expect_event(ReceiveEnded)
        assert ended.incomplete == (0, 1) and ended.corrupt_slices == 0
        assert receiver.messenger.counts().corrupt_slices == 0
        assert "while its slices were copied" in ended.error
        assert receiver.arena.checksums.get(BlockId(4), 0) == 0
        assert sender.expect_event(SendEnded).error
    finally:
        sender.close()
        receiver.close()


def test_a_stream_may_be_expected_after_its_sender_connected(pair: tuple[Node, Node]) -> None:
    sender, receiver = pair
    sender.messenger.open_stream("s", receiver.address, 120.0)
    sender.messenger.send("s", all_slices(sender, 2))
    sender.messenger.finish_stream("s")
    time.sleep(0.1)
    receiver.messenger.expect("s", [0, 1], 0, 120.0)
    assert receiver.expect_event(ReceiveEnded).incomplete == ()
    assert sender.expect_event(SendEnded).error == ""


@pytest.mark.parametrize("timeout_s", [1e9, float("inf")])
def test_a_very_long_timeout_is_valid(pair: tuple[Node, Node], timeout_s: float) -> None:
    sender, receiver = pair
    receiver.messenger.expect("s", [0], 0, timeout_s)
    sender.messenger.open_stream("s", receiver.address, timeout_s)
    sender.messenger.send("s", all_slices(sender, 1))
    sender.messenger.finish_stream("s")
    assert receiver.expect_event(ReceiveEnded).incomplete == ()
    assert sender.expect_event(SendEnded).error == ""


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_deadline_already_passed_still_ends_each_operation_once(
    pair: tuple[Node, Node], timeout_s: float
) -> None:
    left, right = pair
    left.messenger.fetch("f", right.address, keys(1), [0], timeout_s)
    assert left.expect_event(FetchEnded).error
    left.messenger.open_stream("s", right.address, timeout_s)
    assert left.expect_event(SendEnded).error
    left.messenger.expect("s", [0], 0, timeout_s)
    assert left.expect_event(ReceiveEnded).error
    left.expect_silence()
    right.expect_silence()


def test_nothing_to_send_is_a_complete_stream(pair: tuple[Node, Node]) -> None:
    sender, receiver = pair
    receiver.messenger.expect("s", [], 2, 120.0)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    sender.messenger.send("s", all_slices(sender, 2))
    sender.messenger.finish_stream("s")
    assert receiver.expect_event(ReceiveEnded).error == ""
    assert sender.expect_event(SendEnded).num_bytes == 0


def test_many_streams_and_fetches_at_once(make_node: MakeNode) -> None:
    # slices of 32 KiB, which fill the sockets, so that sends are partial
    layout = make_layout(head_dim=1024)
    left, right = make_node("left", layout=layout), make_node("right", layout=layout)
    left.fill(3)
    per_stream, streams = 2, NUM_BLOCKS // 4
    for number in range(streams):
        blocks = range(number * per_stream, (number + 1) * per_stream)
        name = f"s{number}"
        right.messenger.expect(name, list(blocks), 0, 120.0)
        left.messenger.open_stream(name, right.address, 120.0)
        mine = [(i, b, layer) for layer in range(3) for i, b in enumerate(blocks)]
        left.messenger.send(name, mine)
        left.messenger.finish_stream(name)
        target = [b + NUM_BLOCKS // 2 for b in blocks]
        right.messenger.fetch(f"f{number}", left.address, keys(per_stream), target, 120.0)
    received, fetched, sent, read = [], [], [], []
    while len(sent) + len(read) < 2 * streams:
        event = left.events.get(timeout=60)
        if isinstance(event, ReadRequested):
            number = len(read) + len(sent)
            left.messenger.grant(event.read_id, [0, 1])
        else:
            (sent if isinstance(event, SendEnded) else read).append(event)
            assert not event.error, event
    while len(received) + len(fetched) < 2 * streams:
        event = right.events.get(timeout=60)
        (received if isinstance(event, ReceiveEnded) else fetched).append(event)
    assert {(e.incomplete, e.error) for e in received} == {((), "")}
    assert {(e.num_blocks, e.error) for e in fetched} == {(per_stream, "")}
    half = NUM_BLOCKS // 2
    assert all(right.block(b) == left.block(b) for b in range(half))
    assert all(right.block(half + b) == left.block(b % 2) for b in range(half))


def test_tcp_is_used_if_shared_memory_fails() -> None:
    source, reader = Node("source", "shm"), Node("reader", "shm")
    broken = msgspec.structs.replace(source.address, unix_name="moonpool-nobody-listens-here")
    reader.messenger.fetch("f", broken, keys(1), [0], 120.0)
    source.messenger.grant(source.expect_event(ReadRequested).read_id, [3])
    assert reader.expect_event(FetchEnded).num_blocks == 1
    assert set(reader.messenger.counts().received_bytes) == {"tcp"}
    source.close()
    reader.close()


def test_two_hundred_streams_leave_no_descriptor_and_no_thread(pair: tuple[Node, Node]) -> None:
    sender, receiver = pair

    def run(name: str) -> None:
        receiver.messenger.expect(name, [0], 0, 120.0)
        sender.messenger.open_stream(name, receiver.address, 120.0)
        sender.messenger.send(name, all_slices(sender, 1))
        sender.messenger.finish_stream(name)
        assert sender.expect_event(SendEnded).error == ""
        assert receiver.expect_event(ReceiveEnded).error == ""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    run("first")
    time.sleep(0.2)
    before = held()
    for number in range(200):
        run(f"s{number}")
    by_s = time.monotonic() + 60
    while any(now > then for now, then in zip(held(), before, strict=True)):
        assert time.monotonic() < by_s, (held(), before)
        time.sleep(0.05)


def test_send_returns_though_the_stream_is_parked(pair: tuple[Node, Node]) -> None:
    sender, receiver = pair
    # The stream is parked, because nobody expects it yet.
    sender.messenger.open_stream("s", receiver.address, 120.0)
    slices = all_slices(sender, 32)
    for _ in range(20):
        sender.messenger.send("s", slices[:1])
    # no event has come, so no call has waited for the end of the stream
    assert sender.events.empty()
    sender.messenger.abort_stream("s")
    assert sender.expect_event(SendEnded).error
