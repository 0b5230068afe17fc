"""The pool of a host as its own process, and the two sides of vLLM's connector on plain tensors."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moonpool.host_pool.framing import framed
from moonpool.host_pool.messages import (
    FROM_POOL,
    PROTOCOL,
    AttachRank,
    Describe,
    Fetched,
    FetchToPool,
    Find,
    JoinPool,
    PoolState,
    Reserve,
    Watch,
)
from moonpool.protocol.block_hash import block_keys
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import AttemptId
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import BlockKey
from moonpool.vllm.actions import AwaitPool, PoolReady
from moonpool.vllm.pool_watch import PoolWatch
from moonpool_engine.vllm.block_copier import BlockCopier, DeviceCopier, HostCopier
from moonpool_engine.vllm.block_kinds import kinds_of, windows_of
from moonpool_engine.vllm.cache_layout import CacheLayout
from moonpool_engine.vllm.prompt_keys import root_of
from moonpool_engine.vllm.scheduler_side import SchedulerSide
from moonpool_engine.vllm.slice_mover import open_mover
from moonpool_engine.vllm.space_client import SpaceClient
from moonpool_engine.vllm.transfers import RankReady, StepTransfers
from moonpool_engine.vllm.worker_side import WorkerSide

BLOCK_TOKENS, NUM_BLOCKS, NUM_LAYERS = 16, 40, 3
WINDOW_TOKENS, WINDOW_BLOCKS = 33, 2
SHAPE = (NUM_BLOCKS, 2, BLOCK_TOKENS, 128)
GROUP = bytes(range(32))


class FullAttentionSpec:
    """As vLLM's own, for the layout."""

    block_size = BLOCK_TOKENS
    page_size_bytes = 2 * BLOCK_TOKENS * 128 * 2


class SlidingWindowSpec:
    block_size = BLOCK_TOKENS
    page_size_bytes = 2 * BLOCK_TOKENS * 128 * 2
    sliding_window = WINDOW_TOKENS


class BlockUsers:
    """vLLM's block pool, as far as blocks are held: how many users each has."""

    def __init__(self) -> None:
        self.blocks = list(range(NUM_BLOCKS))
        self.users = [0] * NUM_BLOCKS

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            assert self.users[block] >= 0


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> None:
    end_s = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)


class Pool:
    """`moonpool pool serve` with folders of its own."""

    def __init__(self, *flags: str, secret: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moonpool-pool-"))
        self.memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.memory.chmod(0o700)
        self.socket = self.folder / "pool.sock"
        self._flags = flags
        self._environment = dict(os.environ)
        if secret:
            self._environment["MOONPOOL_CLUSTER_SECRET"] = secret
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        place = ["--socket", str(self.socket), "--memory-folder", str(self.memory)]
        command = [sys.executable, "-m", "moonpool", "pool", "serve", *place, *self._flags]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, env=self._environment)
        wait_for(lambda: b"serves at" in self.log())
        return self.process

    def log(self) -> bytes:
        return (self.folder / "log").read_bytes()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        (self.folder / "log").write_bytes(b"")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.memory)


