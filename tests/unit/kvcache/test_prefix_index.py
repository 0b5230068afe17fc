"""Tests the Conductor's index against a naive model: incarnations, gaps, snapshots, longest
matches, blocks that are being computed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.kvcache.prefix_index import Depths, PrefixIndex, PrefixMatch
from moonpool.types import BlockKey, InstanceId

NAMES = st.sampled_from(("p0", "p1", "d0"))
LIVES = st.sampled_from((0, 0, 0, 1))
KEYS = st.lists(st.integers(0, 7), max_size=5)


def key(name: int) -> BlockKey:
    return BlockKey(bytes([name]) * 16)


def keys(names: list[int]) -> list[BlockKey]:
    return [key(name) for name in names]


def held(index: PrefixIndex, names: list[int]) -> dict[str, int]:
    return by_name(index, index.match(keys(names)).held)


def by_name(index: PrefixIndex, depths: Depths) -> dict[str, int]:
    """Returns the depths above zero; rows without an instance must have depth 0."""
    rows = {row: name for name, row in index.rows.items()}
    assert len(depths) == index.num_rows
    return {rows[row]: int(depth) for row, depth in enumerate(depths) if depth}


class IndexMachine(RuleBasedStateMachine):
    """Compares the index with a model: for each instance its incarnation, the next number, and its
    keys, or None if it was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.lives: dict[str, int] = {}
        self.numbers: dict[str, int] = {}
        self.known: dict[str, set[BlockKey] | None] = {}
        self.demoted: dict[str, set[BlockKey]] = {}
        self.expected: dict[str, list[list[int]]] = {}

    @rule(name=NAMES, incarnation=LIVES)
    def add(self, name: str, incarnation: int) -> None:
        self.forget_expected(name)
        self.index.add_instance(InstanceId(name), incarnation)
        self.lives[name], self.known[name], self.expected[name] = incarnation, None, []
        self.demoted[name] = set()

    def forget_expected(self, name: str) -> None:
        for prompt in self.expected.pop(name, []):
            self.index.unexpect(InstanceId(name), keys(prompt))

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.forget_expected(name)
        self.index.remove_instance(InstanceId(name))
        self.lives.pop(name, None)
        self.known.pop(name, None)

    @rule(name=NAMES, incarnation=LIVES, skip=st.sampled_from((0, 0, 0, 1)), a=KEYS, b=KEYS, c=KEYS)
    def apply(
        self, name: str, incarnation: int, skip: int, a: list[int], b: list[int], c: list[int]
    ) -> None:
        number = self.numbers.get(name, 0) + skip
        stored, removed = keys(a), keys([n for n in b if n not in a])
        demoted = keys([n for n in c if n not in a and n not in b])
        taken = self.index.apply(InstanceId(name), incarnation, number, stored, removed, demoted)
        if self.lives.get(name) != incarnation:
            assert not taken
            return
        known = self.known[name]
        if known is None or skip:
            assert not taken
            self.known[name], self.demoted[name] = None, set()
            return
        assert taken
        self.numbers[name] = number + 1
        self.known[name] = (known - set(removed)) | set(stored) | set(demoted)
        below = self.demoted.get(name, set()) - set(removed) - set(stored)
        self.demoted[name] = below | set(demoted)

    @rule(name=NAMES, incarnation=LIVES, number=st.integers(0, 9), a=KEYS, b=KEYS)
    def snapshot(
        self, name: str, incarnation: int, number: int, a: list[int], b: list[int]
    ) -> None:
        demoted = keys([n for n in b if n not in a])
        taken = self.index.load_snapshot(InstanceId(name), incarnation, number, keys(a), demoted)
        assert taken == (self.lives.get(name) == incarnation)
        if taken:
            self.known[name], self.numbers[name] = set(keys(a)) | set(demoted), number
            self.demoted[name] = set(demoted)

    @rule(name=NAMES, prompt=KEYS)
    def expect(self, name: str, prompt: list[int]) -> None:
        if name in self.lives:
            self.index.expect(InstanceId(name), keys(prompt))
            self.expected[name].append(prompt)

    @rule(name=NAMES)
    def unexpect(self, name: str) -> None:
        if self.expected.get(name):
            self.index.unexpect(InstanceId(name), keys(self.expected[name].pop(0)))

    @rule(prompt=KEYS)
    def match(self, prompt: list[int]) -> None:
        match = self.index.match(keys(prompt))
        holding, hitting = {}, {}
        for name, known in self.known.items():
            coming = {key(n) for expected in self.expected[name] for n in expected}
            holding[name] = _depth(prompt, known or set())
            hitting[name] = _depth(prompt, (known or set()) | coming)
        assert by_name(self.index, match.held) == {n: d for n, d in holding.items() if d}
        assert by_name(self.index, match.hits) == {n: d for n, d in hitting.items() if d}
        self.check_tiers(prompt, match)
        assert match.deepest == max(holding.values(), default=0)
        few = [self.index.rows[InstanceId(n)] for n, d in holding.items() if d]
        assert sorted(match.deepest_rows) == sorted(few)

    def check_tiers(self, prompt: list[int], match: PrefixMatch) -> None:
        below = {key for name in self.known for key in self.demoted[name]}
        if match.held_in_dram is None or match.hits_in_dram is None:
            assert match.hits_in_dram is None and not below.intersection(keys(prompt))
            return
        near, coming_near = {}, {}
        for name, known in self.known.items():
            in_dram = (known or set()) - self.demoted[name]
            coming = {key(n) for expected in self.expected[name] for n in expected}
            near[name] = _depth(prompt, in_dram)
            coming_near[name] = _depth(prompt, in_dram | coming)
        assert by_name(self.index, match.held_in_dram) == {n: d for n, d in near.items() if d}
        assert by_name(self.index, match.hits_in_dram) == {
            n: d for n, d in coming_near.items() if d
        }

    @invariant()
    def agrees(self) -> None:
        self.index.validate()
        everything = [k for known in self.known.values() for k in known or ()]
        assert len(self.index) == len(set(everything))
        for name in range(8):
            assert bool(self.index.holders_of(key(name))) == (key(name) in everything)
        for name, known in self.known.items():
            assert self.index.num_blocks(InstanceId(name)) == len(known or ())
            assert all(self.index.holds(InstanceId(name), k) for k in known or ())
            for k in known or ():
                assert (InstanceId(name), k in self.demoted[name]) in self.index.holders_of(k)
            coming = {key(n) for expected in self.expected[name] for n in expected}
            assert self.index.expected(InstanceId(name)) == coming


