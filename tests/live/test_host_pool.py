"""Runs the pool of a host as its own process, and both sides of vLLM's connector on plain
tensors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moonpool.host_pool.messages import (
    FROM_POOL,
    PROTOCOL,
    Describe,
    Fetched,
    FetchToPool,
    Find,
    JoinPool,
    PoolState,
    Reserve,
    Watch,
    framed,
)
from moonpool.protocol.messages import AttemptId
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import BlockKey
from moonpool.vllm.actions import AwaitPool, PoolReady
from moonpool.vllm.pool_watch import PoolWatch
from tests.live.host_pool import BLOCK_TOKENS, GROUP, Engine, Pool
from tests.live.waiting import wait_until


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool("--dram", "64MiB", "--ssd", "64MiB", "--folder", tempfile.mkdtemp())
    yield found
    found.close()


def same(left: list[np.ndarray], right: list[np.ndarray], count: int) -> bool:
    return all(np.array_equal(a[:count], b[:count]) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("staged", [(False, False), (True, True), (False, True), (True, False)])
def test_what_one_engine_stores_another_one_loads(pool: Pool, staged: tuple[bool, bool]) -> None:
    """With `staged`, tensors are copied like tensors on a device."""
    first, second = Engine(pool, seed=1, staged=staged[0]), Engine(pool, seed=2, staged=staged[1])
    tokens = list(range(100))
    request = first.request(tokens)
    assert first.prefill(request, seed=11) == 0
    stored = first.content(first.blocks[request.request_id][0])
    first.finish(request)
    again = second.request(tokens)
    found = second.prefill(again, seed=12)
    assert found == 96
    assert same(second.content(second.blocks[again.request_id][0]), stored, 6)
    other = second.request(tokens, cache_salt="another tenant")
    assert second.prefill(other, seed=13) == 0
    for engine in (first, second):
        engine.close()


def test_blocks_outlive_engine_and_pool(pool: Pool) -> None:
    first = Engine(pool, seed=1)
    tokens = list(range(160))
    request = first.request(tokens)
    first.prefill(request, seed=11)
    stored = first.content(first.blocks[request.request_id][0])
    first.finish(request)
    wait_until(lambda: first.look_up(tokens) == 144)
    pool.kill()
    # A step waits for nothing while the pool is dead.
    lost = first.request(tokens)
    assert first.prefill(lost, seed=14) == 0
    first.close()
    pool.start()
    second = Engine(pool, seed=2)
    again = second.request(tokens)
    found = second.prefill(again, seed=12)
    assert found == 144
    assert same(second.content(second.blocks[again.request_id][0]), stored, 9)
    second.close()


def test_a_changed_block_is_computed_and_forgotten(pool: Pool) -> None:
    engine = Engine(pool, seed=1)
    tokens = list(range(100))
    request = engine.request(tokens)
    engine.prefill(request, seed=11)
    engine.finish(request)
    (arena,) = pool.memory.glob("*/arena")
    with arena.open("r+b") as file:  # flips one bit in each stored block
        data = bytearray(file.read())
        for start in range(100, len(data), 4096):
            if any(data[start : start + 64]):
                data[start] ^= 1
        file.seek(0)
        file.write(data)
    again = engine.request(tokens)
    found = engine.prefill(again, seed=12)
    assert found == 0
    assert engine.workers[0].counts["wrong"] == 6
    engine.finish(again)  # the blocks that `again` computed were stored again
    third = engine.request(tokens)
    assert engine.prefill(third, seed=13) == 96
    engine.close()


def test_a_silent_pool_stops_no_step(pool: Pool) -> None:
    engine = Engine(pool, seed=1)
    tokens = list(range(100))
    request = engine.request(tokens)
    engine.prefill(request, seed=11)
    engine.finish(request)
    pool.process.send_signal(signal.SIGSTOP)
    try:
        other = engine.request(tokens)
        engine.scheduler.on_new_request(other)
        longest_s, found = 0.0, None
        while found is None:
            # measures the CPU time of this thread, because the machine may be busy
            began_s = time.thread_time()
            found = engine.scheduler.matched_tokens(other, 0)
            longest_s = max(longest_s, time.thread_time() - began_s)
        assert found == 0
        assert longest_s < 0.05
        assert engine.scheduler.counts["silent"] == 1
    finally:
        pool.process.send_signal(signal.SIGCONT)
    engine.close()


def test_preempted_blocks_are_not_read_any_more(pool: Pool) -> None:
    engine = Engine(pool, seed=1)
    requests = [engine.request([number * 1000 + i for i in range(64)]) for number in range(8)]
    for number, request in enumerate(requests):
        engine.prefill(request, seed=number)
    step = engine.build(*requests)
    stored = {spec.req_id: spec for spec in step.stores}
    assert len(stored) == 8
    engine.worker.begin_step(step)
    gone = [request.request_id for request in requests]
    engine.worker.preempt(gone)
    for name in engine.names:  # overwrites the blocks at once, like their next owner
        engine.caches[name].zero_()
    second = Engine(pool, seed=2)
    for number, request in enumerate(requests):
        again = second.request(request.all_token_ids[:64])
        found = second.prefill(again, seed=99)
        if found:  # true if the block was stored before the preemption
            ids = second.blocks[again.request_id][0][: found // BLOCK_TOKENS]
            assert all(second.caches[name][ids].abs().sum() > 0 for name in second.names), number
    engine.close()
    second.close()


def test_no_block_is_read_while_vllm_sleeps(pool: Pool) -> None:
    engine = Engine(pool, seed=1)
    requests = [engine.request([number * 1000 + i for i in range(64)]) for number in range(8)]
    for number, request in enumerate(requests):
        engine.prefill(request, seed=number)
    step = engine.scheduler.build(engine.output(*requests), engine.blocks.__getitem__)
    engine.worker.begin_step(step)
    engine.worker.end_stores()
    counted = dict(engine.worker.counts)
    for name in engine.names:  # overwrites the memory, whose next content belongs to no request
        engine.caches[name].zero_()
    engine.worker.end_stores()
    assert engine.worker.counts == counted
    second = Engine(pool, seed=2)
    for request in requests:
        again = second.request(request.all_token_ids[:64])
        found = second.prefill(again, seed=99)
        if found:
            ids = second.blocks[again.request_id][: found // BLOCK_TOKENS]
            assert all(second.caches[name][ids].abs().sum() > 0 for name in second.names)
    engine.close()
    second.close()


def test_after_a_reset_of_all_caches_the_pool_is_left(pool: Pool) -> None:
    engine, tokens = Engine(pool, seed=1), list(range(64))
    request = engine.request(tokens)
    engine.prefill(request, seed=1)
    engine.finish(request)
    second = Engine(pool, seed=2)
    assert second.look_up([*tokens, 1]) == 64
    second.scheduler.leave_pool("the weights are others")
    assert second.look_up([*tokens, 1]) == 0
    other = second.request([5] * 64)
    second.prefill(other, seed=3)
    second.finish(other)
    assert engine.look_up([5] * 64) == 0
    assert engine.look_up([*tokens, 1]) == 64
    engine.close()
    second.close()


def test_a_block_comes_from_the_ssd_when_memory_is_short() -> None:
    pool = Pool("--dram", "6MiB", "--ssd", "64MiB", "--folder", tempfile.mkdtemp())
    try:
        engine = Engine(pool, seed=1)
        prompts = [[number * 1000 + i for i in range(81)] for number in range(70)]
        stored = {}
        for number, tokens in enumerate(prompts):
            request = engine.request(tokens)
            engine.prefill(request, seed=number)
            stored[number] = engine.content(engine.blocks[request.request_id][0])
            engine.finish(request)
        for number, tokens in enumerate(prompts):
            request = engine.request(tokens)
            found = engine.prefill(request, seed=50 + number)
            ids = engine.blocks[request.request_id][0]
            assert same(engine.content(ids), stored[number], found // BLOCK_TOKENS)
            engine.finish(request)
        # because memory has room for 256 of the 350 blocks
        assert engine.scheduler.counts["from_ssd"] > 0
        engine.close()
    finally:
        pool.close()


def test_a_second_model_is_refused_in_one_line(pool: Pool) -> None:
    engine = Engine(pool, seed=1)
    with pytest.raises(AssertionError, match="did not happen"):
        Engine(pool, group=bytes(32), seed=1, wait_s=0.2)
    wait_until(lambda: b"start it with a larger --models" in pool.log())
    engine.close()
    wait_until(lambda: b"leave DRAM" in pool.log() or Engine(pool, bytes(32)))


def ask(pool: Pool, body: bytes) -> bytes:
    """Sends bytes, and returns what the pool says until the pool ends the connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(30.0)
        sock.connect(str(pool.socket))
        sock.sendall(body)
        sock.shutdown(socket.SHUT_WR)
        said = b""
        while part := sock.recv(1 << 16):
            said += part
        return said


