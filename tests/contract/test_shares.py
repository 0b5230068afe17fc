"""Tests pools that several peers share: each peer stores some of the blocks, or a part of every
slice."""

from __future__ import annotations

from collections.abc import Callable

from messenger_harness import Node, keys, make_layout

from moonpool.protocol.transfer_events import (
    FetchEnded,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool_engine.transfer.reshard import NOWHERE, ShardView

MakeNode = Callable[..., Node]
HALF = make_layout(head_dim=4)  # a slice of this layout is half a slice of `make_layout()`
VIEWS = [
    ShardView(whole_bytes=256, ranges=((0, 64), (128, 192))),
    ShardView(whole_bytes=256, ranges=((64, 128), (192, 256))),
]


def halves(make_node: MakeNode) -> list[Node]:
    return [make_node(f"holder-{i}", layout=HALF, shard_view=view) for i, view in enumerate(VIEWS)]


def share(block: bytes, view: ShardView) -> bytes:
    """Returns the part of a whole block that a peer with this view stores."""
    slices = [memoryview(block)[at : at + 256] for at in range(0, len(block), 256)]
    return b"".join(bytes(piece) for whole in slices for piece in view.of(whole))


def stream(sender: Node, front: Node, name: str, num_blocks: int) -> None:
    sender.messenger.open_stream(name, front.address, 120.0)
    for layer in range(sender.layout.num_layers):
        sender.messenger.send(name, [(i, i, layer) for i in range(num_blocks)])
    sender.messenger.finish_stream(name)


def test_a_stream_is_split_by_parts_of_slices(make_node: MakeNode) -> None:
    sender, front, holders = make_node("sender"), make_node("front"), halves(make_node)
    sender.fill(1)
    for turn in range(2):  # in the second turn, checksums are known and connections were kept
        name = f"s{turn}"
        for holder in holders:
            holder.messenger.expect(name, [5, 4], 1, 120.0)
        front.messenger.redirect_stream(name, *(holder.address for holder in holders))
        stream(sender, front, name, 3)
        assert sender.expect_event(SendEnded).error == ""
        for holder, view in zip(holders, VIEWS, strict=True):
            received = holder.expect_event(ReceiveEnded)
            assert (received.error, received.incomplete) == ("", ())
            assert holder.block(5) == share(sender.block(1), view)
            assert holder.block(4) == share(sender.block(2), view)
        front.messenger.forget_stream(name)


def test_a_stream_is_split_by_blocks(make_node: MakeNode) -> None:
    sender, front = make_node("sender"), make_node("front")
    one, other = make_node("one"), make_node("other")
    sender.fill(2)
    one.messenger.expect("s", [7, NOWHERE, 8], 1, 120.0)
    other.messenger.expect("s", [NOWHERE, 9, NOWHERE], 1, 120.0)
    front.messenger.redirect_stream("s", one.address, other.address)
    stream(sender, front, "s", 4)
    assert sender.expect_event(SendEnded).error == ""
    for holder in (one, other):
        received = holder.expect_event(ReceiveEnded)
        assert (received.error, received.incomplete) == ("", ())
    assert [one.block(7), other.block(9), one.block(8)] == [sender.block(i) for i in (1, 2, 3)]


def test_one_share_that_fails_fails_the_stream(make_node: MakeNode) -> None:
    sender, front = make_node("sender"), make_node("front")
    one, other = make_node("one"), make_node("other", park_s=0.1)
    one.messenger.expect("s", [7], 0, 120.0)  # the other peer does not expect the stream
    front.messenger.redirect_stream("s", one.address, other.address)
    stream(sender, front, "s", 1)
    assert "not expected" in sender.expect_event(SendEnded).error
    assert one.expect_event(ReceiveEnded).incomplete == ()


def test_an_aborted_stream_ends_once(make_node: MakeNode) -> None:
    sender, front, holders = make_node("sender"), make_node("front"), halves(make_node)
    for holder in holders:
        holder.messenger.expect("s", [1], 0, 120.0)
    front.messenger.redirect_stream("s", *(holder.address for holder in holders))
    sender.messenger.open_stream("s", front.address, 120.0)
    sender.messenger.send("s", [(0, 0, 0)])
    sender.messenger.abort_stream("s")
    assert sender.expect_event(SendEnded).error
    for holder in holders:
        holder.messenger.cancel("s")
        assert holder.expect_event(ReceiveEnded).incomplete == (0,)
    sender.expect_silence()


def read(
    reader: Node, front: Node, holders: list[Node], granted: list[list[int]], to: list[int]
) -> FetchEnded:
    """Fetches `len(to)` keys via `front`, of which each holder grants the given blocks."""
    reader.messenger.fetch("f", front.address, keys(len(to)), to, 120.0)
    asked = front.expect_event(ReadRequested)
    front.messenger.redirect_read(asked.read_id, *(holder.address for holder in holders))
    for holder, blocks in zip(holders, granted, strict=True):
        requested = holder.expect_event(ReadRequested)
        holder.messenger.grant(requested.read_id, blocks)
    front.expect_event(ReadEnded)
    return reader.expect_event(FetchEnded)


def test_a_read_combines_parts_of_slices(make_node: MakeNode) -> None:
    reader, front, holders = make_node("reader"), make_node("front"), halves(make_node)
    for seed, holder in enumerate(holders):
        holder.fill(seed)
    ended = read(reader, front, holders, [[1, 2], [1, 2]], [8, 9])
    assert (ended.num_blocks, ended.error) == (2, "")
    for own, theirs in ((8, 1), (9, 2)):
        for holder, view in zip(holders, VIEWS, strict=True):
            assert share(reader.block(own), view) == holder.block(theirs)


def test_a_read_combines_blocks_up_to_the_first_missing(make_node: MakeNode) -> None:
    reader, front = make_node("reader"), make_node("front")
    one, other = make_node("one"), make_node("other")
    one.fill(1)
    other.fill(2)
    ended = read(reader, front, [one, other], [[1, NOWHERE, 2], [NOWHERE, 3, NOWHERE]], [7, 8, 9])
    assert (ended.num_blocks, ended.error) == (3, "")
    assert [reader.block(b) for b in (7, 8, 9)] == [one.block(1), other.block(3), one.block(2)]
    for node in (one, other):
        assert node.expect_event(ReadEnded).error == ""
    # Each holder expects this block at the other holder, so neither has it.
    ended = read(reader, front, [one, other], [[1, NOWHERE, 2], [NOWHERE] * 3], [7, 8, 9])
    assert ended.num_blocks == 1


def test_half_of_a_block_does_not_count(make_node: MakeNode) -> None:
    reader, front, holders = make_node("reader"), make_node("front"), halves(make_node)
    ended = read(reader, front, holders, [[1, 2], [1]], [8, 9])
    assert ended.num_blocks == 1
    for holder in holders:
        assert holder.expect_event(ReadEnded).error == ""
    twin = make_node("twin", layout=HALF, shard_view=VIEWS[0])
    # both holders have the same half
    ended = read(reader, front, [holders[0], twin], [[1], [1]], [8])
    assert ended.num_blocks == 0


def test_a_holder_reads_its_share_from_whole_blocks_and_from_equal_shares(
    make_node: MakeNode,
) -> None:
    source, holders = make_node("source"), halves(make_node)
    source.fill(3)
    for holder, view in zip(holders, VIEWS, strict=True):
        holder.messenger.fetch("f", source.address, keys(1), [4], 120.0)
        source.messenger.grant(source.expect_event(ReadRequested).read_id, [6])
        assert holder.expect_event(FetchEnded).num_blocks == 1
        assert holder.block(4) == share(source.block(6), view)
        assert source.expect_event(ReadEnded).error == ""
    alike = make_node("alike", layout=HALF, shard_view=VIEWS[1])
    front = make_node("front")
    ended = read(alike, front, holders, [[4], [4]], [2])
    assert (ended.num_blocks, ended.error) == (1, "")
    assert alike.block(2) == holders[1].block(4)


def test_changed_memory_is_detected_in_a_share_too(make_node: MakeNode) -> None:
    source, holders = make_node("source"), halves(make_node)
    source.fill(4)
    for holder in make_node("whole"), holders[0]:
        holder.messenger.fetch("f", source.address, keys(1), [4], 120.0)
        source.messenger.grant(source.expect_event(ReadRequested).read_id, [6])
        ended = holder.expect_event(FetchEnded)
        assert ended.num_blocks == (holder is not holders[0])
        source.expect_event(ReadEnded)
        source.arena.slice(6, 1)[3] ^= 1  # changes the block after its sum was taken


def test_a_share_of_other_slices_is_refused(make_node: MakeNode) -> None:
    source = make_node("source")
    wrong = ShardView(whole_bytes=512, ranges=((0, 64), (448, 512)))
    reader = make_node("reader", layout=HALF, shard_view=wrong)
    reader.messenger.fetch("f", source.address, keys(1), [0], 120.0)
    assert reader.expect_event(FetchEnded).error
    front = make_node("front")
    reader.messenger.expect("s", [0], 0, 120.0)
    front.messenger.redirect_stream("s", reader.address)
    stream(source, front, "s", 1)
    assert "another size" in source.expect_event(SendEnded).error