def _depth(prompt: list[int], known: set[BlockKey]) -> int:
    depth = 0
    while depth < len(prompt) and key(prompt[depth]) in known:
        depth += 1
    return depth


IndexMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_events_before_the_first_snapshot_do_not_count() -> None:
    index = PrefixIndex()
    index.add_instance(InstanceId("a"), 1)
    assert not index.apply(InstanceId("a"), 1, 0, [key(0)], [])
    assert held(index, [0]) == {}
    assert index.load_snapshot(InstanceId("a"), 1, 1, [key(0)])
    assert held(index, [0, 1]) == {"a": 1}
    assert index.apply(InstanceId("a"), 1, 1, [key(1)], [])
    assert held(index, [0, 1]) == {"a": 2}


def test_a_gap_drops_all_blocks_of_an_instance() -> None:
    index = PrefixIndex()
    for name in ("a", "b"):
        index.add_instance(InstanceId(name), 1)
        index.load_snapshot(InstanceId(name), 1, 5, [key(0)])
    assert not index.apply(InstanceId("a"), 1, 6, [key(1)], [])
    assert held(index, [0, 1]) == {"b": 1}
    assert not index.apply(InstanceId("a"), 1, 5, [key(1)], []), "only a snapshot mends it"
    assert index.load_snapshot(InstanceId("a"), 1, 9, [key(0), key(1)])
    assert index.apply(InstanceId("a"), 1, 9, [], [key(0)])
    assert held(index, [0]) == {"b": 1}


def test_more_than_64_instances() -> None:
    index = PrefixIndex()
    for number in range(130):
        instance_id = InstanceId(f"i{number}")
        assert index.add_instance(instance_id, 0) == number
        index.load_snapshot(instance_id, 0, 0, keys(list(range(number % 5))))
    assert held(index, [0, 1, 2, 3]) == {f"i{n}": n % 5 for n in range(130) if n % 5}
    match = index.match(keys([0, 1, 2, 3]))
    assert (match.deepest, match.deepest_rows, match.crowd_depth) == (4, (), 4), (
        "26 instances hold them all"
    )
    index.add_instance(InstanceId("more"), 0)
    index.load_snapshot(InstanceId("more"), 0, 0, keys([0, 1, 2, 3, 4]))
    match = index.match(keys([0, 1, 2, 3, 4]))
    assert (match.deepest, match.deepest_rows, match.crowd_depth) == (5, (130,), 4)


def test_a_reused_row_has_no_blocks() -> None:
    index = PrefixIndex()
    for name in ("a", "b"):
        index.add_instance(InstanceId(name), 0)
        index.load_snapshot(InstanceId(name), 0, 0, keys([0, 1]))
    index.expect(InstanceId("a"), keys([0, 1, 2]))
    index.unexpect(InstanceId("a"), keys([0, 1, 2]))
    index.remove_instance(InstanceId("a"))
    assert index.add_instance(InstanceId("c"), 0) == 0
    assert held(index, [0, 1, 2]) == {"b": 2}
    assert list(index.match(keys([0, 1, 2])).hits) == [0, 2]


def test_a_block_expected_twice_stays_expected_until_both_end() -> None:
    index = PrefixIndex()
    index.add_instance(InstanceId("a"), 0)
    index.expect(InstanceId("a"), keys([0, 1]))
    index.expect(InstanceId("a"), keys([0]))
    index.unexpect(InstanceId("a"), keys([0, 1]))
    assert list(index.match(keys([0, 1])).hits) == [1]
    index.unexpect(InstanceId("a"), keys([0]))
    assert list(index.match(keys([0, 1])).hits) == [0]


def test_blocks_of_one_holder_share_one_int() -> None:
    """A million blocks must share one int object, even after a second holder came and went."""
    index = PrefixIndex()
    for number in range(100):
        index.add_instance(InstanceId(f"i{number}"), 0)
        index.load_snapshot(InstanceId(f"i{number}"), 0, 0, [])
    assert index.apply(InstanceId("i99"), 0, 0, keys([0, 1, 2]), [])
    assert index.apply(InstanceId("i50"), 0, 0, keys([1]), [])
    assert index.apply(InstanceId("i50"), 0, 1, [], keys([1]))
    assert len({id(sets) for sets in index._holders.values()}) == 1


def test_nothing_matches_no_keys() -> None:
    index = PrefixIndex()
    index.add_instance(InstanceId("a"), 0)
    index.load_snapshot(InstanceId("a"), 0, 0, [key(0)])
    assert held(index, []) == {} and index.match([]).deepest == 0