class Engine:
    """What vLLM does around the connector: tensors, requests, steps."""

    def __init__(
        self,
        pool: Pool,
        group: bytes = GROUP,
        seed: int = 0,
        wait_s: float = 60.0,
        staged: bool = False,
        hybrid: bool = False,
        ranks: int = 1,
    ) -> None:
        """`hybrid`: each layer is in a group of its own, and all but the first have a window."""
        names = [f"layer.{number}" for number in range(NUM_LAYERS)]
        generator = torch.Generator().manual_seed(seed)
        self.caches = {
            name: torch.randn(SHAPE, generator=generator).to(torch.bfloat16) for name in names
        }
        groups: list[tuple[list[str], Any]] = [(names, FullAttentionSpec())]
        if hybrid:
            specs = [FullAttentionSpec(), SlidingWindowSpec(), SlidingWindowSpec()]
            groups = [([name], spec) for name, spec in zip(names, specs, strict=True)]
        config = SimpleNamespace(
            num_blocks=NUM_BLOCKS,
            kv_cache_groups=[
                SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in groups
            ],
            kv_cache_tensors=[],
        )
        layout = CacheLayout.of(self.caches, config)
        kinds = kinds_of(layout)
        self.names = names
        self.group_of = {name: number for number, (names, _) in enumerate(groups) for name in names}
        self.workers = []
        for rank in range(ranks):
            spaces = []
            for kind in kinds:
                number = rank * len(kinds) + kind.index
                nominal = BlockLayout(
                    model_fingerprint=f"m {number}",
                    dtype="bfloat16",
                    block_tokens=1,
                    num_layers=kind.num_slices,
                    num_kv_heads=1,
                    head_dim=layout.slice_bytes // 4,
                    inner="vllm",
                )
                attach = AttachRank(
                    protocol=PROTOCOL,
                    group=group,
                    model="m",
                    rank=number,
                    num_ranks=ranks * len(kinds),
                    block_tokens=BLOCK_TOKENS,
                    layout=nominal,
                    window_blocks=kind.window_blocks,
                )
                copier: BlockCopier = HostCopier(layout, kind, open_mover())
                if staged:
                    copier = DeviceCopier(layout, kind, open_mover(), self.caches)
                spaces.append(SpaceClient(pool.socket, attach, layout, kind, copier))
            self.workers.append(WorkerSide(spaces))
        self.worker = self.workers[0]
        self.scheduler = SchedulerSide(pool.socket, BLOCK_TOKENS, time.monotonic)
        self.users = BlockUsers()
        windows = windows_of(layout.groups)
        ready = [RankReady(group, rank, ranks, "", windows) for rank in range(ranks)]
        self.scheduler.begin(ready, self.users)
        self.windows, self.groups = windows, range(len(windows))
        self.blocks: dict[str, list[list[int]]] = {}
        self.next_block = 1
        self.number = 0
        sides: list[WorkerSide | SchedulerSide] = [*self.workers, self.scheduler]
        wait_for(lambda: all(side.is_connected for side in sides), wait_s)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def request(self, tokens: list[int], **more: Any) -> Any:
        self.number += 1
        return SimpleNamespace(
            request_id=f"r{self.number}-{id(self)}",
            all_token_ids=list(tokens),
            num_tokens=len(tokens),
            num_computed_tokens=0,
            **more,
        )

    def keys_of(self, tokens: list[int]) -> list[bytes]:
        return list(block_keys(tokens, BLOCK_TOKENS, root_of(self.request(tokens), str)))

    def take_blocks(self, request: Any) -> list[int]:
        count = -(-request.num_tokens // BLOCK_TOKENS)
        if self.next_block + count > NUM_BLOCKS:
            self.next_block = 1
        ids = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        self.blocks[request.request_id] = [self.ids_of(ids, group) for group in self.groups]
        return ids

    def ids_of(self, ids: list[int], group: int) -> list[int]:
        """Each group has blocks of its own."""
        return [1 + (block - 1 + 7 * group) % (NUM_BLOCKS - 1) for block in ids]

    def run_step(self, step: StepTransfers) -> set[int]:
        wrong = set()
        for worker in self.workers:
            worker.preempt(step.preempted)
            worker.begin_step(step)
            for name in self.names:
                worker.wait_for_layer(name)
            worker.end_step()
            wrong |= worker.take_wrong_blocks()
            self.hear(worker)
        return wrong

    def hear(self, worker: WorkerSide) -> None:
        ended = worker.take_ended()
        if ended is not None:
            self.scheduler.on_ended(ended)

    def output(self, *requests: Any, tokens: int = 1) -> Any:
        scheduled = {one.request_id: tokens for one in requests}
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=tokens * len(scheduled),
            preempted_req_ids=set(),
        )

    def build(self, *requests: Any, tokens: int = 1) -> StepTransfers:
        return self.scheduler.build(self.output(*requests, tokens=tokens), self.blocks.__getitem__)

    def prefill(self, request: Any, seed: int) -> tuple[int, set[int]]:
        """Loads what the pool has, "computes" the rest, and stores it. Returns the tokens that
        were loaded, and the wrong blocks."""
        self.scheduler.on_new_request(request)
        found: int | None = None
        while found is None:
            found = self.scheduler.matched_tokens(request, 0)
        ids = self.take_blocks(request)
        self.slide(request, found)
        self.scheduler.on_allocated(request, self.blocks[request.request_id], found)
        if self.scheduler.loads_apart and found:
            self.run_step(self.build())
            loaded = [worker.take_loaded() for worker in self.workers]
            assert all(done == {request.request_id} for done, _ in loaded)
            if any(failed for _, failed in loaded):
                ids, found = self.take_blocks(request), 0
        request.num_computed_tokens = 0
        wrong = self.run_step(self.build(request, tokens=request.num_tokens))
        generator = torch.Generator().manual_seed(seed)
        for name in self.names:
            fresh = torch.randn((len(ids), *SHAPE[1:]), generator=generator).to(torch.bfloat16)
            for index, block in enumerate(self.ids_of(ids, self.group_of[name])):
                if index * BLOCK_TOKENS >= found or block in wrong:
                    self.caches[name][block] = fresh[index]
        request.num_computed_tokens = request.num_tokens
        request.all_token_ids.append(7)
        request.num_tokens += 1
        return found, wrong

    def slide(self, request: Any, num_tokens: int) -> list[tuple[str, int]]:
        """As vLLM before a step: blocks that are behind all windows are no longer the request's.
        Returns those that nobody uses any more, by layer."""
        free = []
        first = max(num_tokens - WINDOW_TOKENS + 1, 0) // BLOCK_TOKENS
        for name in self.names:
            group = self.group_of[name]
            if not self.windows[group]:
                continue
            table = self.blocks[request.request_id][group]
            for index, block in enumerate(table[:first]):
                if block and not self.users.users[block]:
                    free.append((name, block))
                table[index] = 0
        return free

    def finish(self, request: Any) -> None:
        table = self.blocks.pop(request.request_id)
        if not self.scheduler.on_finished(request, table):
            return
        self.run_step(self.build())
        for worker in self.workers:
            self.wait_for_stores(worker, request)
        # An answer to a later find means that the pool has handled the stores.
        self.look_up(request.all_token_ids[:-1])

    def wait_for_stores(self, worker: WorkerSide, request: Any) -> None:
        wait_for(lambda: request.request_id in worker.take_finished(False))
        self.hear(worker)

    def look_up(self, tokens: list[int]) -> int:
        """How many tokens of a prompt the pool has."""
        request = self.request(tokens)
        self.scheduler.on_new_request(request)
        found: int | None = None
        while found is None:
            found = self.scheduler.matched_tokens(request, 0)
        self.scheduler.on_allocated(request, [], 0)
        self.scheduler.on_finished(request, [[] for _ in self.windows])
        return found

    def content(self, ids: list[int]) -> list[np.ndarray]:
        """The bytes of blocks in each layer; `ids` are those of the first group."""
        found = []
        for name in self.names:
            mine = self.ids_of(ids, self.group_of[name])
            found.append(self.caches[name][mine].view(torch.uint8).numpy().copy())
        return found


