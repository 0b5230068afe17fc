"""A large fetch over TCP uses several connections at once, but is one fetch to its caller."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from messenger_harness import Node, keys, make_layout

from moonpool.protocol.transfer_events import FetchEnded, FetchProgress, ReadEnded, ReadRequested
from moonpool_engine.transfer import fetch as fetch_module
from moonpool_engine.transfer.fetch import split
from moonpool_engine.transfer.gate import LayerGate
from moonpool_engine.transfer.messenger import TCP_CONNECTIONS
from moonpool_engine.transfer.reshard import NOWHERE
from moonpool_lab.profiling.transfer_flows import FlowLimit

MakeNode = Callable[..., Node]
NUM_LAYERS = 3


@pytest.fixture
def transport() -> str:
    return "tcp"


@pytest.fixture
def pair(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    """Makes two nodes whose fetches of more than one block use several connections."""
    monkeypatch.setattr(fetch_module, "PART_BYTES", 1)
    source, reader = make_node("source"), make_node("reader")
    source.fill(1)
    reader.fill(2)
    return source, reader


def number_of(key: bytes) -> int:
    return int.from_bytes(key, "big")


def read_requests(source: Node, parts: int = TCP_CONNECTIONS) -> list[ReadRequested]:
    """Returns the read requests, in the order of their blocks."""
    reads = [source.expect_event(ReadRequested) for _ in range(parts)]
    return sorted(reads, key=lambda read: read.keys)


def grant_all(source: Node, reads: list[ReadRequested]) -> None:
    for read in reads:
        source.messenger.grant(read.read_id, [number_of(key) for key in read.keys])


def test_every_block_is_in_one_part_and_small_fetches_are_not_split() -> None:
    for blocks in range(1, 200, 7):
        for most in (1, 3, 4):
            parts = split(blocks, 1 << 20, most)
            assert [row for part in parts for row in part] == list(range(blocks))
            assert len(parts) == max(1, min(most, blocks // 4))
    assert split(0, 1 << 20, 4) == [range(0)]
    assert split(3, 1 << 30, 4) == [range(1), range(1, 2), range(2, 3)]


def test_all_blocks_arrive_and_the_end_is_reported_once(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    places = list(range(20, 31))
    for _ in range(2):  # the second round uses the kept connections
        reader.fill(2)
        reader.messenger.fetch("f", source.address, keys(11), places, 120.0)
        reads = read_requests(source)
        assert [key for read in reads for key in read.keys] == keys(11)
        grant_all(source, reads)
        ended = reader.expect_event(FetchEnded)
        assert (ended.num_blocks, ended.error) == (11, "")
        assert ended.num_bytes == 11 * source.layout.block_bytes
        assert all(reader.block(20 + n) == source.block(n) for n in range(11))
        assert {source.expect_event(ReadEnded).read_id for _ in reads} == {
            read.read_id for read in reads
        }
        reader.expect_silence()


def test_blocks_that_are_not_granted_end_the_prefix(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    gate = LayerGate()
    reader.messenger.fetch("f", source.address, keys(12), list(range(12)), 120.0, gate)
    reads = read_requests(source)
    source.messenger.grant(reads[0].read_id, [0, 1, 2])
    source.messenger.grant(reads[1].read_id, [3])
    source.messenger.grant(reads[2].read_id, [6, 7, 8])
    source.messenger.grant(reads[3].read_id, [])
    told = reader.expect_event(FetchProgress)
    while isinstance(told, FetchProgress):
        assert told.num_blocks == 4
        told = reader.events.get(timeout=60)
    assert isinstance(told, FetchEnded)
    assert (told.num_blocks, told.error) == (4, "")
    assert gate.wait(NUM_LAYERS - 1, time.monotonic() + 60)
    assert all(reader.block(n) == source.block(n) for n in range(4))


def test_the_gate_waits_for_every_part(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    gate = LayerGate()
    reader.messenger.fetch("f", source.address, keys(8), list(range(8)), 120.0, gate)
    reads = read_requests(source)
    grant_all(source, reads[:3])
    reader.expect_silence(0.1)  # the number of granted blocks is not known yet
    assert not gate.wait(0, time.monotonic())
    grant_all(source, reads[3:])
    assert gate.wait(NUM_LAYERS - 1, time.monotonic() + 60)
    assert all(reader.block(n) == source.block(n) for n in range(8))
    told = []
    while not isinstance(event := reader.events.get(timeout=60), FetchEnded):
        told.append(event)
    assert [event.num_blocks for event in told] == [8] * len(told)
    layers = [event.num_layers for event in told]
    assert layers == sorted(layers)
    assert event.num_blocks == 8


def test_a_corrupt_part_keeps_the_blocks_before_it(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    warm_up(source, reader)
    source.arena.slice(5, 1)[3] ^= 1
    gate = LayerGate()
    reader.messenger.fetch("f", source.address, keys(8), list(range(8)), 120.0, gate)
    grant_all(source, read_requests(source))
    while not isinstance(ended := reader.events.get(timeout=60), FetchEnded):
        pass
    assert (ended.num_blocks, ended.corrupt_slices) == (5, 1)
    assert not gate.wait(NUM_LAYERS - 1, time.monotonic() + 0.1)


def warm_up(source: Node, reader: Node) -> None:
    """Makes the source compute and keep the checksums of its blocks."""
    reader.messenger.fetch("w", source.address, keys(8), list(range(8)), 120.0)
    grant_all(source, read_requests(source))
    assert reader.expect_event(FetchEnded).num_blocks == 8
    for _ in range(TCP_CONNECTIONS):
        source.expect_event(ReadEnded)


def test_a_source_that_dies_in_one_part_ends_the_fetch_with_the_blocks_that_arrived(
    pair: tuple[Node, Node],
) -> None:
    source, reader = pair
    reader.messenger.fetch("f", source.address, keys(8), list(range(8)), 120.0)
    reads = read_requests(source)
    grant_all(source, reads[:1])
    source.expect_event(ReadEnded)
    source.messenger.close()
    ended = reader.expect_event(FetchEnded)
    assert ended.num_blocks == 2
    assert ended.error
    assert "\n" not in ended.error
    assert all(reader.block(n) == source.block(n) for n in range(2))


def test_closing_cancels_every_part(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    reader.messenger.fetch("f", source.address, keys(8), list(range(8)), 300.0)
    read_requests(source)
    began_s = time.monotonic()
    reader.messenger.close()
    assert time.monotonic() - began_s < 100.0
    ended = reader.expect_event(FetchEnded)
    assert (ended.num_blocks, bool(ended.error)) == (0, True)


def test_a_fetch_from_a_peer_whose_flows_are_limited_uses_several(make_node: MakeNode) -> None:
    layout = make_layout(head_dim=65536)  # slices of 2 MiB
    source = make_node("source", layout=layout, num_blocks=6)
    reader = make_node("reader", layout=layout, num_blocks=6)
    source.fill(1)
    limit = FlowLimit(source.address.tcp_host, source.address.tcp_port, 80_000_000)
    path = msgspec.structs.replace(source.address, tcp_port=limit.port)
    reader.messenger.fetch("f", path, keys(6), list(range(6)), 120.0)
    grant_all(source, read_requests(source))
    ended = reader.expect_event(FetchEnded)
    limit.close()
    assert (ended.num_blocks, ended.error) == (6, "")
    assert limit.num_accepted == TCP_CONNECTIONS
    assert all(reader.block(n) == source.block(n) for n in range(6))


def test_each_part_is_redirected_to_the_peers_that_store_its_blocks(
    pair: tuple[Node, Node], make_node: MakeNode
) -> None:
    """Places the parts at the source, at one other peer, and at several peers with some of the
    blocks each."""
    front, reader = pair
    holder, one, other = make_node("holder"), make_node("one"), make_node("other")
    for number, node in enumerate((holder, one, other)):
        node.fill(3 + number)
    reader.messenger.fetch("f", front.address, keys(8), list(range(8)), 120.0)
    here, there, shared, last = read_requests(front)
    grant_all(front, [here, last])
    front.messenger.redirect_read(there.read_id, holder.address)
    front.messenger.redirect_read(shared.read_id, one.address, other.address)
    grant_all(holder, read_requests(holder, 1))
    one.messenger.grant(one.expect_event(ReadRequested).read_id, [4, NOWHERE])
    other.messenger.grant(other.expect_event(ReadRequested).read_id, [NOWHERE, 5])
    ended = reader.expect_event(FetchEnded)
    assert (ended.num_blocks, ended.error) == (8, "")
    sources = [front, front, holder, holder, one, other, front, front]
    assert [reader.block(n) for n in range(8)] == [s.block(n) for n, s in enumerate(sources)]
    assert ended.num_bytes == 8 * front.layout.block_bytes
    reader.expect_silence()
