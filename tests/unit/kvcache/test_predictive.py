"""Compares the predictive policy with LRU on several kinds of workloads, and tests what it
learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kvcache.block_pool import BlockPool
from moonpool.kvcache.eviction.policies import make_eviction
from moonpool.kvcache.eviction.predictive import GHOSTS_PER_BLOCK, PredictiveEviction
from moonpool.kvcache.eviction.survival import AGE_LIMITS, NUM_AGES, ReuseModel
from moonpool.types import BlockId, BlockKey

Names = list[object]


class Chains:
    """Returns keys of blocks: equal prefixes have equal keys."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, object], int] = {}

    def prompt(self, names: Names) -> list[BlockKey]:
        keys, parent = [], -1
        for name in names:
            parent = self._numbers.setdefault((parent, name), len(self._numbers))
            keys.append(BlockKey(parent.to_bytes(8, "big")))
        return keys


def test_a_prompt_may_continue_a_cached_block() -> None:
    """A segment that is continued leaves its queue, and enters the queue again afterwards."""
    policy = PredictiveEviction(64)
    for block in range(6):
        policy.store([BlockId(block)], [BlockKey(bytes([block]))], [block])
    policy.add([BlockId(0), BlockId(1), BlockId(2)], None)
    policy.add([BlockId(3), BlockId(4), BlockId(5)], BlockId(2))
    for _ in range(40):  # lets time pass, so that queued segments change their queue
        policy.store([BlockId(6)], [BlockKey(b"busy")], [0])
        policy.touch([BlockId(6)] * 30)
    assert policy.pop(3) == [5, 4, 3], "no block goes before what continues it"
    assert policy.pop(3) == [2, 1, 0]
    assert len(policy) == 0


def some(name: object, count: int) -> Names:
    return [(name, place) for place in range(count)]


def scan(rng: Random) -> Iterator[Names]:
    """Makes a workload in which only the first two blocks come back."""
    for number in range(1500):
        yield [*some("system", 2), *some(number, rng.randint(5, 30))]


def popular_documents(rng: Random, tag: str = "") -> Iterator[Names]:
    sizes = [rng.randint(2, 20) for _ in range(400)]
    weights = [1 / (rank + 1) for rank in range(400)]
    for number, document in enumerate(rng.choices(range(400), weights, k=2500)):
        document_blocks = some((tag, document), sizes[document])
        yield [*some("system", 2), *document_blocks, *some((tag, number, "?"), rng.randint(1, 4))]


def sessions(rng: Random) -> Iterator[Names]:
    live: list[Names] = []
    for number in range(2500):
        if not live or (len(live) < 40 and rng.random() < 0.5):
            live.append([*some("system", 3), *some(number, rng.randint(2, 20))])
            session = live[-1]
        else:
            session = rng.choice(live)
            session.extend(some(("turn", number), rng.randint(1, 3)))
        yield list(session)
        if rng.random() < 0.3:
            live.remove(session)


def loop(rng: Random) -> Iterator[Names]:
    for number in range(2000):
        yield some(number % 120, 10)


def agents(rng: Random) -> Iterator[Names]:
    """Makes series of quick steps: each series begins with one of twenty long prefixes, and each
    step continues the step before."""
    live: list[tuple[Names, int]] = []
    for number in range(2500):
        while len(live) < 8:
            beginning = some(("kind", rng.randrange(20)), 12)
            live.append(([*beginning, *some(("job", number, len(live)), 2)], rng.randint(3, 12)))
        chosen = rng.randrange(len(live))
        names, steps_left = live.pop(chosen)
        names.extend(some(("step", number), rng.randint(1, 3)))
        yield list(names)
        if steps_left > 1:
            live.append((names, steps_left - 1))


def a_shift_of_kind(rng: Random) -> Iterator[Names]:
    yield from loop(rng)
    yield from sessions(rng)
    yield from popular_documents(rng)


def a_shift_of_popularity(rng: Random) -> Iterator[Names]:
    for tag in ("monday", "tuesday", "wednesday"):
        yield from popular_documents(rng, tag)


KINDS: tuple[Callable[[Random], Iterator[Names]], ...] = (
    scan,
    popular_documents,
    sessions,
    loop,
    agents,
    a_shift_of_kind,
    a_shift_of_popularity,
)


