"""Tests that clients share the buffers that they fill: no client shuts another out, whatever it
takes, and the sums are right."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.api.sharing.shared_buffer import (
    ReclaimedBuffer,
    SharedBuffer,
    oldest_of_most,
    party_of,
)

PARTIES = st.sampled_from(["ann", "bob", "eve", "x", "y"])


@given(st.integers(1, 200), st.lists(st.tuples(PARTIES, st.integers(1, 40), st.booleans())))
def test_a_party_has_at_most_half_of_what_the_others_leave(
    capacity: int, steps: list[tuple[str, int, bool]]
) -> None:
    buffer, taken = SharedBuffer(capacity), Counter[str]()
    for party, amount, takes in steps:
        if takes:
            others = sum(taken.values()) - taken[party]
            fits = taken[party] + amount <= -(-(capacity - others) // 2)
            assert buffer.take(party, amount) == fits
            taken[party] += amount if fits else 0
        elif taken[party]:
            amount = min(amount, taken[party])
            buffer.release(party, amount)
            taken[party] -= amount
        assert buffer.taken == sum(taken.values()) <= capacity
        assert all(buffer.taken_by(name) == count for name, count in taken.items())


@given(st.integers(1, 6), st.integers(64, 4096))
def test_greedy_parties_leave_room_for_one_more(num_greedy: int, capacity: int) -> None:
    buffer = SharedBuffer(capacity)
    for number in range(num_greedy):
        while buffer.take(f"greedy-{number}"):
            pass
    assert buffer.take("newcomer")


def test_a_party_without_others_may_have_all() -> None:
    buffer = SharedBuffer(3)
    assert [buffer.take("") for _ in range(4)] == [True, True, True, False]


class Part:
    """One holder of bytes."""

    def __init__(self) -> None:
        self.is_given_back = False

    def give_back(self) -> None:
        assert not self.is_given_back
        self.is_given_back = True


@given(
    st.integers(1, 100),
    st.lists(
        st.tuples(PARTIES, st.integers(1, 30), st.sampled_from(["new", "grow", "keep", "drop"]))
    ),
)
def test_parts_come_back_from_those_who_have_more(
    capacity: int, steps: list[tuple[str, int, str]]
) -> None:
    buffer = ReclaimedBuffer[Part](capacity)
    parts: dict[Part, tuple[str, int, bool]] = {}
    for party, amount, what in steps:
        own = [part for part, (name, _, _) in parts.items() if name == party]
        part = Part() if what == "new" or not own else own[-1]
        sums = Counter[str]()
        for name, size, _ in parts.values():
            sums[name] += size
        if what == "keep":
            buffer.keep(part)
            if part in parts:
                parts[part] = (*parts[part][:2], True)
        elif what == "drop":
            buffer.drop(part)
            parts.pop(part, None)
        else:
            taken = buffer.grow(part, party, amount)
            before = parts.get(part, (party, 0, False))
            if taken:
                parts[part] = party, before[1] + amount, before[2]
        for gone in [each for each in parts if each.is_given_back]:
            name, _, is_kept = parts.pop(gone)
            assert taken and not is_kept and name != party and sums[name] > sums[party]
        assert buffer.taken == sum(size for _, size, _ in parts.values()) <= capacity


def test_a_newcomer_gets_the_room_of_what_is_not_kept_and_no_other() -> None:
    buffer = ReclaimedBuffer[Part](80)
    greedy = [Part() for _ in range(4)]
    assert all(buffer.grow(part, "greedy", 10) for part in greedy)
    assert not buffer.grow(Part(), "greedy", 10), "half is the most"
    buffer.keep(greedy[0])
    large = Part()
    assert buffer.grow(large, "other", 20) and buffer.grow(large, "other", 5)
    assert [part.is_given_back for part in greedy] == [False, True, False, False]
    assert not buffer.grow(large, "other", 10), "the greedy party has less than that"
    assert [part.is_given_back for part in greedy] == [False, True, False, False]


def test_the_oldest_of_the_party_with_most_goes_first() -> None:
    entries = [(1, "a", 1.0), (2, "b", 1.0), (3, "b", 1.0), (4, "a", 0.5)]
    assert oldest_of_most(entries) == 2
    assert oldest_of_most([*entries, (5, "a", 1.0)]) == 1


@pytest.mark.parametrize(
    ("address", "party"),
    [
        ("127.0.0.1", "address 127.0.0.1"),
        ("::ffff:127.0.0.1", "address 127.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "address 2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "address 2001:db8:1:2::/64"),
        ("", "address "),
    ],
)
def test_a_network_of_ipv6_is_one_party(address: str, party: str) -> None:
    assert party_of(address) == party
