"""Prefixes that are taken over, and those that an instance says it uses most."""

from __future__ import annotations

from test_instance import PEER, SIZE, Bench, keys_of, of, told, work

from moonpool.kvcache.transfers import FetchEnded, LookUpEnded
from moonpool.types import BlockKey, Role
from moonpool.workers.actions import Depart, FetchBlocks
from moonpool.workers.messages import (
    BlocksChanged,
    HotPrefixes,
    Leave,
    ListHot,
    MarkCopies,
    StartPrefill,
    TakenOver,
    TakeOver,
)

KEYS = tuple(keys_of(tuple(range(500, 500 + 4 * SIZE))))


def take(keys: tuple[BlockKey, ...] = KEYS, num_uses: int = 1, number: int = 1) -> TakeOver:
    return TakeOver(number=number, source=PEER, keys=keys, num_uses=num_uses, timeout_s=5.0)


def serve(bench: Bench, name: str, first: int, num_tokens: int = 3 * SIZE) -> None:
    """A prompt is prefilled and its answer is over at once."""
    asked = work(name, num_tokens=num_tokens, first=first, max_tokens=1)
    bench.handle(StartPrefill(work=asked))
    while bench.step is not None:
        bench.end_step()


def hot(bench: Bench, num_blocks: int = 100) -> list[tuple[int, int]]:
    (said,) = told(bench.handle(ListHot(number=4, num_blocks=num_blocks)), HotPrefixes)
    assert said.number == 4
    return [(len(prefix.keys), prefix.num_uses) for prefix in said.prefixes]


def test_what_is_missing_is_fetched_and_cached() -> None:
    bench = Bench(Role.PREFILL)
    (fetch,) = of(bench.handle(take()), FetchBlocks)
    assert fetch.keys == KEYS and fetch.source is PEER and fetch.timeout_s == 5.0
    actions = bench.handle(FetchEnded(fetch.fetch_id, 3, error="the last one did not come"))
    assert told(actions, TakenOver)[0].num_blocks == 3
    assert told(actions, BlocksChanged)[0].stored == KEYS[:3]
    bench.assert_empty()
    (fetch,) = of(bench.handle(take(number=2)), FetchBlocks)
    assert fetch.keys == KEYS[3:], "the others are here"
    bench.handle(FetchEnded(fetch.fetch_id, 1))
    assert hot(bench) == [(3, 2), (4, 1)], "how often it was used elsewhere counts on"


def test_nothing_that_is_used_as_often_is_evicted_for_it() -> None:
    bench = Bench(Role.PREFILL, num_blocks=8)
    for name in ("a", "b"):
        serve(bench, name, first=100)
    serve(bench, "c", first=200, num_tokens=4 * SIZE)
    uses = dict(hot(bench))
    assert uses[4] == 0 and max(uses.values()) >= 1
    actions = bench.handle(take(KEYS[:2]))
    (fetch,) = of(actions, FetchBlocks)
    bench.handle(FetchEnded(fetch.fetch_id, 2))
    (said,) = told(bench.handle(take(num_uses=0, number=2)), TakenOver)
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


def test_spare_copies_go_first() -> None:
    bench = Bench(Role.PREFILL, num_blocks=7)
    serve(bench, "a", first=100)
    serve(bench, "b", first=200)
    copies = tuple(keys_of(tuple(range(200, 200 + 3 * SIZE))))
    bench.handle(MarkCopies(spare=copies))
    serve(bench, "c", first=300)
    assert len(bench.instance.pool.match(keys_of(tuple(range(100, 100 + 3 * SIZE))))) == 3
    assert len(bench.instance.pool.match(copies)) < 3


def test_one_that_is_told_to_leave_says_so_to_its_driver() -> None:
    assert of(Bench(Role.DECODE).handle(Leave()), Depart)


def test_what_a_shared_store_keeps_is_not_lost_with_an_instance() -> None:
    bench = Bench(Role.PREFILL, ssd_blocks=64, store_shared=True)
    asked = work("a", num_tokens=4 * SIZE, first=100, max_tokens=1)
    bench.handle(StartPrefill(work=asked))
    bench.handle(LookUpEnded(lookup_id="a", num_blocks=0))
    while bench.step is not None:
        bench.end_step()
    tier, keys = bench.instance._holdings.tier, keys_of(tuple(range(100, 100 + 4 * SIZE)))
    assert tier is not None

    def longest(lost_with_it: bool = True) -> tuple[BlockKey, ...]:
        command = ListHot(number=1, num_blocks=100, lost_with_it=lost_with_it)
        (said,) = told(bench.handle(command), HotPrefixes)
        return max((prefix.keys for prefix in said.prefixes), key=len, default=())

    assert longest() == tuple(keys), "nobody else can load it"
    tier.learn(keys[3:], 3)
    assert longest() == tuple(keys[:3]), "its end is there"
    tier.learn(keys[:2], 0)
    assert longest() == tuple(keys[:3]), "what continues a prefix is of no use without it"
    tier.learn(keys[2:3], 2)
    assert longest() == ()
    assert longest(lost_with_it=False) == tuple(keys)
    tier.paused = "it does not answer"
    assert longest() == tuple(keys)
