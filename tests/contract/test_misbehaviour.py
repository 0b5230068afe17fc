"""Tests deadlines, cancels, and peers that send invalid data or are unknown: each operation ends
exactly once and overwrites no other block."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from messenger_harness import Node, bare_socket, keys, make_layout, rogue_connection

from moonpool.protocol.transfer_events import (
    FetchEnded,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.types import BlockId, InstanceId
from moonpool_engine.transfer import listener, shm
from moonpool_engine.transfer.arena import Arena, checksum_slice
from moonpool_engine.transfer.connection import Connection
from moonpool_engine.transfer.context import TransferContext
from moonpool_engine.transfer.errors import PeerGoneError
from moonpool_engine.transfer.wire import (
    MAX_FRAME_BYTES,
    OpenStream,
    ReadBlocks,
    ReadGranted,
    Slices,
    SlicesEnd,
    StreamExpected,
    pack_offers,
)

MakeNode = Callable[..., Node]


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def wait_until(condition: Callable[[], bool]) -> None:
    by_s = soon()
    while not condition():
        assert time.monotonic() < by_s
        time.sleep(0.005)


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    made = make_node("node")
    made.fill(5)
    return made


def rogue(node: Node, transport: str) -> Connection:
    return rogue_connection(node.address, transport, node.layout, Arena(node.layout, 4))


# Deadlines:


def test_an_unexpected_stream_is_refused_after_park_s(make_node: MakeNode) -> None:
    sender, receiver = make_node("sender"), make_node("receiver", park_s=0.1)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    assert "'s' is not expected here" in sender.expect_event(SendEnded).error
    receiver.expect_silence()


def test_an_expected_stream_without_sender_ends_at_its_deadline(node: Node) -> None:
    node.messenger.expect("late", [0], 0, 120.0)
    node.messenger.expect("s", [0, 1], 2, 0.1)
    ended = node.expect_event(ReceiveEnded)
    assert (ended.stream_id, ended.incomplete) == ("s", (2, 3))
    assert "no sender came" in ended.error


def test_a_stream_that_is_never_finished_ends_at_both_deadlines(make_node: MakeNode) -> None:
    sender, receiver = make_node("sender"), make_node("receiver")
    receiver.messenger.expect("s", [0], 0, 0.3)
    sender.messenger.open_stream("s", receiver.address, 0.2)
    assert "deadline" in sender.expect_event(SendEnded).error
    assert receiver.expect_event(ReceiveEnded).error
    sender.expect_silence()
    receiver.expect_silence()


def test_a_source_that_never_answers_ends_the_fetch(make_node: MakeNode) -> None:
    source, reader = make_node("source", lease_s=120.0), make_node("reader")
    reader.messenger.fetch("f", source.address, keys(1), [0], 0.4)
    asked = source.expect_event(ReadRequested)
    assert "deadline" in reader.expect_event(FetchEnded).error
    assert source.expect_event(ReadEnded).read_id == asked.read_id
    source.messenger.grant(asked.read_id, [1])  # This grant comes too late, and is ignored.
    source.expect_silence()


def test_a_silent_listener_ends_the_fetch(node: Node, transport: str) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    unix = shm.listen("moonpool-test-silent")
    silent = PeerAddress(
        instance_id=InstanceId("silent"),
        host_id=node.address.host_id,
        unix_name="moonpool-test-silent" if transport == "shm" else "",
        tcp_host="127.0.0.1",
        tcp_port=server.getsockname()[1],
    )
    node.messenger.fetch("f", silent, keys(1), [0], 0.3)
    assert "deadline" in node.expect_event(FetchEnded).error
    server.close()
    unix.close()


def test_a_reader_that_keeps_its_blocks_loses_its_lease(
    make_node: MakeNode, transport: str
) -> None:
    source = make_node("source", lease_s=0.2)
    reader = rogue(source, transport)
    reader.send(ReadBlocks(keys=tuple(keys(2)), timeout_s=300), soon())
    asked = source.expect_event(ReadRequested)
    source.messenger.grant(asked.read_id, [0, 1])
    assert isinstance(reader.receive(soon()), ReadGranted)
    ended = source.expect_event(ReadEnded)
    assert (ended.read_id, "lease" in ended.error) == (asked.read_id, True)
    reader.close()


def test_a_reader_that_leaves_ends_its_read_at_once(node: Node, transport: str) -> None:
    reader = rogue(node, transport)
    reader.send(ReadBlocks(keys=tuple(keys(2)), timeout_s=300), soon())
    node.messenger.grant(node.expect_event(ReadRequested).read_id, [0, 1])
    reader.receive(soon())
    reader.close()
    assert node.expect_event(ReadEnded).error


# Cancels and aborts:


def test_cancel_before_and_during_a_stream(make_node: MakeNode) -> None:
    sender, receiver = make_node("sender"), make_node("receiver")
    receiver.messenger.expect("unmet", [0], 0, 120.0)
    receiver.messenger.cancel("unmet")
    assert "cancelled" in receiver.expect_event(ReceiveEnded).error
    receiver.messenger.expect("s", [0], 0, 120.0)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    sender.messenger.send("s", [(0, 0, 0)])
    wait_until(lambda: receiver.messenger.counts().received_slices == 1)
    receiver.messenger.cancel("s")
    ended = receiver.expect_event(ReceiveEnded)
    assert ("cancelled" in ended.error, ended.incomplete) == (True, (0,))
    assert ended.corrupt_slices == 0
    # The sender learns of it by the end of the connection.
    assert sender.expect_event(SendEnded).error
    receiver.messenger.cancel("s")
    receiver.expect_silence()


def test_abort_ends_both_sides_at_once(make_node: MakeNode) -> None:
    sender, receiver = make_node("sender"), make_node("receiver")
    receiver.messenger.expect("s", [0], 0, 120.0)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    sender.messenger.send("s", [(0, 0, 0)])
    wait_until(lambda: receiver.messenger.counts().received_slices == 1)
    sender.messenger.abort_stream("s")
    assert "aborted" in sender.expect_event(SendEnded).error
    ended = receiver.expect_event(ReceiveEnded)
    assert (ended.incomplete, ended.corrupt_slices) == ((0,), 0)
    sender.messenger.send("s", [(0, 0, 1)])  # The next layer that the engine sends is ignored.
    sender.messenger.finish_stream("s")
    sender.expect_silence()


def test_an_aborted_stream_ends_only_when_its_thread_has_stopped(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on, send = threading.Event(), threading.Event(), TransferContext.send_slices

    def slow_send(context: TransferContext, *arguments: Any) -> int:
        reading.set()
        go_on.wait(60)
        return send(context, *arguments)

    monkeypatch.setattr(TransferContext, "send_slices", slow_send)
    sender, receiver = make_node("sender"), make_node("receiver")
    receiver.messenger.expect("s", [0], 0, 120.0)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    sender.messenger.send("s", [(0, 0, 0)])
    assert reading.wait(60)
    sender.messenger.abort_stream("s")
    sender.expect_silence(0.1)
    go_on.set()
    assert "aborted" in sender.expect_event(SendEnded).error


@pytest.mark.long
def test_bytes_that_a_sender_writes_after_its_abort_are_in_no_received_block(
    make_node: MakeNode,
) -> None:
    """The first send of a block within a host has no checksums. Slices that are copied while the
    sender reuses its blocks must not count."""
    layout = make_layout(head_dim=16_384)  # slices of half a MiB, whose copies take a while
    sender = make_node("sender", layout=layout, num_blocks=4)
    receiver = make_node("receiver", layout=layout, num_blocks=4)
    rng, counts = random.Random(5), set()
    slices = [(i, i, layer) for layer in range(3) for i in range(4)]
    for number in range(40):
        name, meant, reused = f"s{number}", 1 + 2 * number % 250, 2 + 2 * number % 250
        sender.arena.checksums.forget(range(4))
        sender.arena.buffer[:] = bytes([meant]) * sender.arena.num_bytes
        receiver.messenger.expect(name, list(range(4)), 0, 0.2)  # the sender may never come
        sender.messenger.open_stream(name, receiver.address, 120.0)
        sender.messenger.send(name, slices)
        time.sleep(rng.uniform(0, 0.003))
        sender.messenger.abort_stream(name)
        sender.expect_event(SendEnded)
        sender.arena.checksums.forget(range(4))
        sender.arena.buffer[:] = bytes([reused]) * sender.arena.num_bytes
        ended = receiver.expect_event(ReceiveEnded)
        whole = set(range(4)) - set(ended.incomplete)
        counts.add(len(whole))
        for index in whole:
            assert receiver.block(index) == bytes([meant]) * layout.block_bytes
        for block in range(4):
            for layer in range(3):
                told = receiver.arena.checksums.get(BlockId(block), layer)
                assert told in (0, checksum_slice(receiver.arena.slice(block, layer)))
    assert 0 in counts


def test_a_second_grant_changes_nothing(make_node: MakeNode) -> None:
    source, reader = make_node("source"), make_node("reader")
    source.fill(1)
    reader.messenger.fetch("f", source.address, keys(1), [0], 120.0)
    read_id = source.expect_event(ReadRequested).read_id
    source.messenger.grant(read_id, [5])
    source.messenger.grant(read_id, [6])
    assert reader.expect_event(FetchEnded).num_blocks == 1
    assert reader.block(0) == source.block(5)


@pytest.mark.long
def test_racing_cancels_and_aborts_end_each_side_once_and_write_nothing_after(
    make_node: MakeNode,
) -> None:
    sender, receiver = make_node("sender"), make_node("receiver", park_s=0.02)
    sender.fill(1)
    rng = random.Random(11)
    slices = [(i, i, layer) for layer in range(3) for i in range(8)]
    outcomes = set()
    number = 0
    longest_s = 0.003  # The time grows, because a stream may take longer than any pause.
    # repeats until both the end and the cancel have won the race
    while number < 120 or (len(outcomes) < 2 and number < 5000):
        number += 1
        name = f"s{number}"
        receiver.arena.buffer[:] = bytes(receiver.arena.num_bytes)
        pauses = [rng.choice((0.0, 0.0, rng.uniform(0, longest_s))) for _ in range(4)]
        victim = rng.choice((sender.messenger.abort_stream, receiver.messenger.cancel))
        receiver.messenger.expect(name, list(range(8)), 0, 120.0)
        sender.messenger.open_stream(name, receiver.address, 120.0)
        strike = threading.Timer(pauses[0], victim, (name,))
        strike.start()
        for part, pause in enumerate(pauses[1:]):
            sender.messenger.send(name, slices[part * 8 : part * 8 + 8])
            time.sleep(pause / 4)
        sender.messenger.finish_stream(name)
        assert sender.expect_event(SendEnded).stream_id == name
        strike.join()
        receiver.messenger.cancel(name)  # the sender may have given up before it came
        ended = receiver.expect_event(ReceiveEnded)
        assert ended.stream_id == name
        held = bytes(receiver.arena.buffer[: 8 * receiver.layout.block_bytes])
        time.sleep(0.001)
        assert receiver.arena.buffer[: len(held)] == held  # no write comes late
        for index in set(range(8)) - set(ended.incomplete):
            assert receiver.block(index) == sender.block(index)
        outcomes.add(bool(ended.error))
        if outcomes == {True}:
            longest_s = min(2 * longest_s, 1.0)
    sender.expect_silence(0.2)
    receiver.expect_silence(0.0)
    assert outcomes == {True, False}  # proves that the race had both outcomes


def test_close_ends_everything_once_and_leaves_no_thread(transport: str) -> None:
    threads = set(threading.enumerate())
    left, right = Node("left", transport), Node("right", transport)
    right.messenger.expect("s", [0], 0, 300.0)
    left.messenger.open_stream("s", right.address, 300.0)
    left.messenger.send("s", [(0, 0, 0)])
    left.messenger.open_stream("parked", right.address, 300.0)
    left.messenger.expect("unmet", [1], 0, 300.0)
    left.messenger.fetch("f", right.address, keys(1), [2], 300.0)
    right.expect_event(ReadRequested)
    wait_until(lambda: right.messenger.counts().received_slices == 1)
    started_s = time.monotonic()
    left.close()
    right.close()
    assert time.monotonic() - started_s < 100.0, "none of the waits of 300 s is sat out"
    ends = [left.events.get_nowait() for _ in range(4)]
    assert sorted(type(e).__name__ for e in ends) == [
        "FetchEnded",
        "ReceiveEnded",
        "SendEnded",
        "SendEnded",
    ]
    assert all("closed" in getattr(e, "error", "") for e in ends)
    assert {type(right.events.get_nowait()) for _ in range(2)} == {ReceiveEnded, ReadEnded}
    assert left.events.empty()
    assert right.events.empty()
    assert set(threading.enumerate()) == threads


# Foreign and invalid peers:


@pytest.mark.parametrize("wrong", ["secret", "layout"])
def test_strangers_are_refused_on_both_sides_with_the_reason(
    make_node: MakeNode, wrong: str
) -> None:
    node = make_node("node")
    options = {"secret": b"other"} if wrong == "secret" else {"layout": make_layout(model="other")}
    stranger = make_node("stranger", **options)
    reason = "cluster secret differs" if wrong == "secret" else "block layouts differ"
    stranger.messenger.fetch("f", node.address, keys(1), [0], 120.0)
    assert reason in stranger.expect_event(FetchEnded).error
    node.messenger.expect("s", [0], 0, 120.0)
    stranger.messenger.open_stream("s", node.address, 120.0)
    assert reason in stranger.expect_event(SendEnded).error
    node.expect_silence()
    wait_until(lambda: node.messenger.counts().refused_connections >= 2)


def test_another_instance_at_the_address_is_refused(make_node: MakeNode) -> None:
    node, other = make_node("node"), make_node("other")
    stale = msgspec.structs.replace(other.address, instance_id=InstanceId("gone"))
    node.messenger.fetch("f", stale, keys(1), [0], 120.0)
    assert "'other' answers where 'gone' should be" in node.expect_event(FetchEnded).error


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack(">I", 0),
        b"\x80\x04\x95" + bytes(64),
    ],
)
def test_noise_closes_the_connection_and_nothing_else(
    node: Node, transport: str, noise: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with bare_socket(node.address, transport) as sock:
        sock.settimeout(60)
        sock.sendall(noise)
        while data := _read(sock):
            assert len(data) < 1000
    wait_until(lambda: node.messenger.counts().refused_connections == 1)
    assert len([r for r in caplog.records if "closed a connection" in r.message]) == 1
    # This node still serves reads, even its own.
    node.messenger.fetch("f", node.address, keys(1), [0], 120.0)
    node.messenger.grant(node.expect_event(ReadRequested).read_id, [])
    ends = [node.events.get(timeout=60) for _ in range(2)]
    assert {(type(e), e.error) for e in ends} == {(FetchEnded, ""), (ReadEnded, "")}


def test_silent_strangers_are_few_and_do_not_keep_peers_out(
    node: Node, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_HALF_OPEN", 4)
    strangers = [bare_socket(node.address, transport) for _ in range(20)]
    wait_until(lambda: node.messenger.counts().refused_connections == 16)
    node.messenger.fetch("f", node.address, keys(1), [0], 120.0)
    node.messenger.grant(node.expect_event(ReadRequested).read_id, [])
    ends = [node.events.get(timeout=60) for _ in range(2)]
    assert {(type(e), e.error) for e in ends} == {(FetchEnded, ""), (ReadEnded, "")}
    for stranger in strangers:
        stranger.close()


def test_strangers_that_leave_at_once_do_not_end_the_listener(node: Node, transport: str) -> None:
    """The listener may accept a connection that the peer has already reset."""
    for _ in range(50):
        with bare_socket(node.address, transport) as sock:
            sock.sendall(b"x")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    node.messenger.fetch("f", node.address, keys(1), [0], 120.0)
    node.messenger.grant(node.expect_event(ReadRequested).read_id, [])
    ends = [node.events.get(timeout=60) for _ in range(2)]
    assert {(type(e), e.error) for e in ends} == {(FetchEnded, ""), (ReadEnded, "")}


def _read(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionResetError:
        return b""


def test_oversized_and_malformed_frames_after_the_handshake_are_refused(
    node: Node, transport: str
) -> None:
    malformed = b"\x81\xa1a"
    right_sum = checksum_slice(memoryview(malformed)) & 0xFFFFFFFF
    for body in (
        struct.pack(">II", MAX_FRAME_BYTES + 1, 0),
        struct.pack(">II", 3, right_sum) + malformed,
        struct.pack(">II", 3, right_sum ^ 1) + malformed,
    ):
        connection = rogue(node, transport)
        with socket.socket(fileno=_dup(connection)) as sock:
            sock.sendall(body)
        with pytest.raises(PeerGoneError):
            connection.receive(soon())
        connection.close()
    wait_until(lambda: node.messenger.counts().refused_connections == 3)


def _dup(connection: Connection) -> int:
    return os.dup(connection.fileno())


@pytest.mark.parametrize(
    ("index", "layer"), [(1, 0), (4, 0), (-1, 0), (2, 3), (2, -1), (1 << 40, 0)]
)
def test_a_slice_outside_what_is_expected_breaks_the_stream(
    node: Node, transport: str, index: int, layer: int
) -> None:
    before = bytes(node.arena.buffer)
    node.messenger.expect("s", [10, 11], 2, 120.0)
    invalid_peer = rogue(node, transport)
    invalid_peer.send(OpenStream(stream_id="s", timeout_s=120), soon())
    assert invalid_peer.receive(soon()) == StreamExpected(first_index=2, num_indices=2)
    offer = Slices(offers=pack_offers([(index, layer, 0, 0)]))
    invalid_peer.send_slices(offer, Arena(node.layout, 1), soon())
    ended = node.expect_event(ReceiveEnded)
    assert "outside what is expected" in ended.error
    assert ended.incomplete == (2, 3)
    assert bytes(node.arena.buffer) == before
    invalid_peer.close()


@pytest.mark.parametrize("block_id", [4, -1, 1 << 50])
def test_a_block_the_sender_does_not_have_breaks_the_stream(block_id: int) -> None:
    node = Node("node", "shm")
    node.messenger.expect("s", [10], 0, 120.0)
    invalid_peer = rogue(node, "shm")
    invalid_peer.send(OpenStream(stream_id="s", timeout_s=120), soon())
    invalid_peer.receive(soon())
    invalid_peer.send_slices(Slices(offers=pack_offers([(0, 0, block_id, 0)])), node.arena, soon())
    assert "which it lacks" in node.expect_event(ReceiveEnded).error
    invalid_peer.close()
    node.close()


def test_a_second_sender_of_a_stream_is_refused(make_node: MakeNode) -> None:
    first, second, receiver = make_node("first"), make_node("second"), make_node("receiver")
    receiver.messenger.expect("s", [0], 0, 120.0)
    first.messenger.open_stream("s", receiver.address, 120.0)
    first.messenger.send("s", [(0, 0, layer) for layer in range(3)])
    wait_until(lambda: receiver.messenger.counts().received_slices == 3)
    second.messenger.open_stream("s", receiver.address, 120.0)
    assert "has a sender already" in second.expect_event(SendEnded).error
    first.messenger.finish_stream("s")
    assert receiver.expect_event(ReceiveEnded).incomplete == ()
    assert first.expect_event(SendEnded).error == ""


def test_a_sender_that_gave_up_while_parked_does_not_take_the_stream(make_node: MakeNode) -> None:
    sender, receiver = make_node("sender"), make_node("receiver")
    sender.messenger.open_stream("s", receiver.address, 120.0)
    time.sleep(0.1)
    sender.messenger.abort_stream("s")
    assert sender.expect_event(SendEnded).error
    receiver.messenger.expect("s", [0], 0, 120.0)
    time.sleep(0.05)
    sender.messenger.open_stream("s", receiver.address, 120.0)
    sender.messenger.send("s", [(0, 0, layer) for layer in range(3)])
    sender.messenger.finish_stream("s")
    assert receiver.expect_event(ReceiveEnded).error == ""


def test_messages_out_of_turn_close_the_connection(node: Node, transport: str) -> None:
    connection = rogue(node, transport)
    connection.send(SlicesEnd(), soon())
    with pytest.raises(PeerGoneError):
        connection.receive(soon())
    connection.close()


def test_invalid_calls_of_the_own_worker_raise(node: Node) -> None:
    with pytest.raises(ValueError, match="outside the arena"):
        node.messenger.expect("s", [32], 0, 1.0)
    with pytest.raises(ValueError, match="2 keys but 1 blocks"):
        node.messenger.fetch("f", node.address, keys(2), [0], 1.0)
    node.messenger.expect("s", [0], 0, 300.0)
    with pytest.raises(ValueError, match="expected already"):
        node.messenger.expect("s", [1], 0, 1.0)
    node.messenger.open_stream("o", node.address, 120.0)
    node.messenger.send("o", [(0, 99, 0)])
    node.messenger.expect("o", [0], 0, 120.0)
    ends = [node.events.get(timeout=60) for _ in range(2)]
    [error] = [e.error for e in ends if isinstance(e, SendEnded)]
    assert "outside" in error
