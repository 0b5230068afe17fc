"""Pipeline stages give the tokens and blocks of one process, and end with a clear error when a
stage dies."""

from __future__ import annotations

import os
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.suite.engine.pipelined_instance import PipelinedInstance, PipelinedJob
from moonpool.config.tables import Quantization
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BadWord, SamplingParams
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import KvCache, empty_cache
from moonpool_engine.engine.parallel import process_group
from moonpool_engine.engine.parallel.pipeline import (
    PipelineEngine,
    StageOptions,
    StageStepError,
    split_layers,
)
from moonpool_engine.engine.parallel.process_group import StageLostError
from moonpool_engine.engine.parallel.stage_ring import RingEnd, RingError, RingSize, create_ring
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout
from moonpool_engine.engine.step import StepError
from moonpool_engine.transfer.arena import Arena
from moonpool_lab.demo.local_server import is_alive

pytestmark = pytest.mark.usefixtures("one_thread", "forked_peers")

MODEL = "random:hidden=64,layers=5,heads=4,kv_heads=2,inter=96,vocab=300"
SAMPLED = SamplingParams(temperature=0.7, seed=3, logprobs=2)
NUM_BLOCKS = 96


class Pair:
    """Makes an engine of stages over an arena, and a one-process engine over separate blocks."""

    def __init__(self, num_stages: int, quantization: Quantization = "none") -> None:
        model = open_model(MODEL, "bfloat16")
        ops = choose_ops("bfloat16", quantization=quantization)
        layout = make_layout(model, 16, ops)
        self.arena = Arena(layout, NUM_BLOCKS, sealed=False)
        shape = (NUM_BLOCKS, layout.num_layers, layout.slice_elements)
        flat = torch.frombuffer(self.arena.buffer, dtype=torch.bfloat16)
        self.shared = KvCache(flat.view(shape), layout)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        cores = tuple(sorted(os.sched_getaffinity(0)))[:num_stages]
        options = StageOptions(num_stages, 1, 64, quantization, cores)
        self.stages = PipelineEngine(
            model, ops, self.shared, self.arena.fd, options, "test", self.lost.put
        )
        self.arena.seal()
        self.own = empty_cache(layout, NUM_BLOCKS)
        self.one = Engine(model, ops, self.own)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    pair = Pair(3)
    yield pair
    pids = pair.stages.pids
    pair.stages.close()
    assert not any(map(is_alive, pids))


def steps_of(rng: random.Random, num_prompts: int) -> list[list[StepEntry]]:
    """Runs chunks and single tokens of several sequences, mixed; each sequence has separate
    blocks."""
    lengths = [rng.randrange(1, 150) for _ in range(num_prompts)]
    prompts = [[rng.randrange(300) for _ in range(length)] for length in lengths]
    blocks = [list(range(10 * i, 10 * i + 10)) for i in range(num_prompts)]
    done = [0] * num_prompts
    steps = []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        step = []
        for i in range(num_prompts):
            take = min(rng.choice((0, 1, 7, 16, 40)), lengths[i] - done[i])
            if take:
                part = prompts[i][done[i] : done[i] + take]
                draw = SAMPLED if rng.random() < 0.6 else None
                step.append(StepEntry(AttemptId(str(i)), part, done[i], blocks[i], draw))
                done[i] += take
        if step:
            steps.append(step)
    return steps


def test_several_steps_at_once_have_the_tokens_and_blocks_of_one_process(pair: Pair) -> None:
    steps = steps_of(random.Random(1), 8)
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    layers: list[list[int]] = [[] for _ in steps]
    for step, seen in zip(steps, layers, strict=True):
        pair.stages.begin(step, seen.append, ended.put)
    expected = [pair.one.step(step) for step in steps]
    got = [ended.get(timeout=300) for _ in steps]
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert any(token is not None for r in got for token in r.tokens)
    assert all(sorted(seen) == list(range(5)) for seen in layers)
    written = [block for i in range(8) for block in range(10 * i, 10 * i + 10)]
    same = torch.equal(
        pair.shared.blocks[written].view(torch.int16), pair.own.blocks[written].view(torch.int16)
    )
    assert same
    assert all(busy > 0 for busy in pair.stages.times.busy_s)


