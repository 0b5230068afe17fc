"""Blocks of which several peers keep a share each: some of the blocks, or a part of every slice."""

from __future__ import annotations

from collections.abc import Callable

from messenger_harness import Node, keys, make_layout

from moonpool.kvcache.transfers import (
    FetchEnded,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.messenger.cut import NOWHERE, Cut

MakeNode = Callable[..., Node]
HALF = make_layout(head_dim=4)  # a slice of it is half of one of `make_layout()`
CUTS = [
    Cut(whole_bytes=256, ranges=((0, 64), (128, 192))),
    Cut(whole_bytes=256, ranges=((64, 128), (192, 256))),
]


def halves(make_node: MakeNode) -> list[Node]:
    return [make_node(f"keeper-{i}", layout=HALF, cut=cut) for i, cut in enumerate(CUTS)]


def share(block: bytes, cut: Cut) -> bytes:
    """Of a whole block, what a peer with that cut keeps."""
    slices = [memoryview(block)[at : at + 256] for at in range(0, len(block), 256)]
    return b"".join(bytes(piece) for whole in slices for piece in cut.of(whole))


def stream(sender: Node, front: Node, name: str, num_blocks: int) -> None:
    sender.messenger.open_stream(name, front.address, 3.0)
    for layer in range(sender.layout.num_layers):
        sender.messenger.send(name, [(i, i, layer) for i in range(num_blocks)])
    sender.messenger.finish_stream(name)


def test_a_stream_is_shared_out_by_parts_of_slices(make_node: MakeNode) -> None:
    sender, front, keepers = make_node("sender"), make_node("front"), halves(make_node)
    sender.fill(1)
    for turn in range(2):  # the second time with sums that are known, over kept connections
        name = f"s{turn}"
        for keeper in keepers:
            keeper.messenger.expect(name, [5, 4], 1, 3.0)
        front.messenger.expect_at(name, *(keeper.address for keeper in keepers))
        stream(sender, front, name, 3)
        assert sender.expect_event(SendEnded).error == ""
        for keeper, cut in zip(keepers, CUTS, strict=True):
            received = keeper.expect_event(ReceiveEnded)
            assert (received.error, received.corrupt) == ("", ())
            assert keeper.block(5) == share(sender.block(1), cut)
            assert keeper.block(4) == share(sender.block(2), cut)
        front.messenger.forget_stream(name)


def test_a_stream_is_shared_out_by_blocks(make_node: MakeNode) -> None:
    sender, front = make_node("sender"), make_node("front")
    one, other = make_node("one"), make_node("other")
    sender.fill(2)
    one.messenger.expect("s", [7, NOWHERE, 8], 1, 3.0)
    other.messenger.expect("s", [NOWHERE, 9, NOWHERE], 1, 3.0)
    front.messenger.expect_at("s", one.address, other.address)
    stream(sender, front, "s", 4)
    assert sender.expect_event(SendEnded).error == ""
    for keeper in (one, other):
        received = keeper.expect_event(ReceiveEnded)
        assert (received.error, received.corrupt) == ("", ())
    assert [one.block(7), other.block(9), one.block(8)] == [sender.block(i) for i in (1, 2, 3)]


def test_one_share_that_fails_fails_the_stream(make_node: MakeNode) -> None:
    sender, front = make_node("sender"), make_node("front")
    one, other = make_node("one"), make_node("other", park_s=0.1)
    one.messenger.expect("s", [7], 0, 3.0)  # the other does not expect it
    front.messenger.expect_at("s", one.address, other.address)
    stream(sender, front, "s", 1)
    assert "not expected" in sender.expect_event(SendEnded).error
    assert one.expect_event(ReceiveEnded).corrupt == ()


def test_an_aborted_stream_ends_once(make_node: MakeNode) -> None:
    sender, front, keepers = make_node("sender"), make_node("front"), halves(make_node)
    for keeper in keepers:
        keeper.messenger.expect("s", [1], 0, 3.0)
    front.messenger.expect_at("s", *(keeper.address for keeper in keepers))
    sender.messenger.open_stream("s", front.address, 3.0)
    sender.messenger.send("s", [(0, 0, 0)])
    sender.messenger.abort_stream("s")
    assert sender.expect_event(SendEnded).error
    for keeper in keepers:
        keeper.messenger.cancel("s")
        assert keeper.expect_event(ReceiveEnded).corrupt == (0,)
    sender.expect_silence()


def read(
    reader: Node, front: Node, keepers: list[Node], granted: list[list[int]], to: list[int]
) -> FetchEnded:
    """A fetch of as many keys as each keeper is granted blocks for."""
    reader.messenger.fetch("f", front.address, keys(len(to)), to, 3.0)
    asked = front.expect_event(ReadRequested)
    front.messenger.send_read_on(asked.read_id, *(keeper.address for keeper in keepers))
    for keeper, blocks in zip(keepers, granted, strict=True):
        requested = keeper.expect_event(ReadRequested)
        keeper.messenger.grant(requested.read_id, blocks)
    front.expect_event(ReadEnded)
    return reader.expect_event(FetchEnded)


def test_a_read_puts_slices_together(make_node: MakeNode) -> None:
    reader, front, keepers = make_node("reader"), make_node("front"), halves(make_node)
    for seed, keeper in enumerate(keepers):
        keeper.fill(seed)
    ended = read(reader, front, keepers, [[1, 2], [1, 2]], [8, 9])
    assert (ended.num_blocks, ended.error) == (2, "")
    for own, theirs in ((8, 1), (9, 2)):
        for keeper, cut in zip(keepers, CUTS, strict=True):
            assert share(reader.block(own), cut) == keeper.block(theirs)


def test_a_read_puts_blocks_together_as_far_as_none_is_missing(make_node: MakeNode) -> None:
    reader, front = make_node("reader"), make_node("front")
    one, other = make_node("one"), make_node("other")
    one.fill(1)
    other.fill(2)
    ended = read(reader, front, [one, other], [[1, NOWHERE, 2], [NOWHERE, 3, NOWHERE]], [7, 8, 9])
    assert (ended.num_blocks, ended.error) == (3, "")
    assert [reader.block(b) for b in (7, 8, 9)] == [one.block(1), other.block(3), one.block(2)]
    for node in (one, other):
        assert node.expect_event(ReadEnded).error == ""
    # What each believes to be at the other is nowhere.
    ended = read(reader, front, [one, other], [[1, NOWHERE, 2], [NOWHERE] * 3], [7, 8, 9])
    assert ended.num_blocks == 1


def test_half_of_a_block_is_none(make_node: MakeNode) -> None:
    reader, front, keepers = make_node("reader"), make_node("front"), halves(make_node)
    ended = read(reader, front, keepers, [[1, 2], [1]], [8, 9])
    assert ended.num_blocks == 1
    for keeper in keepers:
        assert keeper.expect_event(ReadEnded).error == ""
    twin = make_node("twin", layout=HALF, cut=CUTS[0])
    ended = read(reader, front, [keepers[0], twin], [[1], [1]], [8])  # the same half twice
    assert ended.num_blocks == 0


def test_a_keeper_reads_its_share_of_whole_blocks_and_of_others_like_it(
    make_node: MakeNode,
) -> None:
    source, keepers = make_node("source"), halves(make_node)
    source.fill(3)
    for keeper, cut in zip(keepers, CUTS, strict=True):
        keeper.messenger.fetch("f", source.address, keys(1), [4], 3.0)
        source.messenger.grant(source.expect_event(ReadRequested).read_id, [6])
        assert keeper.expect_event(FetchEnded).num_blocks == 1
        assert keeper.block(4) == share(source.block(6), cut)
        assert source.expect_event(ReadEnded).error == ""
    alike = make_node("alike", layout=HALF, cut=CUTS[1])
    front = make_node("front")
    ended = read(alike, front, keepers, [[4], [4]], [2])
    assert (ended.num_blocks, ended.error) == (1, "")
    assert alike.block(2) == keepers[1].block(4)


def test_memory_that_changed_is_seen_in_a_share_too(make_node: MakeNode) -> None:
    source, keepers = make_node("source"), halves(make_node)
    source.fill(4)
    for keeper in make_node("whole"), keepers[0]:
        keeper.messenger.fetch("f", source.address, keys(1), [4], 3.0)
        source.messenger.grant(source.expect_event(ReadRequested).read_id, [6])
        ended = keeper.expect_event(FetchEnded)
        assert ended.num_blocks == (keeper is not keepers[0])
        source.expect_event(ReadEnded)
        source.arena.slice(6, 1)[3] ^= 1  # after its sum was taken


def test_a_share_of_other_slices_is_refused(make_node: MakeNode) -> None:
    source = make_node("source")
    wrong = Cut(whole_bytes=512, ranges=((0, 64), (448, 512)))
    reader = make_node("reader", layout=HALF, cut=wrong)
    reader.messenger.fetch("f", source.address, keys(1), [0], 2.0)
    assert reader.expect_event(FetchEnded).error
    front = make_node("front")
    reader.messenger.expect("s", [0], 0, 2.0)
    front.messenger.expect_at("s", reader.address)
    stream(source, front, "s", 1)
    assert "not ours" in source.expect_event(SendEnded).error