def test_bytes_that_mean_nothing_end_their_connection_alone(pool: Pool) -> None:
    engine = Engine(pool, seed=1)
    join = framed(JoinPool(protocol=PROTOCOL))
    assert b"install the same version" in ask(pool, framed(JoinPool(protocol=PROTOCOL + 1)))
    assert b"exceeds" in ask(pool, b"\xff" * 64)
    assert b"does not understand" in ask(pool, struct.pack(">I", 5) + b"hello")
    assert b"first message" in ask(pool, framed(Find(owner="o", group=GROUP, keys=())))
    assert b"no space" in ask(pool, join + framed(Reserve(number=1, keys=(bytes(16),))))
    assert b"no such model" in ask(pool, join + framed(Watch(group=bytes(32))))
    assert b"Expected" in ask(pool, join + framed({"type": "Find", "owner": 5}))
    tokens = list(range(100))
    request = engine.request(tokens)
    engine.prefill(request, seed=11)
    engine.finish(request)
    again = engine.request(tokens)
    assert engine.prefill(again, seed=12) == 96
    engine.close()


def test_a_socket_of_another_user_is_not_used(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AssertionError, match="did not happen"):
        Engine(pool, seed=1, wait_s=1.0)


def test_a_fetch_brings_blocks_from_another_hosts_pool() -> None:
    secret = "5a" * 32
    here = Pool("--dram", "16MiB", secret=secret)
    there = Pool("--dram", "16MiB", secret=secret)
    stranger = Pool("--dram", "16MiB", secret="a5" * 32)
    pools = (here, there, stranger)
    engines = [Engine(pool, seed=number) for number, pool in enumerate(pools)]
    try:
        tokens = list(range(100))
        request = engines[1].request(tokens)
        engines[1].prefill(request, seed=11)
        stored = engines[1].content(engines[1].blocks[request.request_id][0])
        engines[1].finish(request)
        keys = tuple(engines[1].keys_of(tokens))
        source = address_of_pool(there)
        # finds nothing, because this client knows another secret
        assert fetch(stranger, source, keys).num_blocks == 0
        fetched = fetch(here, source, keys)
        assert (fetched.num_blocks, fetched.error) == (6, "")
        again = engines[0].request(tokens)
        assert engines[0].prefill(again, seed=12) == 96
        assert same(engines[0].content(engines[0].blocks[again.request_id][0]), stored, 6)
    finally:
        for engine in engines:
            engine.close()
        for pool in pools:
            pool.close()


