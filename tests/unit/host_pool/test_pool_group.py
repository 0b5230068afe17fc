"""Tests finds in a group whose spaces need different parts of a prefix."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from moonpool.host_pool.block_space import BlocksFetched, BlocksFound, BlockSpace
from moonpool.host_pool.pool_group import BlockGroup, GroupFound, longest_prefix
from tests.unit.host_pool.test_block_space import LAYOUT, key

KEYS = [key(number) for number in range(12)]
FLAGS = st.lists(st.booleans(), min_size=8, max_size=8)


def needs(found: list[bool], window: int, length: int) -> bool:
    first = length - window if window and window < length else 0
    return all(found[first:length])


@given(st.lists(FLAGS, min_size=1, max_size=3), st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_the_longest_prefix_is_the_longest_that_each_can_serve(
    present: list[list[bool]], windows: list[int]
) -> None:
    chosen = {rank: window for rank, window in enumerate(windows[: len(present)]) if window}
    right = next(
        length
        for length in range(8, -1, -1)
        if all(needs(one, windows[rank], length) for rank, one in enumerate(present))
    )
    assert longest_prefix(dict(enumerate(present)), chosen) == right


class Group:
    """A group with one space per window, which is driven like by the pool's server."""

    def __init__(self, *windows: int) -> None:
        self.group = BlockGroup(len(windows))
        for rank, window in enumerate(windows):
            self.group.spaces[rank] = BlockSpace(LAYOUT, 40)
            if window:
                self.group.windows[rank] = window
        self.number = 0

    def store(self, rank: int, *numbers: int) -> None:
        self.number += 1
        space = self.group.spaces[rank]
        space.reserve(self.number, [KEYS[number] for number in numbers], 0)
        space.commit(self.number)
        self.group.on_blocks()
        self.perform()

    def find(self, count: int, until_s: float = 0.0) -> None:
        self.group.find("o", KEYS[:count], until_s)
        self.perform()

    def perform(self) -> None:
        has_more = True
        while has_more:
            has_more = False
            for rank, space in self.group.spaces.items():
                actions, _ = space.take()
                for action in actions:
                    assert not isinstance(action, BlocksFetched)
                    if isinstance(action, BlocksFound):
                        has_more = True
                        self.group.on_found(rank, action, 1.0)

    def ended(self) -> tuple[int, list[int]]:
        """Returns the prefix that was found, and how many blocks each rank names."""
        (found,) = self.group.take()
        assert isinstance(found, GroupFound)
        return found.num_blocks, [len(ids) for ids in found.block_ids]

    def held(self) -> list[dict[str, int]]:
        return [space.pool.named_owners() for space in self.group.spaces.values()]


def test_a_prefix_needs_the_last_blocks_of_a_window() -> None:
    group = Group(0, 2)
    group.store(0, *range(8))
    group.store(1, 2, 3, 4, 6, 7)
    group.find(8)
    assert group.ended() == (8, [8, 2])
    assert group.held() == [{"find:o": 8}, {"find:o": 2}]
    group.find(7)  # the window has a gap, so a shorter prefix is found
    assert group.ended() == (5, [5, 2])
    assert group.held() == [{"find:o": 5}, {"find:o": 2}]
    group.find(3)
    assert group.ended() == (0, [0, 0])
    group.group.release("o")
    assert not any(group.held())


def test_a_find_that_waits_ends_with_the_whole_prefix() -> None:
    group = Group(2, 0)
    group.store(1, *range(6))
    group.find(6, until_s=5.0)
    assert group.group.take() == []
    group.store(0, 4, 5)
    assert group.ended() == (6, [2, 6])


def test_ranks_without_windows_share_their_shortest_prefix() -> None:
    group = Group(0, 0)
    group.store(0, *range(6))
    group.store(1, *range(4))
    group.find(6)
    assert group.ended() == (4, [4, 4])
    assert group.held() == [{"find:o": 4}, {"find:o": 4}]


def test_what_a_fetch_has_reached() -> None:
    group: Any = Group(0, 2).group
    assert [group.reached(0, 6, here) for here in (0, 4, 6)] == [0, 4, 6]
    assert [group.reached(1, 6, here) for here in (0, 1, 2)] == [0, 0, 6]
    assert [group.reached(1, 2, here) for here in (0, 1, 2)] == [0, 1, 2]
    assert list(group.part_of(1, KEYS[:6])) == KEYS[4:6]
    assert list(group.part_of(1, KEYS[:1])) == KEYS[:1]
