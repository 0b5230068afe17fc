"""Tensor ranks give the bits of all shards in one process, and end with a clear error when a rank
dies or a foreign process connects."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.config.tables import Quantization
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import SamplingParams
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import KvCache, empty_cache
from moonpool_engine.engine.parallel.process_group import StageLostError
from moonpool_engine.engine.parallel.tensor_gloo import GlooGroup, create_store
from moonpool_engine.engine.parallel.tensor_group import RankLostError, ShmGroup, add_up
from moonpool_engine.engine.parallel.tensor_ranks import (
    RankOptions,
    Ranks,
    check_ranks,
    sharded_engine,
)
from moonpool_engine.engine.runner import choose_ops, make_layout
from moonpool_engine.engine.step import StepError
from moonpool_engine.transfer.arena import Arena
from moonpool_lab.demo.local_server import is_alive

pytestmark = pytest.mark.usefixtures("one_thread", "forked_peers")

MODEL = "random:hidden=64,layers=3,heads=8,kv_heads=4,inter=90,vocab=300,head_dim=16"
SAMPLED = SamplingParams(temperature=0.7, seed=3, logprobs=2)
NUM_BLOCKS = 96


class Pair:
    """Makes an engine of ranks over an arena, and one process that computes the same shards over
    separate blocks."""

    def __init__(
        self, num_ranks: int, num_shards: int, dtype: str, quantization: Quantization = "none"
    ) -> None:
        model = open_model(MODEL, dtype)
        ops = choose_ops(dtype, quantization=quantization)
        layout = make_layout(model, 16, ops, num_shards)
        self.arena = Arena(layout, NUM_BLOCKS, sealed=False)
        shape = (NUM_BLOCKS, layout.num_layers, layout.slice_elements)
        self.own = empty_cache(layout, NUM_BLOCKS)
        flat = torch.frombuffer(self.arena.buffer, dtype=self.own.blocks.dtype)
        self.shared = KvCache(flat.view(shape), layout)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.listened_before = listening([os.getpid()])  # ports that groups of other tests use
        options = RankOptions(num_ranks, num_shards, 1, quantization)
        self.ranks = Ranks(model, ops, self.shared, self.arena.fd, options, "test", self.lost.put)
        self.arena.seal()
        self.several = self.ranks.engine
        self.one = sharded_engine(model, ops, self.own, num_shards)

    def same_blocks(self, blocks: list[int]) -> bool:
        kind = torch.int16 if self.own.blocks.itemsize == 2 else torch.int32
        mine, theirs = self.own.blocks[blocks], self.shared.blocks[blocks]
        return torch.equal(mine.view(kind), theirs.view(kind))


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "moonpool_engine.engine.parallel.tensor_ranks.create_group_memory", lambda num_ranks: None
    )


@pytest.fixture(
    scope="module",
    params=[(2, 2, "bfloat16", True), (4, 4, "float32", True), (4, 4, "bfloat16", False)],
    ids=lambda one: f"{one[0]}-{'memory' if one[3] else 'gloo'}",
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    *shape, in_memory = request.param
    with pytest.MonkeyPatch.context() as patch:
        if not in_memory:
            without_kernels(patch)
        pair = Pair(*shape)
    assert isinstance(pair.ranks.group, ShmGroup if in_memory else GlooGroup)
    yield pair
    pids = pair.ranks.pids
    pair.ranks.close()
    assert len(pids) == request.param[0] - 1
    assert not any(map(is_alive, pids))


def steps_of(rng: random.Random, num_prompts: int) -> list[list[StepEntry]]:
    """Runs chunks and single tokens of several sequences, mixed; each sequence has separate
    blocks."""
    lengths = [rng.randrange(1, 150) for _ in range(num_prompts)]
    prompts = [[rng.randrange(300) for _ in range(length)] for length in lengths]
    done = [0] * num_prompts
    steps = []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        step = []
        for i in range(num_prompts):
            take = min(rng.choice((0, 1, 7, 16, 40)), lengths[i] - done[i])
            if take:
                part = prompts[i][done[i] : done[i] + take]
                draw = SAMPLED if rng.random() < 0.6 else None
                blocks = list(range(10 * i, 10 * i + 10))
                step.append(StepEntry(AttemptId(str(i)), part, done[i], blocks, draw))
                done[i] += take
        if step:
            steps.append(step)
    return steps


def test_ranks_have_the_tokens_and_blocks_of_one_process(pair: Pair) -> None:
    for step in steps_of(random.Random(1), 8):
        seen: list[int] = []
        several, one = pair.several.step(step, seen.append), pair.one.step(step)
        assert several.tokens == one.tokens
        assert seen == [0, 1, 2]
    assert pair.same_blocks(list(range(80)))


def test_a_layer_is_waited_for_by_all_ranks(pair: Pair) -> None:
    """The test fills the prefix's blocks only when the first rank waits for that layer."""
    prompt = [(7 * i) % 300 for i in range(40)]
    step = [StepEntry(AttemptId("a"), prompt, 0, [80, 81, 82], None)]
    pair.one.step(step)
    pair.shared.blocks[[80, 81, 82]] = torch.nan
    waited: list[int] = []

    def before_attend(layer: int) -> tuple[int, ...]:
        waited.append(layer)
        pair.shared.blocks[80, layer] = pair.own.blocks[80, layer]
        pair.shared.blocks[81, layer] = pair.own.blocks[81, layer]
        return ()

    rest = [StepEntry(AttemptId("a"), prompt[32:], 32, [80, 81, 82], SAMPLED)]
    assert pair.several.step(rest, None, before_attend).tokens == pair.one.step(rest).tokens
    assert waited == [0, 1, 2]


