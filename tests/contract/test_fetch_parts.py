"""A large fetch by TCP goes over several connections at once, and to its caller is one fetch."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from messenger_harness import Node, keys, make_layout

from moonpool.bench.flow_limit import FlowLimit
from moonpool.kvcache.transfers import FetchEnded, FetchProgress, ReadEnded, ReadRequested
from moonpool.messenger import fetch_parts
from moonpool.messenger.cut import NOWHERE
from moonpool.messenger.fetch_parts import split
from moonpool.messenger.gate import LayerGate
from moonpool.messenger.messenger import TCP_CONNECTIONS

MakeNode = Callable[..., Node]
NUM_LAYERS = 3


@pytest.fixture
def transport() -> str:
    return "tcp"


@pytest.fixture
def pair(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    """Whose fetches of more than a block go over several connections."""
    monkeypatch.setattr(fetch_parts, "PART_BYTES", 1)
    source, reader = make_node("source"), make_node("reader")
    source.fill(1)
    reader.fill(2)
    return source, reader


def number_of(key: bytes) -> int:
    return int.from_bytes(key, "big")


def asked(source: Node, parts: int = TCP_CONNECTIONS) -> list[ReadRequested]:
    """In the blocks' order."""
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


def test_all_blocks_come_and_the_end_is_told_once(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    places = list(range(20, 31))
    for _ in range(2):  # the second time over the connections that were kept
        reader.fill(2)
        reader.messenger.fetch("f", source.address, keys(11), places, 3.0)
        reads = asked(source)
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


def test_what_is_not_lent_ends_the_prefix(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    gate = LayerGate()
    reader.messenger.fetch("f", source.address, keys(12), list(range(12)), 3.0, gate)
    reads = asked(source)
    source.messenger.grant(reads[0].read_id, [0, 1, 2])
    source.messenger.grant(reads[1].read_id, [3])
    source.messenger.grant(reads[2].read_id, [6, 7, 8])
    source.messenger.grant(reads[3].read_id, [])
    told = reader.expect_event(FetchProgress)
    while isinstance(told, FetchProgress):
        assert told.num_blocks == 4
        told = reader.events.get(timeout=3.0)
    assert isinstance(told, FetchEnded)
    assert (told.num_blocks, told.error) == (4, "")
    assert gate.wait(NUM_LAYERS - 1, time.monotonic() + 1.0)
    assert all(reader.block(n) == source.block(n) for n in range(4))


def test_the_gate_waits_for_every_part(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    gate = LayerGate()
    reader.messenger.fetch("f", source.address, keys(8), list(range(8)), 3.0, gate)
    reads = asked(source)
    grant_all(source, reads[:3])
    reader.expect_silence(0.1)  # how much is lent is not known yet
    assert not gate.wait(0, time.monotonic())
    grant_all(source, reads[3:])
    assert gate.wait(NUM_LAYERS - 1, time.monotonic() + 3.0)
    assert all(reader.block(n) == source.block(n) for n in range(8))
    told = []
    while not isinstance(event := reader.events.get(timeout=3.0), FetchEnded):
        told.append(event)
    assert [event.num_blocks for event in told] == [8] * len(told)
    layers = [event.num_layers for event in told]
    assert layers == sorted(layers)
    assert event.num_blocks == 8


def test_a_part_that_comes_wrong_leaves_what_is_before_it(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    warm_up(source, reader)
    source.arena.slice(5, 1)[3] ^= 1
    gate = LayerGate()
    reader.messenger.fetch("f", source.address, keys(8), list(range(8)), 3.0, gate)
    grant_all(source, asked(source))
    while not isinstance(ended := reader.events.get(timeout=3.0), FetchEnded):
        pass
    assert (ended.num_blocks, ended.corrupt_slices) == (5, 1)
    assert not gate.wait(NUM_LAYERS - 1, time.monotonic() + 0.1)


def warm_up(source: Node, reader: Node) -> None:
    """So that the source remembers the sums of its blocks."""
    reader.messenger.fetch("w", source.address, keys(8), list(range(8)), 3.0)
    grant_all(source, asked(source))
    assert reader.expect_event(FetchEnded).num_blocks == 8
    for _ in range(TCP_CONNECTIONS):
        source.expect_event(ReadEnded)


def test_a_source_that_dies_in_one_part_ends_the_fetch_with_what_came(
    pair: tuple[Node, Node],
) -> None:
    source, reader = pair
    reader.messenger.fetch("f", source.address, keys(8), list(range(8)), 3.0)
    reads = asked(source)
    grant_all(source, reads[:1])
    source.expect_event(ReadEnded, 3.0)
    source.messenger.close()
    ended = reader.expect_event(FetchEnded)
    assert ended.num_blocks == 2
    assert ended.error
    assert "\n" not in ended.error
    assert all(reader.block(n) == source.block(n) for n in range(2))


def test_closing_breaks_every_part_off(pair: tuple[Node, Node]) -> None:
    source, reader = pair
    reader.messenger.fetch("f", source.address, keys(8), list(range(8)), 30.0)
    asked(source)
    began_s = time.monotonic()
    reader.messenger.close()
    assert time.monotonic() - began_s < 3.0
    ended = reader.expect_event(FetchEnded)
    assert (ended.num_blocks, bool(ended.error)) == (0, True)


def test_where_flows_are_limited_several_bring_more(make_node: MakeNode) -> None:
    """Each gets 20 MB/s here: 36 MiB take 1.9 s over one."""
    layout = make_layout(head_dim=65536)  # of 2 MiB slices
    source = make_node("source", layout=layout, num_blocks=6)
    reader = make_node("reader", layout=layout, num_blocks=6)
    source.fill(1)
    limit = FlowLimit(source.address.tcp_host, source.address.tcp_port, 20_000_000)
    path = msgspec.structs.replace(source.address, tcp_port=limit.port)
    began_s = time.monotonic()
    reader.messenger.fetch("f", path, keys(6), list(range(6)), 10.0)
    grant_all(source, asked(source))
    ended = reader.expect_event(FetchEnded, 10.0)
    taken_s = time.monotonic() - began_s
    limit.close()
    assert (ended.num_blocks, ended.error) == (6, "")
    assert limit.num_accepted == TCP_CONNECTIONS
    assert taken_s < 0.7 * 6 * layout.block_bytes / 20e6
    assert all(reader.block(n) == source.block(n) for n in range(6))


def test_parts_go_to_who_keeps_the_blocks(pair: tuple[Node, Node], make_node: MakeNode) -> None:
    """Each for itself: here, at another peer, at several that have some of the blocks each."""
    front, reader = pair
    keeper, one, other = make_node("keeper"), make_node("one"), make_node("other")
    for number, node in enumerate((keeper, one, other)):
        node.fill(3 + number)
    reader.messenger.fetch("f", front.address, keys(8), list(range(8)), 3.0)
    here, there, shared, last = asked(front)
    grant_all(front, [here, last])
    front.messenger.send_read_on(there.read_id, keeper.address)
    front.messenger.send_read_on(shared.read_id, one.address, other.address)
    grant_all(keeper, asked(keeper, 1))
    one.messenger.grant(one.expect_event(ReadRequested).read_id, [4, NOWHERE])
    other.messenger.grant(other.expect_event(ReadRequested).read_id, [NOWHERE, 5])
    ended = reader.expect_event(FetchEnded)
    assert (ended.num_blocks, ended.error) == (8, "")
    sources = [front, front, keeper, keeper, one, other, front, front]
    assert [reader.block(n) for n in range(8)] == [s.block(n) for n, s in enumerate(sources)]
    assert ended.num_bytes == 8 * front.layout.block_bytes
    reader.expect_silence()
