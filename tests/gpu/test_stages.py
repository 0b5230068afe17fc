"""Tests stages with separate blocks beside the arena, as on GPUs: tokens and blocks equal those of
one process, a stage's result is in the arena before its announcement, and every stage loads the
blocks that the messenger brought. With torch's operations the same copies are made on the CPU."""

from __future__ import annotations

import importlib.util
import queue
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import SamplingParams
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.device import stages_of_fullest
from moonpool_engine.engine.ops import KvCache, empty_cache
from moonpool_engine.engine.parallel.pipeline import PipelineEngine, StageOptions
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout
from moonpool_engine.transfer.arena import Arena
from tests.unit.engine.test_stages import MODEL, NUM_BLOCKS, SAMPLED, steps_of

NUM_STAGES = 3
NUM_LAYERS = 5
DEVICES = ("cpu:0", "cuda")  # "cpu:0" and not "cpu", because stages on "cpu" use the arena itself
GREEDY = SamplingParams(temperature=0.0, logprobs=1)


class Pair:
    """Makes an engine of stages with host sync, and a one-process engine over other blocks."""

    def __init__(self, device: str) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            pytest.skip("no GPU here")
        if device == "cuda" and importlib.util.find_spec("triton") is None:
            pytest.skip("triton is not installed")
        model = open_model(MODEL, "bfloat16")
        ops = choose_ops("bfloat16", device)
        layout = make_layout(model, 16, ops)
        self.arena = Arena(layout, NUM_BLOCKS, sealed=False)
        shape = (NUM_BLOCKS, layout.num_layers, layout.slice_elements)
        flat = torch.frombuffer(self.arena.buffer, dtype=torch.bfloat16)
        flat.fill_(torch.nan)
        self.blocks = flat.view(shape)
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        options = StageOptions(NUM_STAGES, 1, 64, device=device)
        cache = KvCache(self.blocks, layout)
        self.stages = PipelineEngine(
            model, ops, cache, self.arena.fd, options, "test", self.lost.put
        )
        self.arena.seal()
        self.own = empty_cache(layout, NUM_BLOCKS, ops.device)
        self.one = Engine(model, ops, self.own)

    def same(self, block: int, layer: int | slice = slice(None)) -> bool:
        mine, its = self.blocks[block, layer], self.own.blocks[block, layer].cpu()
        return torch.equal(mine.view(torch.int16), its.view(torch.int16))


@pytest.fixture(scope="module", params=DEVICES)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pair = Pair(request.param)
    yield pair
    torch.set_num_threads(threads)
    pair.stages.close()
    assert pair.lost.empty()


@pytest.mark.long
def test_several_steps_at_once_have_the_tokens_of_one_process(pair: Pair) -> None:
    steps = steps_of(random.Random(5), 8)
    ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for step in steps:
        pair.stages.begin(step, None, ended.put)
    expected = [pair.one.step(step) for step in steps]
    got = [ended.get(timeout=60) for _ in steps]
    assert [r.tokens for r in got] == [r.tokens for r in expected]
    assert any(token is not None for r in got for token in r.tokens)
    full = [
        block for i in range(8) for block in range(10 * i, 10 * i + last_token(steps, str(i)) // 16)
    ]
    assert full
    assert all(pair.same(block) for block in full)


def last_token(steps: list[list[StepEntry]], name: str) -> int:
    return max(
        s.start + len(s.new_token_ids) for step in steps for s in step if s.attempt_id == name
    )


def test_a_layer_is_in_the_arena_when_it_is_announced(pair: Pair) -> None:
    prompt = [random.Random(6).randrange(300) for _ in range(40)]
    step = [StepEntry(AttemptId("a"), prompt, 0, [80, 81, 82], SAMPLED)]
    expected = pair.one.step(step).tokens
    seen: list[tuple[int, bool, bool]] = []

    def on_layer(layer: int) -> None:
        # K and V of the eight tokens in the block
        tail = pair.blocks[82, layer].view(2, 16, -1)[:, :8]
        seen.append((layer, pair.same(80, layer), bool(torch.isfinite(tail).all())))

    assert pair.stages.step(step, on_layer).tokens == expected
    assert sorted(seen) == [(layer, True, True) for layer in range(NUM_LAYERS)]


def test_every_stage_loads_what_arrived(pair: Pair) -> None:
    prompt = [random.Random(7).randrange(300) for _ in range(40)]
    pair.stages.step([StepEntry(AttemptId("a"), prompt[:39], 0, [83, 84, 85], None)], bool)

    def next_token(blocks: list[int]) -> Any:
        step = StepEntry(AttemptId("b"), prompt[39:], 39, blocks, GREEDY)
        return pair.stages.step([step]).tokens

    expected = next_token([83, 84, 85])
    for target, source in {86: 83, 87: 84, 88: 85}.items():
        pair.blocks[target] = pair.blocks[source]
    assert next_token([86, 87, 88]) != expected, "nobody was told: these blocks are empty there"
    pair.stages.arriving((86, 87, 88))
    assert next_token([86, 87, 88]) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_stages_share_the_gpus_out() -> None:
    gpus = torch.cuda.device_count()
    assert stages_of_fullest(gpus) == 1
    assert stages_of_fullest(gpus + 1) == 2