@pytest.mark.parametrize(("hybrid", "ranks"), [(False, 2), (True, 1), (True, 2)])
def test_a_fetch_brings_the_blocks_of_all_ranks(hybrid: bool, ranks: int) -> None:
    """Holds for the process beside vLLM: for its reports to the head, and its work for the head."""
    here, there = (Pool("--dram", "32MiB", secret="5a" * 32) for _ in range(2))
    engines = [
        Engine(pool, seed=number, hybrid=hybrid, ranks=ranks)
        for number, pool in enumerate((here, there))
    ]
    try:
        tokens = list(range(100))
        request = engines[1].request(tokens)
        engines[1].prefill(request, seed=11)
        stored = engines[1].content(engines[1].blocks[request.request_id][0])
        engines[1].finish(request)
        keys = tuple(map(BlockKey, engines[1].keys_of(tokens)))
        assert asyncio.run(fetched_by_watch(here, there, keys)) == 6
        assert address_of_pool(here).tcp_port != address_of_pool(there).tcp_port
        again = engines[0].request(tokens)
        assert engines[0].prefill(again, seed=12) == 96
        loaded = engines[0].content(engines[0].blocks[again.request_id][0])
        assert np.array_equal(loaded[0][:6], stored[0][:6])
        assert np.array_equal(loaded[2][4:6], stored[2][4:6])
    finally:
        for engine in engines:
            engine.close()
        for pool in (here, there):
            pool.close()


async def fetched_by_watch(here: Pool, there: Pool, keys: tuple[BlockKey, ...]) -> int:
    """Returns how many blocks `here` has got from `there`."""
    watches, events = [], []
    for pool in (here, there):
        said: list[Any] = []
        watch = PoolWatch(pool.socket, "m", BLOCK_TOKENS, said.append, lambda *rates: None)
        watches.append((watch, asyncio.create_task(watch.run())))
        events.append(said)
        await watch.settled(20.0)
    source = watches[1][0].address
    assert source is not None
    await watches[0][0].perform(AwaitPool(AttemptId("a"), keys, source))
    (ready,) = [one for one in events[0] if isinstance(one, PoolReady)]
    for _, task in watches:
        task.cancel()
    return ready.num_blocks


def address_of_pool(pool: Pool) -> PeerAddress:
    said = ask(pool, framed(JoinPool(protocol=PROTOCOL)) + framed(Describe()))
    (state,) = [one for one in messages(said) if isinstance(one, PoolState)]
    return state.groups[0].spaces[0].address


def fetch(pool: Pool, source: PeerAddress, keys: tuple[bytes, ...]) -> Fetched:
    message = FetchToPool(number=1, group=GROUP, sources=(source,), keys=keys, timeout_s=20.0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(60.0)
        sock.connect(str(pool.socket))
        sock.sendall(framed(JoinPool(protocol=PROTOCOL)) + framed(message))
        said = b""
        while True:
            said += sock.recv(1 << 16)
            for one in messages(said):
                if isinstance(one, Fetched):
                    return one


def messages(said: bytes) -> list[Any]:
    found = []
    while len(said) >= 4:
        (length,) = struct.unpack(">I", said[:4])
        if len(said) < 4 + length:
            break
        found.append(FROM_POOL.decode(said[4 : 4 + length]))
        said = said[4 + length :]
    return found