@pytest.fixture
def pool() -> Iterator[Pool]:
    found = Pool("--dram", "64MiB", "--ssd", "64MiB", "--folder", tempfile.mkdtemp())
    yield found
    found.close()


def same(left: list[np.ndarray], right: list[np.ndarray], count: int) -> bool:
    return all(np.array_equal(a[:count], b[:count]) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("staged", [(False, False), (True, True), (False, True), (True, False)])
def test_what_one_engine_stores_another_one_loads(pool: Pool, staged: tuple[bool, bool]) -> None:
    """`staged`: as tensors on a device are copied."""
    first, second = Engine(pool, seed=1, staged=staged[0]), Engine(pool, seed=2, staged=staged[1])
    tokens = list(range(100))
    request = first.request(tokens)
    assert first.prefill(request, seed=11)[0] == 0
    stored = first.content(first.blocks[request.request_id][0])
    first.finish(request)
    again = second.request(tokens)
    found, wrong = second.prefill(again, seed=12)
    assert (found, wrong) == (96, set())
    assert same(second.content(second.blocks[again.request_id][0]), stored, 6)
    other = second.request(tokens, cache_salt="another tenant")
    assert second.prefill(other, seed=13)[0] == 0
    for engine in (first, second):
        engine.close()


def test_blocks_outlive_engine_and_pool(pool: Pool) -> None:
    first = Engine(pool, seed=1)
    tokens = list(range(160))
    request = first.request(tokens)
    first.prefill(request, seed=11)
    stored = first.content(first.blocks[request.request_id][0])
    first.finish(request)
    wait_for(lambda: first.look_up(tokens) == 144)
    pool.kill()
    # A step in which the pool is dead waits for nothing.
    lost = first.request(tokens)
    assert first.prefill(lost, seed=14)[0] == 0
    first.close()
    pool.start()
    second = Engine(pool, seed=2)
    again = second.request(tokens)
    found, wrong = second.prefill(again, seed=12)
    assert (found, wrong) == (144, set())
    assert same(second.content(second.blocks[again.request_id][0]), stored, 9)
    second.close()


def test_a_changed_block_is_computed_and_forgotten(pool: Pool) -> None:
    engine = Engine(pool, seed=1)
    tokens = list(range(100))
    request = engine.request(tokens)
    engine.prefill(request, seed=11)
    engine.finish(request)
    (arena,) = pool.memory.glob("*/arena")
    with arena.open("r+b") as file:  # one bit in each of the stored blocks
        data = bytearray(file.read())
        for start in range(100, len(data), 4096):
            if any(data[start : start + 64]):
                data[start] ^= 1
        file.seek(0)
        file.write(data)
    again = engine.request(tokens)
    found, wrong = engine.prefill(again, seed=12)
    assert found == 96
    assert len(wrong) == 6
    engine.finish(again)  # what was computed is stored again
    third = engine.request(tokens)
    assert engine.prefill(third, seed=13) == (96, set())
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
            began_s = time.thread_time()  # this thread's own time: the machine may be busy
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
    for name in engine.names:  # overwritten at once
        engine.caches[name].zero_()
    second = Engine(pool, seed=2)
    for number, request in enumerate(requests):
        again = second.request(request.all_token_ids[:64])
        found, wrong = second.prefill(again, seed=99)
        assert not wrong
        if found:  # it was stored before it was preempted
            ids = second.blocks[again.request_id][0][: found // BLOCK_TOKENS]
            assert all(second.caches[name][ids].abs().sum() > 0 for name in second.names), number
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
            found, wrong = engine.prefill(request, seed=50 + number)
            assert not wrong
            ids = engine.blocks[request.request_id][0]
            assert same(engine.content(ids), stored[number], found // BLOCK_TOKENS)
            engine.finish(request)
        assert engine.scheduler.counts["from_ssd"] > 0  # memory has room for 256 of 350 blocks
        engine.close()
    finally:
        pool.close()


def test_a_second_model_is_refused_in_one_line(pool: Pool) -> None:
    engine = Engine(pool, seed=1)
    with pytest.raises(AssertionError, match="did not happen"):
        Engine(pool, group=bytes(32), seed=1, wait_s=2.0)
    assert b"start it with a larger --models" in pool.log()
    engine.close()
    wait_for(lambda: b"leave DRAM" in pool.log() or Engine(pool, bytes(32)))


def ask(pool: Pool, body: bytes) -> bytes:
    """Sends bytes, and returns what the pool says until it ends the connection."""
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
    assert engine.prefill(again, seed=12) == (96, set())
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
        assert fetch(stranger, source, keys).num_blocks == 0  # it knows another secret
        fetched = fetch(here, source, keys)
        assert (fetched.num_blocks, fetched.error) == (6, "")
        again = engines[0].request(tokens)
        assert engines[0].prefill(again, seed=12) == (96, set())
        assert same(engines[0].content(engines[0].blocks[again.request_id][0]), stored, 6)
    finally:
        for engine in engines:
            engine.close()
        for pool in pools:
            pool.close()


@pytest.mark.parametrize(("hybrid", "ranks"), [(False, 2), (True, 1), (True, 2)])
def test_a_fetch_brings_the_blocks_of_all_ranks(hybrid: bool, ranks: int) -> None:
    """By what the process beside vLLM tells the head, and does for it."""
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
        assert engines[0].prefill(again, seed=12) == (96, set())
        loaded = engines[0].content(engines[0].blocks[again.request_id][0])
        assert np.array_equal(loaded[0][:6], stored[0][:6])
        assert np.array_equal(loaded[2][4:6], stored[2][4:6])
    finally:
        for engine in engines:
            engine.close()
        for pool in (here, there):
            pool.close()


async def fetched_by_watch(here: Pool, there: Pool, keys: tuple[BlockKey, ...]) -> int:
    """How many blocks `here` has got from `there`."""
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


def run_with_window(engine: Engine, tokens: list[int], seed: int) -> tuple[int, list[np.ndarray]]:
    """Prefills and ends a request whose window slides before its blocks are stored. Returns the
    tokens that were loaded, and what its blocks contained."""
    request = engine.request(tokens)
    found, wrong = engine.prefill(request, seed)
    assert not wrong
    content = engine.content(engine.blocks[request.request_id][0])
    for name, block in engine.slide(request, len(tokens)):
        engine.caches[name][block] = 0  # another request has it now
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
    assert second.prefill(request, seed=12) == (96, set())
    ids = second.blocks[request.request_id][0]
    content = second.content(ids)
    assert np.array_equal(content[0][:6], stored[0][:6])
    for layer in (1, 2):
        assert np.array_equal(content[layer][4:6], stored[layer][4:6])
        behind = second.ids_of(ids, layer)[:4]
        assert second.caches[second.names[layer]][behind].equal(before[layer][behind])
    # A prefix that ends elsewhere has other blocks in its window, which were stored, too.
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
    assert engine.prefill(again, seed=12) == (0, set())
    assert engine.scheduler.matched_tokens(again, 0) == 0  # it is not tried again
    engine.finish(again)
    assert run_with_window(engine, tokens, seed=13)[0] == 96
    engine.close()


def test_a_block_that_was_held_is_given_back(pool: Pool) -> None:
    """Of requests that are preempted, that end early, and when the pool has gone."""
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
    wait_for(lambda: not engine.worker.is_connected and not engine.scheduler.is_connected)
    for request in requests[1:]:
        engine.finish(request)
    assert not any(engine.users.users)
    engine.close()
