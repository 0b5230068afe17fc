"""Tests that a process follows one head, and no replaced head, in whatever order it hears from
them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.protocol.frames import HeadAddress, Leadership
from moonpool.protocol.known_heads import KnownHeads

ADDRESSES = [HeadAddress(host="h", port=port) for port in range(4)]
LEADERSHIPS = st.builds(
    Leadership,
    epoch=st.integers(1, 5),
    standbys=st.lists(st.sampled_from(ADDRESSES), unique=True).map(tuple),
)


@given(st.lists(st.tuples(LEADERSHIPS, st.booleans())))
def test_the_epoch_never_falls_and_the_head_that_is_obeyed_stays(
    said: list[tuple[Leadership, bool]],
) -> None:
    heads = KnownHeads()
    heads.begin("h", 0)
    for leadership, is_lost in said:
        before, present = heads.epoch, heads.address
        assert heads.accept_leader(leadership) == (leadership.epoch >= before)
        assert heads.epoch == max(before, leadership.epoch)
        assert heads.address == present
        if is_lost:
            heads.next_address()


def test_the_addresses_are_tried_in_turn() -> None:
    heads = KnownHeads()
    heads.begin("h", 0)
    assert heads.accept_leader(
        Leadership(epoch=1, standbys=(ADDRESSES[2], ADDRESSES[0], ADDRESSES[3]))
    )
    tried = []
    for _ in range(4):
        tried.append(heads.address.port)
        heads.next_address()
    assert tried == [0, 2, 3, 0]
    heads.begin("h", 1)
    assert heads.address.port == 2


def test_a_standby_tries_the_head_alone() -> None:
    heads = KnownHeads(is_fixed=True)
    heads.begin("h", 0)
    heads.accept_leader(Leadership(epoch=1, standbys=tuple(ADDRESSES)))
    heads.next_address()
    assert (heads.address, heads.epoch) == (ADDRESSES[0], 1)


def test_a_head_that_was_replaced_sends_its_workers_on() -> None:
    heads = KnownHeads()
    heads.begin("h", 0)
    heads.accept_leader(Leadership(epoch=1))
    heads.lead_elsewhere(Leadership(epoch=2, standbys=(ADDRESSES[3],), replaced=True))
    assert heads.address == ADDRESSES[3]
    assert not heads.accept_leader(Leadership(epoch=1))