def hit_ratio(policy: str, prompts: list[list[BlockKey]], capacity: int) -> float:
    pool = BlockPool(capacity, make_eviction(policy, capacity))
    num_hits = 0
    for keys in prompts:
        cached = pool.match(keys)
        pool.acquire("a", cached)
        new = pool.allocate("a", min(len(keys) - len(cached), pool.num_available))
        for depth, block in enumerate(new or [], len(cached)):
            pool.cache_block(block, keys[depth], depth)
        pool.release("a")
        num_hits += len(cached)
    return num_hits / sum(len(keys) for keys in prompts)


def prompts_of(kind: Callable[[Random], Iterator[Names]]) -> list[list[BlockKey]]:
    chains = Chains()
    return [chains.prompt(names) for names in kind(Random(5))]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_it_is_not_worse_than_lru_on_any_workload(
    kind: Callable[[Random], Iterator[Names]],
) -> None:
    prompts = prompts_of(kind)
    for capacity in (100, 300, 1000):
        lru = hit_ratio("lru", prompts, capacity)
        assert hit_ratio("predictive", prompts, capacity) > lru - 0.01


@pytest.mark.parametrize(
    ("kind", "capacity", "gain"),
    [
        (popular_documents, 300, 0.05),
        (loop, 1000, 0.5),
        (a_shift_of_kind, 1000, 0.05),
        (a_shift_of_popularity, 300, 0.05),
    ],
)
def test_it_is_better_where_the_past_predicts_the_future(
    kind: Callable[[Random], Iterator[Names]], capacity: int, gain: float
) -> None:
    prompts = prompts_of(kind)
    lru = hit_ratio("lru", prompts, capacity)
    assert hit_ratio("predictive", prompts, capacity) > lru + gain


def rewritten(rng: Random) -> Iterator[Names]:
    """Makes prompts that come back once, after twenty other prompts, with their last blocks
    changed."""
    for number in range(500):
        yield [*some(number, 10), *some((number, "draft"), 4)]
        if number >= 20:
            yield [*some(number - 20, 10), *some((number, "final"), 4)]


def test_blocks_left_behind_are_evicted_before_those_used_again() -> None:
    prompts = prompts_of(rewritten)
    possible = 10 * 480 / sum(len(keys) for keys in prompts)
    assert hit_ratio("lru", prompts, 320) < 0.1 * possible
    assert hit_ratio("predictive", prompts, 320) > 0.8 * possible


def test_ghosts_are_bounded() -> None:
    policy = PredictiveEviction(10)
    pool = BlockPool(10, policy)
    for number in range(200):
        (block,) = pool.allocate("a", 1) or []
        pool.cache_block(block, BlockKey(number.to_bytes(8, "big")))
        pool.release("a")
    assert len(policy._ghosts) == GHOSTS_PER_BLOCK * 10
    (block,) = pool.allocate("a", 1) or []
    pool.cache_block(block, BlockKey((180).to_bytes(8, "big")))
    assert policy._num_uses[block] == 2


def test_without_history_the_order_is_that_of_lru() -> None:
    worths = ReuseModel(period=1, decay=0.99)
    class_id = worths.add_class(0)
    by_age = worths.worths()[class_id]
    assert len(by_age) == NUM_AGES
    assert all(younger > older for younger, older in pairwise(by_age[1:]))
    assert by_age[-1] == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans()), max_size=60))
def test_worths_are_the_same_however_often_they_are_asked_for(
    epochs: list[tuple[int, int, bool]],
) -> None:
    """A pool that evicts nothing for a long time must compute the worths of many lessons only
    once."""
    often, seldom = ReuseModel(period=2, decay=0.9), ReuseModel(period=2, decay=0.9)
    for family, age_range, asks in epochs:
        for model in (often, seldom):
            class_id = model.add_class(family)
            model.note_release(class_id, 1000)
            model.note_reuse(class_id, age_range, 300)
            model.end_epoch()
        often.worths()
        if asks:
            assert often.worths() == seldom.worths()
    assert often.worths() == seldom.worths()