def test_the_last_stage_applies_penalties_and_min_tokens(pair: Pair) -> None:
    for params, generated in (
        (SamplingParams(temperature=0.5, seed=9, presence_penalty=1.5), (4, 5, 6)),
        (SamplingParams(temperature=0.5, seed=9, min_tokens=5, stop_token_ids=(7, 258)), (4,)),
        (SamplingParams(temperature=0.5, seed=9, min_tokens=1, top_k=5), (4, 9, 9)),
    ):
        step = [StepEntry(AttemptId("a"), [5, 6, 7], 0, [90], params, generated)]
        assert pair.stages.step(step).tokens == pair.one.step(step).tokens


def test_the_last_stage_knows_which_words_have_begun(pair: Pair) -> None:
    def first_token(generated: tuple[int, ...], *bad: int) -> int:
        words = (BadWord("w", (bad,)),) if bad else ()
        params = SamplingParams(temperature=0.0, bad_words=words)
        step = [StepEntry(AttemptId("a"), [5, 6, 7], 0, [90], params, generated)]
        found = pair.stages.step(step).tokens
        assert found == pair.one.step(step).tokens
        assert found[0] is not None
        return found[0].token_id

    best = first_token((8, 9))
    assert first_token((8, 9), 8, 9, best) != best
    assert first_token((9, 8), 8, 9, best) == best


def test_the_last_stage_applies_penalties_to_prompt_tokens(pair: Pair) -> None:
    def first_token(prompt_ids: frozenset[int]) -> Any:
        draw = SamplingParams(temperature=0.0, repetition_penalty=9.0)
        entry = StepEntry(AttemptId("a"), [5, 6, 7], 0, [90], draw, prompt_ids=prompt_ids)
        step = [entry]
        assert pair.stages.step(step).tokens == pair.one.step(step).tokens
        return pair.one.step(step).tokens[0]

    best = first_token(frozenset())
    assert first_token(frozenset({best.token_id})) != best


def test_a_step_larger_than_the_ring_goes_through(pair: Pair) -> None:
    rows = 3 * 64 * 4  # chunk_tokens is 64
    tokens = [(7 * i) % 300 for i in range(rows)]
    step = [StepEntry(AttemptId("a"), tokens, 0, list(range(48)), SAMPLED)]
    assert pair.stages.step(step).tokens == pair.one.step(step).tokens


def test_a_step_that_cannot_run_hurts_no_other(pair: Pair) -> None:
    step = [StepEntry(AttemptId("a"), [5, 6, 7], 0, [90], SAMPLED)]
    with pytest.raises(StepError, match="vocabulary"):
        pair.stages.step([StepEntry(AttemptId("b"), [999], 0, [91], None)])
    pair.shared.blocks[91] = torch.nan  # makes the logits NaN, which only the last stage computes
    with pytest.raises(StageStepError, match="NonFinite"):
        pair.stages.step([StepEntry(AttemptId("b"), [1], 5, [91], SAMPLED)])
    assert pair.stages.step(step).tokens == pair.one.step(step).tokens


@pytest.mark.long
def test_a_lost_stage_ends_running_steps_and_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # makes the stage start in a new interpreter
    monkeypatch.setattr(process_group, "begin_spare", lambda line, fd: None)
    pair = Pair(2, "int8")
    (pid,) = pair.stages.pids
    assert os.sched_getaffinity(pid) == {max(sorted(os.sched_getaffinity(0))[:2])}
    step = [StepEntry(AttemptId("a"), [5, 6, 7], 0, [90], SAMPLED)]
    assert pair.stages.step(step).tokens == pair.one.step(step).tokens
    os.kill(pid, signal.SIGSTOP)
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    pair.stages.begin(step, None, ended.put)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(ended.get(timeout=60), StageLostError)
    assert "stage 2 of 2" in pair.lost.get(timeout=60)
    with pytest.raises(StageLostError, match="stage 2 of 2"):
        pair.stages.step(step)
    pair.stages.close()
    assert pair.lost.empty()


