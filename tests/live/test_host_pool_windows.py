"""Serves models whose layers have a sliding window from the pool of a host: checks which blocks are
loaded, held and damaged."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from tests.live.host_pool import Engine, Pool
from tests.live.waiting import wait_until


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool("--dram", "64MiB", "--ssd", "64MiB", "--folder", tempfile.mkdtemp())
    yield found
    found.close()


def run_with_window(engine: Engine, tokens: list[int], seed: int) -> tuple[int, list[np.ndarray]]:
    """Prefills and ends a request whose window slides before its blocks are stored. Returns the
    number of loaded tokens and the content of the loaded blocks."""
    request = engine.request(tokens)
    found = engine.prefill(request, seed)
    content = engine.content(engine.blocks[request.request_id][0])
    for name, block in engine.slide(request, len(tokens)):
        engine.caches[name][block] = 0  # overwrites the block, which another request has now
    engine.finish(request)
    assert not any(engine.users.users)
    return found, content


def test_a_window_needs_its_last_blocks_only(pool: Pool) -> None:
    first, second = (Engine(pool, seed=seed, hybrid=True) for seed in (1, 2))
    tokens = list(range(100))
    found, stored = run_with_window(first, tokens, seed=11)
    assert found == 0
    request = second.request(tokens)
    before = [cache.clone() for cache in second.caches.values()]
    assert second.prefill(request, seed=12) == 96
    ids = second.blocks[request.request_id][0]
    content = second.content(ids)
    assert np.array_equal(content[0][:6], stored[0][:6])
    for layer in (1, 2):
        assert np.array_equal(content[layer][4:6], stored[layer][4:6])
        behind = second.ids_of(ids, layer)[:4]
        assert second.caches[second.names[layer]][behind].equal(before[layer][behind])
    # A prefix of another length has other blocks in its window, which were stored too.
    other = tokens[:64] + [5] * 40
    found, content = run_with_window(first, other, seed=13)
    assert found == 64
    assert np.array_equal(content[0][:4], stored[0][:4])
    assert all(np.array_equal(content[layer][2:4], stored[layer][2:4]) for layer in (1, 2))
    for engine in (first, second):
        engine.close()


def test_a_window_that_is_damaged_costs_the_whole_prefix(pool: Pool) -> None:
    engine = Engine(pool, seed=1, hybrid=True)
    tokens = list(range(100))
    run_with_window(engine, tokens, seed=11)
    for arena in pool.memory.glob("*-r1/arena"):
        data = bytearray(arena.read_bytes())
        for start in range(100, len(data), 4096):
            data[start] ^= 1
        with arena.open("r+b") as file:
            file.write(data)
    again = engine.request(tokens)
    assert engine.prefill(again, seed=12) == 0
    assert engine.scheduler.matched_tokens(again, 0) == 0  # the load that failed is not tried again
    engine.finish(again)
    assert run_with_window(engine, tokens, seed=13)[0] == 96
    engine.close()


def test_a_block_that_was_held_is_given_back(pool: Pool) -> None:
    """Holds for preempted requests, for requests that end early, and when the pool has gone."""
    engine = Engine(pool, seed=1, hybrid=True)
    requests = [engine.request([number * 1000 + i for i in range(64)]) for number in range(3)]
    for number, request in enumerate(requests):
        engine.prefill(request, seed=number)
    assert sum(engine.users.users) == 3 * 4 * 2
    output = engine.output()
    output.preempted_req_ids = {requests[0].request_id}
    engine.run_step(engine.scheduler.build(output, engine.blocks.__getitem__))
    assert sum(engine.users.users) == 2 * 4 * 2
    pool.kill()
    wait_until(lambda: not engine.worker.is_connected and not engine.scheduler.is_connected)
    for request in requests[1:]:
        engine.finish(request)
    assert not any(engine.users.users)
    engine.close()
