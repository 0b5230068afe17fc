"""No step of vLLM waits for a pool that is dead, stopped, late, full, or missing from its
address."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from moonpool.host_pool.messages import PROTOCOL, Find, Found, JoinPool, PoolMessage, Waiting
from moonpool_engine.vllm import space_client, worker_side
from moonpool_engine.vllm.pool_link import MAX_BACKLOG_BYTES, PoolLink
from moonpool_engine.vllm.scheduler_side import ANSWERS_S
from tests.live.host_pool import GROUP, Engine, Pool
from tests.live.waiting import wait_until

LONG_S = 300.0
"""The time that the pool has for an answer. The time is so long that a caller that waits for it is
noticed even on a busy machine."""
MOST_S = 0.05


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool("--dram", "64MiB", "--ssd", "64MiB", "--folder", tempfile.mkdtemp())
    yield found
    found.process.send_signal(signal.SIGCONT)
    found.close()


@contextmanager
def killed(pool: Pool) -> Iterator[None]:
    pool.kill()
    yield


@contextmanager
def stopped(pool: Pool) -> Iterator[None]:
    pool.process.send_signal(signal.SIGSTOP)
    yield
    pool.process.send_signal(signal.SIGCONT)


@contextmanager
def unlinked(pool: Pool) -> Iterator[None]:
    pool.socket.unlink()
    yield


@contextmanager
def late(pool: Pool) -> Iterator[None]:
    """Stops the pool most of the time: it can answer in one of ten moments."""
    ends = threading.Event()

    def stop_often() -> None:
        while not ends.is_set():
            pool.process.send_signal(signal.SIGSTOP)
            time.sleep(0.09)
            pool.process.send_signal(signal.SIGCONT)
            time.sleep(0.01)

    thread = threading.Thread(target=stop_often)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def use(engine: Engine, known: list[int]) -> None:
    """Calls all that a step calls: look-ups, loads, stores, preemptions, ends, and steps without
    work."""
    for number in range(3):
        again = engine.request(known)
        engine.prefill(again, seed=number)
        other = engine.request([1000 * number + i for i in range(64)])
        engine.prefill(other, seed=number)
        step = engine.build(again, other)
        engine.run_step(step)
        engine.worker.preempt([other.request_id])
        for request in (again, other):
            engine.scheduler.on_finished(request, engine.blocks.pop(request.request_id))
        step = engine.build()
        engine.run_step(step)
        engine.worker.take_finished(has_work=False)
        engine.worker.end_stores()


@pytest.mark.parametrize("happens", [killed, stopped, unlinked, late])
def test_no_step_waits_for_the_pool(
    happens: Callable[[Pool], AbstractContextManager[None]],
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, known = Engine(pool, seed=1), list(range(100))
    request = engine.request(known)
    engine.prefill(request, seed=11)
    engine.finish(request)
    monkeypatch.setattr(space_client, "RESERVE_S", LONG_S)
    with happens(pool):
        use(engine, known)
    assert engine.scheduler.waits.longest_s <= ANSWERS_S
    assert engine.worker.waits.longest_s <= worker_side.IDLE_S
    assert engine.scheduler.waits.longest_s + engine.worker.waits.longest_s < MOST_S
    assert engine.worker.waits.longest_copy_s < LONG_S / 2
    engine.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Makes a disk of 80 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_no_step_waits_for_a_full_disk(disk: Path) -> None:
    pool = Pool("--dram", "6MiB", "--ssd", "64MiB", "--folder", str(disk / "pool"))
    try:
        engine = Engine(pool, seed=1)
        with contextlib.suppress(OSError), (disk / "full").open("wb", buffering=0) as file:
            while True:
                os.write(file.fileno(), bytes(1 << 20))
        for number in range(40):
            request = engine.request([5000 * number + i for i in range(100)])
            engine.prefill(request, seed=number)
            engine.finish(request)
        use(engine, list(range(100)))
        assert b"is full" in pool.log()
        assert engine.scheduler.waits.longest_s <= ANSWERS_S
        assert engine.worker.waits.longest_s <= worker_side.IDLE_S
        engine.close()
    finally:
        pool.close()


def test_a_preemption_waits_for_no_answer(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tokens = Engine(pool, seed=1), list(range(64))
    request = engine.request(tokens)
    engine.prefill(request, seed=1)
    step = engine.build(request)
    monkeypatch.setattr(space_client, "RESERVE_S", LONG_S)
    with stopped(pool):
        engine.worker.begin_step(step)
        wait_until(lambda: engine.worker.is_storing)
        engine.worker.preempt([request.request_id])
        assert engine.worker.is_storing  # the client still asks the pool for places
        # stands for the next content of the blocks, which belongs to another request
        for name in engine.names:
            engine.caches[name].zero_()
    wait_until(lambda: not engine.worker.is_storing)
    assert engine.worker.counts["dropped"] == 4
    assert engine.worker.counts["stored"] == 0
    assert engine.look_up([*tokens, 1]) == 0
    engine.close()


def test_a_silent_pool_keeps_no_blocks(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the blocks of ended requests until their stores have ended."""
    engine = Engine(pool, seed=1)
    requests = [engine.request([1000 * number + i for i in range(64)]) for number in range(6)]
    for number, request in enumerate(requests):
        engine.prefill(request, seed=number)
    monkeypatch.setattr(space_client, "RESERVE_S", 0.2)
    monkeypatch.setattr(space_client, "PAUSE_S", LONG_S)
    with stopped(pool):
        for request in requests:
            engine.scheduler.on_finished(request, engine.blocks.pop(request.request_id))
        engine.worker.begin_step(engine.build())
        done: set[str] = set()

        def all_done() -> bool:
            done.update(engine.worker.take_finished(has_work=True))
            return len(done) == len(requests)

        wait_until(all_done)
        (space,) = engine.worker.spaces
        # only one request has reserved: the others have not asked the pool
        assert space.num_reservations == 1
        assert not engine.worker.takes_stores
    wait_until(lambda: engine.worker.takes_stores)  # until the late answer ends the pause
    engine.close()


