"""Tests takeovers of prefixes, and the list of the most used prefixes."""

from __future__ import annotations

from test_instance import PEER, SIZE, Bench, attempt, keys_of, of, reported

from moonpool.protocol.messages import (
    BlocksChanged,
    HotPrefixes,
    LeaveCluster,
    ListHot,
    MarkReplicas,
    PrefixTakenOver,
    StartPrefill,
    TakeOverPrefix,
)
from moonpool.protocol.transfer_events import FetchEnded, LookUpEnded
from moonpool.scheduler.actions import ExitProcess, FetchBlocks
from moonpool.types import BlockKey, Role

KEYS = tuple(keys_of(tuple(range(500, 500 + 4 * SIZE))))


def take(keys: tuple[BlockKey, ...] = KEYS, num_uses: int = 1, number: int = 1) -> TakeOverPrefix:
    return TakeOverPrefix(number=number, source=PEER, keys=keys, num_uses=num_uses, timeout_s=5.0)


def serve(bench: Bench, name: str, first: int, num_tokens: int = 3 * SIZE) -> None:
    """Runs a request whose answer has one token."""
    asked = attempt(name, num_tokens=num_tokens, first=first, max_tokens=1)
    bench.handle(StartPrefill(attempt=asked))
    while bench.step is not None:
        bench.end_step()


def hot(bench: Bench, num_blocks: int = 100) -> list[tuple[int, int]]:
    (said,) = reported(bench.handle(ListHot(number=4, num_blocks=num_blocks)), HotPrefixes)
    assert said.number == 4
    return [(len(prefix.keys), prefix.num_uses) for prefix in said.prefixes]


def test_missing_blocks_are_fetched_and_cached() -> None:
    bench = Bench(Role.PREFILL)
    (fetch,) = of(bench.handle(take()), FetchBlocks)
    assert fetch.keys == KEYS and fetch.source is PEER and fetch.timeout_s == 5.0
    actions = bench.handle(FetchEnded(fetch.fetch_id, 3, error="the last one did not come"))
    assert reported(actions, PrefixTakenOver)[0].num_blocks == 3
    assert reported(actions, BlocksChanged)[0].stored == KEYS[:3]
    bench.assert_empty()
    (fetch,) = of(bench.handle(take(number=2)), FetchBlocks)
    assert fetch.keys == KEYS[3:], "the other blocks are cached"
    bench.handle(FetchEnded(fetch.fetch_id, 1))
    assert hot(bench) == [(3, 2), (4, 1)], "uses at the source are added"


def test_blocks_used_as_often_are_not_evicted_for_a_takeover() -> None:
    bench = Bench(Role.PREFILL, num_blocks=8)
    for name in ("a", "b"):
        serve(bench, name, first=100)
    serve(bench, "c", first=200, num_tokens=4 * SIZE)
    uses = dict(hot(bench))
    assert uses[4] == 0 and max(uses.values()) >= 1
    actions = bench.handle(take(KEYS[:2]))
    (fetch,) = of(actions, FetchBlocks)
    bench.handle(FetchEnded(fetch.fetch_id, 2))
    (said,) = reported(bench.handle(take(num_uses=0, number=2)), PrefixTakenOver)
    assert said.full and not said.num_blocks
    assert bench.instance.pool.match(keys_of(tuple(range(100, 100 + 2 * SIZE))))
    bench.assert_empty()


def test_the_prefixes_used_most_come_first_and_none_twice() -> None:
    bench = Bench(Role.PREFILL)
    serve(bench, "a", first=100, num_tokens=2 * SIZE + 1)
    serve(bench, "b", first=100, num_tokens=2 * SIZE + 1)
    serve(bench, "c", first=100, num_tokens=4 * SIZE)
    serve(bench, "d", first=300)
    listed = hot(bench)
    assert listed[0][0] == 2 and listed[0][1] >= 2
    assert sorted(size for size, _ in listed) == [2, 3, 4]
    assert hot(bench, num_blocks=3)[0][0] == 2
    assert sum(size for size, _ in hot(bench, num_blocks=5)) <= 5


def test_spare_copies_are_evicted_first() -> None:
    bench = Bench(Role.PREFILL, num_blocks=7)
    serve(bench, "a", first=100)
    serve(bench, "b", first=200)
    copies = tuple(keys_of(tuple(range(200, 200 + 3 * SIZE))))
    bench.handle(MarkReplicas(spare=copies))
    serve(bench, "c", first=300)
    assert len(bench.instance.pool.match(keys_of(tuple(range(100, 100 + 3 * SIZE))))) == 3
    assert len(bench.instance.pool.match(copies)) < 3


def test_leaving_ends_the_process() -> None:
    assert of(Bench(Role.DECODE).handle(LeaveCluster()), ExitProcess)


def test_blocks_in_a_shared_store_are_not_lost_with_an_instance() -> None:
    bench = Bench(Role.PREFILL, ssd_blocks=64, store_shared=True)
    asked = attempt("a", num_tokens=4 * SIZE, first=100, max_tokens=1)
    bench.handle(StartPrefill(attempt=asked))
    bench.handle(LookUpEnded(lookup_id="a", num_blocks=0))
    while bench.step is not None:
        bench.end_step()
    tier, keys = bench.instance.tier, keys_of(tuple(range(100, 100 + 4 * SIZE)))
    assert tier is not None

    def longest(lost_with_it: bool = True) -> tuple[BlockKey, ...]:
        command = ListHot(number=1, num_blocks=100, lost_with_it=lost_with_it)
        (said,) = reported(bench.handle(command), HotPrefixes)
        return max((prefix.keys for prefix in said.prefixes), key=len, default=())

    assert longest() == tuple(keys), "no other instance can load it"
    tier.learn(keys[3:], 3)
    assert longest() == tuple(keys[:3]), "the store has its last block"
    tier.learn(keys[:2], 0)
    assert longest() == tuple(keys[:3]), "a block without its prefix is useless"
    tier.learn(keys[2:3], 2)
    assert longest() == ()
    assert longest(lost_with_it=False) == tuple(keys)
    tier.paused = "it does not answer"
    assert longest() == tuple(keys)