def test_a_stage_that_cannot_start_says_why() -> None:
    with pytest.raises(ValueError, match="6 stages; use --pipeline-parallel-size 5"):
        PipelinedInstance(MODEL, "bfloat16", 6, 1024, 64)


def test_layers_are_divided_evenly() -> None:
    assert split_layers(14, 4) == [range(4), range(4, 8), range(8, 11), range(11, 14)]
    assert split_layers(3, 3) == [range(1), range(1, 2), range(2, 3)]


def test_an_instance_answers_alike_whatever_its_stages() -> None:
    """Runs prompts with shared prefixes, chunks, decodes and mixed steps in a pool that is too
    small for all, so that some are preempted. The expected tokens come from one prompt at a time.
    """
    rng = random.Random(7)
    first = [rng.randrange(300) for _ in range(120)]
    prompts = [first[: 40 * (i % 3)] + [rng.randrange(300) for _ in range(30)] for i in range(9)]
    jobs = [
        PipelinedJob(p, 12, SamplingParams(temperature=0.8, seed=i)) for i, p in enumerate(prompts)
    ]
    with PipelinedInstance(MODEL, "bfloat16", 1, 640, 48, block_tokens=16) as one:
        right = [one.run([job], chunk_tokens=512).tokens[0] for job in jobs]
    assert [len(tokens) for tokens in right] == [12] * 9
    with PipelinedInstance(MODEL, "bfloat16", 2, 640, 48, block_tokens=16) as two:
        got = two.run(jobs, chunk_tokens=48, prefix_caching=True)
    assert got.tokens == right
    assert got.cached_tokens > 0


def test_cores_are_divided_between_the_stages() -> None:
    options = StageOptions(2, 2, 64, cores=(4, 5, 6, 7))
    assert [options.cores_of(stage) for stage in (0, 1)] == [(4, 5), (6, 7)]
    scarce = StageOptions(3, 1, 64, cores=(4, 5))
    assert [scarce.cores_of(stage) for stage in (0, 1, 2)] == [(4, 5)] * 3


def ring_ends(size: RingSize) -> tuple[RingEnd, RingEnd]:
    fd = create_ring(size)
    a, b = socket.socketpair()
    return RingEnd(os.dup(fd), a, size, writes=True), RingEnd(fd, b, size, writes=False)


def test_a_ring_carries_more_than_it_holds_and_waits_when_it_is_full() -> None:
    writer, reader = ring_ends(RingSize(slot_bytes=64, num_slots=3))
    sent = [torch.randn(n, 5) for n in (1, 100, 3, 40)]
    done = threading.Event()

    def write() -> None:
        for tensor in sent:
            writer.write(tensor)
        done.set()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    time.sleep(0.05)
    assert not done.is_set(), "three slots cannot hold all of it"
    for tensor in sent:
        got = torch.empty_like(tensor)
        reader.read(got)
        assert torch.equal(got, tensor)
    thread.join(60)
    assert done.is_set()


def test_a_ring_without_its_other_end_raises() -> None:
    writer, reader = ring_ends(RingSize(slot_bytes=64, num_slots=3))
    reader.close()
    with pytest.raises(RingError):
        writer.write(torch.zeros(160))
    writer, reader = ring_ends(RingSize(slot_bytes=64, num_slots=3))
    threading.Timer(0.05, reader.interrupt).start()
    with pytest.raises(RingError):
        reader.read(torch.zeros(16))