def test_a_store_under_way_ends_with_its_pool(pool: Pool) -> None:
    engine = Engine(pool, seed=1)
    (space,) = engine.worker.spaces
    places = space.reserve((bytes(16),), 0)
    assert places is not None
    pool.kill()
    pool.start()
    wait_until(lambda: space.memory() is not places.memory and space.is_connected)
    space.fill(places, np.asarray([[1]]))
    # The next pool hears nothing of blocks that it has not reserved, and serves this client.
    again = space.reserve((bytes(16),), 0)
    assert again is not None
    assert again.num_wanted == 1
    assert b"does not understand" not in pool.log()
    engine.close()


class Heard:
    """Returns the messages that a pool sends on a new connection."""

    def __init__(self, pool: Pool) -> None:
        self.messages: list[PoolMessage] = []
        self.num_ends = 0
        self.link = PoolLink(
            pool.socket, JoinPool(protocol=PROTOCOL), self.messages.append, self.end
        )
        self.link.start()
        wait_until(lambda: self.link.connected)

    def end(self) -> None:
        self.num_ends += 1

    def find(self, number: int) -> bool:
        keys = tuple(bytes(16) for _ in range(1000))
        return self.link.send(Find(owner=str(number), group=bytes(32), keys=keys))


def test_what_the_pool_does_not_read_is_sent_later(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool_engine.vllm.pool_link.STALL_S", LONG_S)
    heard = Heard(pool)
    with stopped(pool):
        # 3.6 MB of messages, which no socket buffer holds
        assert all(heard.find(number) for number in range(200))
    wait_until(lambda: len(heard.messages) == 200)
    answered = [one.owner for one in heard.messages if isinstance(one, Found)]
    assert answered == [str(number) for number in range(200)]
    assert heard.num_ends == 0
    heard.link.close()


def test_a_pool_that_reads_nothing_is_left(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard(pool)
    with stopped(pool):
        assert any(not heard.find(number) for number in range(MAX_BACKLOG_BYTES // 16_000 + 100))
        wait_until(lambda: heard.num_ends == 1)
        assert not heard.find(0)
    wait_until(lambda: heard.link.connected)
    heard.messages.clear()
    assert heard.find(7)
    wait_until(lambda: bool(heard.messages))
    heard.link.close()


def test_a_find_that_waits_hears_so_again_and_again(pool: Pool) -> None:
    engine, heard = Engine(pool, seed=1), Heard(pool)
    find = Find(owner="late", group=GROUP, keys=(bytes(16),), wait_s=60.0)
    assert heard.link.send(find)
    wait_until(lambda: sum(isinstance(one, Waiting) for one in heard.messages) >= 3)
    assert not any(isinstance(one, Found) for one in heard.messages)
    heard.link.close()
    engine.close()
