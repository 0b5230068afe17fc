"""Tests the sync between host and GPU: a step's results reach the arena in time, and arrived blocks
are loaded before they are read."""

from __future__ import annotations

import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.cuda.host_sync import HostGpuSync
from moonpool_engine.engine.ops import KvCache, empty_cache
from moonpool_engine.engine.runner import Engine, make_layout
from tests.gpu.backends import BACKENDS, make_ops
from tests.gpu.test_ops import TINY, prompt_of

SIZE = 16


class Pair:
    """Makes an engine with host sync; all blocks are NaN at first."""

    def __init__(self, backend: str) -> None:
        ops = make_ops(backend)
        model = open_model(TINY, "float32")
        layout = make_layout(model, SIZE, ops)
        self.cache: KvCache = empty_cache(layout, 12, ops.device)
        self.cache.blocks.fill_(torch.nan)
        self.arena = torch.full_like(self.cache.blocks, torch.nan, device="cpu")
        self.host_sync = HostGpuSync(self.cache, self.arena)
        self.engine = Engine(model, ops, self.cache, self.host_sync)

    def same(self, block: int) -> bool:
        return torch.equal(self.arena[block], self.cache.blocks[block].cpu())

    def run(self, tokens: list[int], start: int, blocks: list[int], on_layer=None) -> torch.Tensor:
        step = StepEntry(AttemptId("r"), tokens, start, blocks, None)
        if on_layer is None:
            return self.engine.logits([step])[0].cpu()
        self.engine.step([step], on_layer)
        return torch.empty(0)


@pytest.fixture(params=BACKENDS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def test_blocks_reach_the_arena_when_they_are_full(pair: Pair) -> None:
    prompt = prompt_of(40)
    pair.run(prompt[:20], 0, [5, 2, 9])
    assert pair.same(5) and torch.isnan(pair.arena[2]).all()
    pair.run(prompt[20:32], 20, [5, 2, 9])
    assert pair.same(2) and torch.isnan(pair.arena[9]).all()
    for i in range(32, 40):
        pair.run(prompt[i : i + 1], i, [5, 2, 9])
    assert torch.isnan(pair.arena[[0, 1, 3, 4, 6, 7, 8, 9, 10, 11]]).all()


def test_layers_are_announced_with_their_slices_in_the_arena(pair: Pair) -> None:
    seen = []

    def on_layer(layer: int) -> None:
        now = [torch.equal(pair.arena[b, layer], pair.cache.blocks[b, layer].cpu()) for b in (5, 2)]
        rows = pair.arena[2, layer].view(2, SIZE, -1)  # K and V of the block's last 4 tokens
        seen.append((layer, now[0], bool(torch.isfinite(rows[:, :4]).all())))

    pair.run(prompt_of(20), 0, [5, 2], on_layer)
    assert seen == [(0, True, True), (1, True, True), (2, True, True)]


def test_what_arrived_is_loaded_before_it_is_read(pair: Pair) -> None:
    prompt = prompt_of(50)
    expected = pair.run(prompt, 0, [0, 1, 2, 3])
    moved = {4: 0, 5: 1, 6: 2, 7: 3}
    # The tail is copied, too, as for a stream.
    pair.run(prompt[:49], 0, [0, 1, 2, 3], lambda layer: None)
    pair.host_sync.arriving(moved)
    for target, source in moved.items():
        pair.arena[target] = pair.arena[source]
    assert torch.isnan(pair.cache.blocks[4:8]).all()
    assert torch.equal(
        pair.run(prompt[49:], 49, [4, 5, 6, 7]), pair.run(prompt[49:], 49, [0, 1, 2, 3])
    )
    assert torch.allclose(pair.run(prompt[49:], 49, [4, 5, 6, 7]), expected, rtol=1e-4, atol=1e-5)


def test_a_block_is_loaded_once_and_not_over_what_is_newer(pair: Pair) -> None:
    prompt = prompt_of(40)
    expected = pair.run(prompt, 0, [0, 1, 2])
    pair.host_sync.arriving(
        [4, 5, 6]
    )  # The fetch brought no block, so the blocks go to a new request.
    for start in (0, 10, 20, 30):
        logits = pair.run(prompt[start : start + 10], start, [4, 5, 6])
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_another_shape_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="one shape"):
        HostGpuSync(pair.cache, pair.arena[:3])
