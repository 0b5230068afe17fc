"""The pool of a host as its own process, and the two sides of vLLM's connector on plain tensors."""

from __future__ import annotations

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
from moonpool.protocol.transfer_events import PeerAddress
from moonpool_engine.vllm.block_copier import BlockCopier, DeviceCopier, HostCopier
from moonpool_engine.vllm.cache_layout import CacheLayout
from moonpool_engine.vllm.prompt_keys import root_of
from moonpool_engine.vllm.scheduler_side import SchedulerSide
from moonpool_engine.vllm.slice_mover import open_mover
from moonpool_engine.vllm.transfers import LoadsEnded, RankReady, StepTransfers
from moonpool_engine.vllm.worker_side import WorkerSide

BLOCK_TOKENS, NUM_BLOCKS, NUM_LAYERS = 16, 40, 3
SHAPE = (NUM_BLOCKS, 2, BLOCK_TOKENS, 128)
GROUP = bytes(range(32))


class FullAttentionSpec:
    """As vLLM's own, for the layout."""

    block_size = BLOCK_TOKENS
    page_size_bytes = 2 * BLOCK_TOKENS * 128 * 2


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
    ) -> None:
        names = [f"layer.{number}" for number in range(NUM_LAYERS)]
        generator = torch.Generator().manual_seed(seed)
        self.caches = {
            name: torch.randn(SHAPE, generator=generator).to(torch.bfloat16) for name in names
        }
        spec = SimpleNamespace(layer_names=names, kv_cache_spec=FullAttentionSpec())
        config = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[spec], kv_cache_tensors=[])
        layout = CacheLayout.of(self.caches, config)
        nominal = BlockLayout(
            model_fingerprint="m",
            dtype="bfloat16",
            block_tokens=1,
            num_layers=layout.num_slices,
            num_kv_heads=1,
            head_dim=layout.slice_bytes // 4,
            inner="vllm",
        )
        attach = AttachRank(
            protocol=PROTOCOL,
            group=group,
            model="m",
            rank=0,
            num_ranks=1,
            block_tokens=BLOCK_TOKENS,
            layout=nominal,
        )
        self.names = names
        copier: BlockCopier = HostCopier(layout, open_mover())
        if staged:
            copier = DeviceCopier(layout, open_mover(), self.caches)
        self.worker = WorkerSide(pool.socket, attach, layout, copier)
        self.scheduler = SchedulerSide(pool.socket, BLOCK_TOKENS, time.monotonic)
        self.scheduler.begin([RankReady(group, 0, 1)])
        self.blocks: dict[str, list[int]] = {}
        self.next_block = 1
        self.number = 0
        wait_for(lambda: self.worker.is_connected and self.scheduler.is_connected, wait_s)

    def close(self) -> None:
        self.worker.close()
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
        self.blocks[request.request_id] = ids
        return ids

    def run_step(self, step: StepTransfers) -> set[int]:
        self.worker.preempt(step.preempted)
        self.worker.begin_step(step)
        for name in self.names:
            self.worker.wait_for_layer(name)
        self.worker.end_step()
        wrong = self.worker.take_wrong_blocks()
        ended = self.worker.take_ended()
        if isinstance(ended, LoadsEnded):
            self.scheduler.on_ended(ended)
        return wrong

    def output(self, *requests: Any) -> Any:
        scheduled = {one.request_id: 1 for one in requests}
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=len(scheduled),
            preempted_req_ids=set(),
        )

    def prefill(self, request: Any, seed: int) -> tuple[int, set[int]]:
        """Loads what the pool has, "computes" the rest, and stores it. Returns the tokens that
        were loaded, and the wrong blocks."""
        self.scheduler.on_new_request(request)
        found: int | None = None
        while found is None:
            found = self.scheduler.matched_tokens(request, 0)
        ids = self.take_blocks(request)
        self.scheduler.on_allocated(request, ids, found)
        wrong = self.run_step(self.scheduler.build(self.output(request), self.blocks.__getitem__))
        generator = torch.Generator().manual_seed(seed)
        for name in self.names:
            fresh = torch.randn((len(ids), *SHAPE[1:]), generator=generator).to(torch.bfloat16)
            for index, block in enumerate(ids):
                if index * BLOCK_TOKENS >= found or block in wrong:
                    self.caches[name][block] = fresh[index]
        request.num_computed_tokens = request.num_tokens
        request.all_token_ids.append(7)
        request.num_tokens += 1
        return found, wrong

    def finish(self, request: Any) -> None:
        ids = self.blocks.pop(request.request_id)
        if not self.scheduler.on_finished(request, ids):
            return
        step = self.scheduler.build(self.output(), self.blocks.__getitem__)
        self.run_step(step)
        wait_for(lambda: request.request_id in self.worker.take_finished(False))
        # An answer to a later find means that the pool has handled the stores.
        self.look_up(request.all_token_ids[:-1])

    def look_up(self, tokens: list[int]) -> int:
        """How many tokens of a prompt the pool has."""
        request = self.request(tokens)
        self.scheduler.on_new_request(request)
        found: int | None = None
        while found is None:
            found = self.scheduler.matched_tokens(request, 0)
        self.scheduler.on_allocated(request, [], 0)
        self.scheduler.on_finished(request, [])
        return found

    def content(self, ids: list[int]) -> list[np.ndarray]:
        return [self.caches[name][ids].view(torch.uint8).numpy().copy() for name in self.names]


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
    stored = first.content(first.blocks[request.request_id])
    first.finish(request)
    again = second.request(tokens)
    found, wrong = second.prefill(again, seed=12)
    assert (found, wrong) == (96, set())
    assert same(second.content(second.blocks[again.request_id]), stored, 6)
    other = second.request(tokens, cache_salt="another tenant")
    assert second.prefill(other, seed=13)[0] == 0
    for engine in (first, second):
        engine.close()


