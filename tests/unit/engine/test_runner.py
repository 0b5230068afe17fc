"""Tests steps: which steps are refused, when layers are announced, and which times calibration
measures."""

from __future__ import annotations

import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import SamplingParams
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.calibrate import fit_samples, measure_samples
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.runner import Engine, make_layout
from moonpool_engine.engine.step import StepError

NAME = "random:hidden=64,layers=3,heads=4,kv_heads=2,inter=96,vocab=300,context=64"
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def engine() -> Engine:
    model = open_model(NAME, "float32")
    return Engine(model, ReferenceOps(), empty_cache(make_layout(model, 16), 6))


def _step(
    tokens: list[int],
    start: int = 0,
    blocks: tuple[int, ...] = (0, 1),
    draw: SamplingParams | None = GREEDY,
) -> StepEntry:
    return StepEntry(AttemptId("r"), tokens, start, blocks, draw)


def test_only_entries_with_a_draw_get_a_token(engine: Engine) -> None:
    result = engine.step([_step([5, 6]), _step([7], blocks=(2,), draw=None), _step([8], 2, (3,))])
    assert [token is not None for token in result.tokens] == [True, False, True]
    assert result.seconds > 0


def test_layers_are_announced_once_their_blocks_are_filled(engine: Engine) -> None:
    blocks = engine.cache.blocks
    seen: list[tuple[int, list[bool]]] = []
    for draw in (GREEDY, None):
        blocks.zero_()
        seen.clear()
        engine.step(
            [_step([5, 6, 7], blocks=(4,), draw=draw)],
            lambda layer: seen.append((layer, [bool(blocks[4, i].any()) for i in range(3)])),
        )
        assert seen == [(0, [True, False, False]), (1, [True, True, False]), (2, [True] * 3)]


def test_each_layer_is_waited_for_after_it_is_announced(engine: Engine) -> None:
    calls: list[tuple[str, int]] = []

    def wait(layer: int) -> list[int]:
        calls.append(("wait", layer))
        return []

    engine.step([_step([5, 6])], lambda layer: calls.append(("done", layer)), wait)
    assert calls == [(what, layer) for layer in range(3) for what in ("done", "wait")]


def test_an_entry_whose_blocks_never_arrive_draws_nothing_and_others_are_unchanged(
    engine: Engine,
) -> None:
    """The step must run although this entry reads NaN."""
    other = _step([7, 8, 9], blocks=(3,))
    right = engine.step([other]).tokens[0]
    engine.cache.blocks[0] = float("nan")
    late = _step([5], start=16, blocks=(0, 1))
    first, second = engine.step([late, other], None, lambda layer: [0] if layer else []).tokens
    assert first is None and second == right


def test_writes_only_the_blocks_of_its_entries(engine: Engine) -> None:
    engine.cache.blocks.fill_(9)
    engine.step([_step([1] * 20, blocks=(3, 1))])
    assert (engine.cache.blocks[[0, 2, 4, 5]] == 9).all()
    untouched = engine.cache.blocks[1, 0] == 9
    assert untouched.float().mean() == 12 / 16  # 4 of the block's 16 tokens were written


@pytest.mark.parametrize(
    ("sequence", "says"),
    [
        (_step([]), "no new token"),
        (_step([300]), "vocabulary"),
        (_step([-1]), "vocabulary"),
        (_step([1] * 33), "2 blocks"),
        (_step([1], start=64, blocks=(0, 1, 2, 3, 4)), "context of 64"),
        (_step([1], start=-1), "context"),
        (_step([1], blocks=(6,)), "block id"),
        (_step([1], blocks=(-1,)), "block id"),
    ],
)
def test_impossible_steps_are_refused_untouched(
    engine: Engine, sequence: StepEntry, says: str
) -> None:
    with pytest.raises(StepError, match=says):
        engine.step([_step([5], blocks=(5,)), sequence])
    assert not engine.cache.blocks.any()


def test_an_arena_of_another_model_is_refused() -> None:
    layout = make_layout(open_model(NAME, "float32"), 16)
    with pytest.raises(ValueError, match="laid out"):
        Engine(open_model(NAME + ",seed=1", "float32"), ReferenceOps(), empty_cache(layout, 2))
    with pytest.raises(ValueError, match="block_tokens"):
        make_layout(open_model(NAME, "float32"), 10)


def test_calibration_measures_all_kinds_within_the_engine_s_means(engine: Engine) -> None:
    samples = measure_samples(engine, budget_s=0.05)
    assert {s.kind for s in samples} == {"prefill", "decode", "mixed"}
    assert all(s.seconds > 0 for s in samples)
    for s in samples:
        sequences = 1 if s.kind == "mixed" else s.batch
        assert s.new_tokens // sequences + s.context_tokens // sequences <= 64
        assert s.decode_context_tokens // s.batch < 64
    cost = fit_samples(samples)
    assert cost.prefill_s(60, 0) > 0
    assert cost.decode_step_s(1, 10) > 0
    assert torch.isfinite(engine.cache.blocks).all()