def test_a_step_that_cannot_run_hurts_no_other(pair: Pair) -> None:
    step = [StepEntry(AttemptId("a"), [5, 6, 7], 0, [90], SAMPLED)]
    with pytest.raises(StepError, match="vocabulary"):
        pair.several.step([StepEntry(AttemptId("b"), [999], 0, [91], None)])
    pair.shared.blocks[91] = torch.nan
    with pytest.raises(ArithmeticError):
        pair.several.step([StepEntry(AttemptId("b"), [1], 5, [91], SAMPLED)])
    assert pair.several.step(step).tokens == pair.one.step(step).tokens


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_two_ranks_of_four_shards_are_those_of_one_process(quantization: Quantization) -> None:
    pair = Pair(2, 4, "bfloat16", quantization)
    for step in steps_of(random.Random(2), 3):
        assert pair.several.step(step).tokens == pair.one.step(step).tokens
    assert pair.same_blocks(list(range(30)))
    pair.ranks.close()


def test_a_lost_rank_ends_running_steps_and_is_reported_once() -> None:
    pair = Pair(2, 2, "bfloat16")
    (pid,) = pair.ranks.pids
    step = [StepEntry(AttemptId("a"), [5, 6, 7], 0, [90], SAMPLED)]
    assert pair.several.step(step).tokens == pair.one.step(step).tokens
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(StageLostError):
        pair.several.step(step)
    assert "rank 2 of 2" in pair.lost.get(timeout=60)
    with pytest.raises(StageLostError):
        pair.several.step(step)
    pair.ranks.close()
    assert pair.lost.empty()


def test_a_step_that_fails_midway_ends_the_ranks() -> None:
    """The other ranks wait between layers, and could not skip the rest of the step."""
    pair = Pair(2, 2, "bfloat16")

    def broken(layer: int) -> None:
        raise OSError("no room")

    step = [StepEntry(AttemptId("a"), [5, 6, 7], 0, [90], SAMPLED)]
    with pytest.raises(StageLostError, match="no room"):
        pair.several.step(step, broken)
    assert "a step failed: OSError: no room" in pair.lost.get(timeout=60)
    pair.ranks.close()


def test_ranks_that_share_memory_listen_nowhere(pair: Pair) -> None:
    listens = listening([os.getpid(), *pair.ranks.pids]) - pair.listened_before
    assert bool(listens) is not isinstance(pair.ranks.group, ShmGroup)


def test_later_foreign_connections_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ranks have connected, their ports still accept connections, but read nothing from
    them."""
    without_kernels(monkeypatch)
    pair = Pair(2, 2, "bfloat16")
    addresses = listening([os.getpid(), *pair.ranks.pids])
    assert addresses
    assert {address for address, _ in addresses} == {"0100007F"}, "of the loopback interface alone"
    strangers = [socket.create_connection(("127.0.0.1", port)) for _, port in addresses]
    for stranger in strangers:
        stranger.sendall(bytes(4096))
    for step in steps_of(random.Random(3), 2):
        assert pair.several.step(step).tokens == pair.one.step(step).tokens
    for stranger in strangers:
        stranger.close()
    assert pair.lost.empty()
    pair.ranks.close()


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Returns addresses, in the kernel's form, and ports at which these processes listen."""
    own: set[str] = set()
    for fd in [fd for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir()]:
        # fails for the descriptor of the listing itself
        with contextlib.suppress(FileNotFoundError):
            own.add(os.readlink(fd))
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [
        line[1].partition(":") for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own
    ]
    return {(address, int(port, 16)) for address, _, port in found}


def test_a_rank_without_the_secret_is_found_out() -> None:
    store = create_store()
    outcomes: list[Any] = []

    def join(rank: int, secret: bytes) -> None:
        try:
            outcomes.append(GlooGroup(store, rank, 2, secret))
        except RankLostError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=join, args=(i, bytes([i]) * 32)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes == ["a foreign process has connected in place of a rank"] * 2


def test_a_model_with_too_few_kv_heads_is_refused() -> None:
    model, ops = open_model(MODEL, "float32"), choose_ops("float32")
    cache = empty_cache(make_layout(model, 16, ops), 4)
    with pytest.raises(ValueError, match=r"4 KV heads.*use --tensor-parallel-size 4 or less"):
        sharded_engine(model, ops, cache, 8)
    with pytest.raises(ValueError, match=r"blocks are of 2 shards.*use --tensor-parallel-size 2"):
        check_ranks(model, 4, 2)


def test_the_sum_of_a_branch_is_a_branch_of_the_sum() -> None:
    parts = [torch.randn(7, 33).bfloat16() for _ in range(8)]
    whole = add_up([part.clone() for part in parts])
    halves = [add_up([part.clone() for part in half]) for half in (parts[:4], parts[4:])]
    assert torch.equal(add_up(halves), whole)
    assert not torch.equal(sum(parts[1:], parts[0].clone()), whole)
