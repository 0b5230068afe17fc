"""An instance whose blocks another peer stores redirects streams and reads to that peer."""

from __future__ import annotations

from collections.abc import Callable

from messenger_harness import Node, keys

from moonpool.protocol.transfer_events import (
    FetchEnded,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)

MakeNode = Callable[..., Node]


def test_a_stream_is_redirected_to_the_peer_that_stores_the_blocks(make_node: MakeNode) -> None:
    sender, front, holder = make_node("sender"), make_node("front"), make_node("holder")
    sender.fill(1)
    for turn in range(2):  # the second turn uses connections that were kept
        name = f"s{turn}"
        holder.messenger.expect(name, [4, 5], 1, 120.0)
        front.messenger.redirect_stream(name, holder.address)
        sender.messenger.open_stream(name, front.address, 120.0)
        layers = range(sender.layout.num_layers)
        sender.messenger.send(name, [(i, i, layer) for layer in layers for i in range(3)])
        sender.messenger.finish_stream(name)
        assert sender.expect_event(SendEnded).error == ""
        received = holder.expect_event(ReceiveEnded)
        assert (received.error, received.incomplete) == ("", ())
        assert [holder.block(4), holder.block(5)] == [sender.block(1), sender.block(2)]
        front.messenger.forget_stream(name)
    assert front.events.empty()


def test_a_sender_that_connects_first_waits_for_the_redirect(
    make_node: MakeNode,
) -> None:
    sender, front, holder = make_node("sender"), make_node("front"), make_node("holder")
    sender.messenger.open_stream("s", front.address, 120.0)
    holder.messenger.expect("s", [0], 0, 120.0)
    front.messenger.redirect_stream("s", holder.address)
    sender.messenger.abort_stream("s")
    assert sender.expect_event(SendEnded).error
    holder.messenger.cancel("s")
    assert holder.expect_event(ReceiveEnded).error


def test_a_stream_that_is_no_longer_received_is_refused(make_node: MakeNode) -> None:
    sender, front = make_node("sender"), make_node("front", park_s=0.1)
    front.messenger.redirect_stream("s", sender.address)
    front.messenger.forget_stream("s")
    sender.messenger.open_stream("s", front.address, 120.0)
    assert "not expected" in sender.expect_event(SendEnded).error


def test_a_read_is_redirected_to_the_peer_that_stores_the_blocks(make_node: MakeNode) -> None:
    reader, front, holder = make_node("reader"), make_node("front"), make_node("holder")
    holder.fill(3)
    for _ in range(2):
        reader.messenger.fetch("f", front.address, keys(2), [8, 9], 120.0)
        asked = front.expect_event(ReadRequested)
        front.messenger.redirect_read(asked.read_id, holder.address)
        assert front.expect_event(ReadEnded).error == ""
        granted = holder.expect_event(ReadRequested)
        assert list(granted.keys) == keys(2)
        holder.messenger.grant(granted.read_id, [1, 2])
        ended = reader.expect_event(FetchEnded)
        assert (ended.num_blocks, ended.error) == (2, "")
        assert [reader.block(8), reader.block(9)] == [holder.block(1), holder.block(2)]
        assert holder.expect_event(ReadEnded).error == ""


def test_no_operation_is_redirected_twice(make_node: MakeNode) -> None:
    sender, one, other = make_node("sender"), make_node("one"), make_node("other")
    one.messenger.redirect_stream("s", other.address)
    other.messenger.redirect_stream("s", one.address)
    sender.messenger.open_stream("s", one.address, 120.0)
    assert "twice" in sender.expect_event(SendEnded).error
    sender.messenger.fetch("f", one.address, keys(1), [0], 120.0)
    asked = one.expect_event(ReadRequested)
    one.messenger.redirect_read(asked.read_id, other.address)
    one.expect_event(ReadEnded)
    asked = other.expect_event(ReadRequested)
    other.messenger.redirect_read(asked.read_id, one.address)
    assert "twice" in sender.expect_event(FetchEnded).error