def test_blocks_outlive_engine_and_pool(pool: Pool) -> None:
    first = Engine(pool, seed=1)
    tokens = list(range(160))
    request = first.request(tokens)
    first.prefill(request, seed=11)
    stored = first.content(first.blocks[request.request_id])
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
    assert same(second.content(second.blocks[again.request_id]), stored, 9)
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
    step = engine.scheduler.build(engine.output(*requests), engine.blocks.__getitem__)
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
            ids = second.blocks[again.request_id][: found // BLOCK_TOKENS]
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
    for name in engine.names:  # what the memory has next, is nobody's
        engine.caches[name].zero_()
    engine.worker.end_stores()
    assert engine.worker.counts == counted
    second = Engine(pool, seed=2)
    for request in requests:
        again = second.request(request.all_token_ids[:64])
        found, wrong = second.prefill(again, seed=99)
        assert not wrong
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
    second.scheduler.leave_pool()
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
            stored[number] = engine.content(engine.blocks[request.request_id])
            engine.finish(request)
        for number, tokens in enumerate(prompts):
            request = engine.request(tokens)
            found, wrong = engine.prefill(request, seed=50 + number)
            assert not wrong
            ids = engine.blocks[request.request_id]
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
        stored = engines[1].content(engines[1].blocks[request.request_id])
        engines[1].finish(request)
        keys = tuple(engines[1].keys_of(tokens))
        source = address_of_pool(there)
        assert fetch(stranger, source, keys).num_blocks == 0  # it knows another secret
        fetched = fetch(here, source, keys)
        assert (fetched.num_blocks, fetched.error) == (6, "")
        again = engines[0].request(tokens)
        assert engines[0].prefill(again, seed=12) == (96, set())
        assert same(engines[0].content(engines[0].blocks[again.request_id]), stored, 6)
    finally:
        for engine in engines:
            engine.close()
        for pool in pools:
            pool.close()


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