def learn(model: ReuseModel, class_id: int, age_range: int, share: float) -> None:
    """Releases blocks of the class in every epoch, and uses this share of them again at that
    age."""
    for epoch in range(400):
        model.note_release(class_id, 1000)
        if epoch >= AGE_LIMITS[age_range]:
            model.note_reuse(class_id, age_range, int(1000 * share))
        model.end_epoch()


def test_blocks_are_worth_most_shortly_before_their_reuse() -> None:
    model = ReuseModel(period=1, decay=0.99)
    class_id = model.add_class(0)
    learn(model, class_id, age_range=9, share=0.5)
    by_age = model.worths()[class_id]
    assert max(by_age) == by_age[9]
    assert by_age[0] < by_age[4] < by_age[8] < by_age[9]
    assert by_age[10] < 0.1 * by_age[9]
    # Half of the blocks come back at an age of 12 to 16 epochs: 0.5 hits for 4 epochs of about 0.75
    # blocks.
    assert by_age[9] == pytest.approx(0.5 / (4 * 0.75), rel=0.1)


def test_reuse_is_counted_against_the_blocks_released_at_its_time() -> None:
    """Load grows by a twentieth per epoch; half of the blocks that were released long ago come
    back."""
    model = ReuseModel(period=1, decay=0.99)
    class_id = model.add_class(0)
    released = [100.0]
    for epoch in range(200):
        model.note_release(class_id, int(released[-1]))
        if epoch >= 14:
            model.note_reuse(class_id, 9, int(released[epoch - 14] / 2))
        released.append(released[-1] * 1.05)
        model.end_epoch()
    assert model.worths()[class_id][9] == pytest.approx(0.5 / (4 * 0.75), rel=0.15)


def test_a_class_used_again_more_often_is_worth_more() -> None:
    model = ReuseModel(period=4, decay=0.9)
    often, seldom, unknown = (model.add_class(0) for _ in range(3))
    for _ in range(400):
        for class_id, hits in ((often, 500), (seldom, 50)):
            model.note_release(class_id, 1000)
            model.note_reuse(class_id, 3, hits)
        model.end_epoch()
    worths = model.worths()
    assert worths[often][0] > 3 * worths[seldom][0]
    assert worths[often][0] > worths[unknown][0] > worths[seldom][0]


def test_a_run_released_in_parts_keeps_its_order() -> None:
    policy = PredictiveEviction(100)
    blocks = [BlockId(b) for b in range(8)]
    for block in blocks:
        policy.store([block], [BlockKey(block.to_bytes(8, "big"))], [block])
    policy.add(blocks[3:], blocks[2])
    policy.add(blocks[:3], None)
    assert policy.pop(6) == [7, 6, 5, 4, 3, 2]
    policy.remove([BlockId(0)])
    assert list(policy.pop(1)) == [1]
    assert len(policy) == 0


def test_a_block_that_others_continue_is_evicted_after_them() -> None:
    policy = PredictiveEviction(100)
    earlier, run = range(10, 16), range(6)
    for block in (*earlier, *run):
        policy.store([BlockId(block)], [BlockKey(block.to_bytes(8, "big"))], [block % 10])
    branch = BlockId(6)
    policy.store([branch], [BlockKey(b"branches")], [3])
    policy.touch([branch])
    # All blocks have equal worth except the branch. Without history, the first block of its kind is
    # evicted first.
    policy.add([BlockId(b) for b in earlier], None)
    policy.add([branch], BlockId(2))
    policy.add([BlockId(b) for b in run], None)
    assert policy.pop(6) == list(reversed(earlier))
    assert policy.pop(7) == [5, 4, 3, 6, 2, 1, 0]


def test_an_evictable_block_that_gets_a_continuation_is_evicted_after_it() -> None:
    """If the key of a twin was taken, nobody holds the predecessor when its continuation is
    released. The continuation must leave the queue, or the pool gives it away twice."""
    policy = PredictiveEviction(8)
    for depth in range(3):
        policy.store([BlockId(depth)], [BlockKey(bytes([depth]))], [depth])
    policy.add([BlockId(0), BlockId(1)], None)
    policy.add([BlockId(2)], BlockId(1))
    assert policy.pop(1) == [2]
    policy.store([BlockId(2)], [BlockKey(b"other")], [9])
    assert policy.pop(2) == [1, 0]
    with pytest.raises(KeyError):
        policy.pop(1)
