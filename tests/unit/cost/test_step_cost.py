"""Tests rules that every ground truth must satisfy: more work never takes less time, chunks add up,
and the time of many steps is the sum of their times."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.config.tables import Parallelism
from moonpool.cost.domain import CostDomain
from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import Chunk, StepCost, prompt_chunks, prompt_s
from moonpool.sim.hardware.calibrated import CALIBRATED
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.domain_cost import DomainCost
from moonpool.sim.hardware.parallel_cost import Nic, group_cost
from moonpool.sim.hardware.roofline import RooflineCost

A800, LLAMA_70B = BUILT_IN.device("A800-SXM"), BUILT_IN.shape("llama3-70b")
NIC = Nic.of(A800, 8)
KINDS: tuple[Parallelism, ...] = ("tp", "tp+sp", "pp", "cpp")
BASES: dict[str, StepCost] = {
    "calibrated": CALIBRATED,
    "domain": DomainCost(CALIBRATED, RooflineCost(A800, LLAMA_70B, 8)),
    "roofline": RooflineCost(A800, LLAMA_70B, 8),
    "roofline-a10": RooflineCost(BUILT_IN.device("A10"), BUILT_IN.shape("llama3-8b"), 1),
}
TRUTHS: dict[str, StepCost] = BASES | {
    f"{name}-{kind}-{nodes}": group_cost(BASES[name], LLAMA_70B, nodes, kind, NIC)
    for name in ("domain", "roofline")
    for kind in KINDS
    for nodes in (2, 3)
}


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    cached = draw(st.integers(0, 60_000))
    done = draw(st.one_of(st.just(0), st.integers(0, 60_000)))
    num_tokens, last = draw(st.integers(1, 5_000)), draw(st.booleans())
    prompt_tokens = cached + done + num_tokens + 3000 + draw(st.integers(0, 60_000))
    return Chunk(num_tokens, cached + done, cached, last, prompt_tokens)


STEPS = st.tuples(
    st.lists(chunks(), max_size=3), st.integers(0, 200), st.integers(0, 2_000_000)
).map(lambda step: (step[0], step[1], step[2] if step[1] else 0))


def at_most(less: float, more: float) -> bool:
    return less <= more * (1 + 1e-12)


@pytest.mark.parametrize("name", TRUTHS)
@settings(max_examples=25, deadline=None)
@given(step=STEPS, more=chunks(), tokens=st.integers(1, 3000))
def test_more_work_takes_no_less_time(
    name: str, step: tuple[list[Chunk], int, int], more: Chunk, tokens: int
) -> None:
    truth = TRUTHS[name]
    given_chunks, batch, context = step
    before = truth.step_s(given_chunks, batch, context)
    assert before > 0 or not (given_chunks or batch)
    assert at_most(before, truth.step_s([*given_chunks, more], batch, context))
    assert at_most(before, truth.step_s(given_chunks, batch + 1, context + tokens))
    if batch:
        assert at_most(before, truth.step_s(given_chunks, batch, context + tokens))
    longer = more._replace(num_tokens=more.num_tokens + tokens)
    later = more._replace(start=more.start + tokens)
    behind = later._replace(cached_tokens=more.cached_tokens + tokens)
    alone = truth.step_s((more,), 0, 0)
    assert at_most(alone, truth.step_s((longer,), 0, 0))
    if not more.first:
        assert at_most(alone, truth.step_s((later,), 0, 0))
    # left out, because there a chunk's cost depends on its whole prompt
    if not name.startswith("domain"):
        assert at_most(alone, truth.step_s((behind,), 0, 0))
    without = more._replace(last=False)
    assert at_most(truth.step_s((without,), 0, 0), alone)


@pytest.mark.parametrize("name", TRUTHS)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 60))
def test_many_decode_steps_take_the_sum_of_single_ones(
    name: str, batch: int, context: int, num_steps: int
) -> None:
    truth = TRUTHS[name]
    context = context if batch else 0
    one_by_one = math.fsum(truth.step_s((), batch, context + i * batch) for i in range(num_steps))
    assert truth.decode_steps_s(batch, context, num_steps) == pytest.approx(one_by_one, rel=1e-12)


@pytest.mark.parametrize("name", TRUTHS)
def test_an_empty_step_takes_no_time(name: str) -> None:
    assert TRUTHS[name].step_s((), 0, 0) == 0.0
    assert TRUTHS[name].decode_steps_s(0, 0, 5) == 0.0
    assert TRUTHS[name].decode_steps_s(4, 4000, 0) == 0.0


@pytest.mark.parametrize("name", TRUTHS)
def test_only_pipelines_have_hops(name: str) -> None:
    truth = TRUTHS[name]
    pipeline = "-pp-" in name or "-cpp-" in name
    assert (truth.num_stages > 1) == pipeline
    assert (truth.hop_s(1000) > 0) == pipeline
    assert truth.hop_s(1000) <= truth.hop_s(2000)


@given(
    prefill=st.tuples(*[st.floats(0, 1e-2)] * 4),
    num_tokens=st.integers(1, 50_000),
    cached_share=st.floats(0, 1),
    cuts=st.lists(st.integers(1, 50_000), max_size=8),
)
def test_a_fitted_prompt_costs_the_same_however_it_is_cut(
    prefill: tuple[float, float, float, float],
    num_tokens: int,
    cached_share: float,
    cuts: list[int],
) -> None:
    cost = FittedCost(prefill=prefill, decode=(0.01, 0.001, 1e-8))
    cached = min(int(num_tokens * cached_share), num_tokens - 1)
    ends = sorted({cut for cut in cuts if cached < cut < num_tokens} | {num_tokens})
    starts = [cached, *ends[:-1]]
    pieces = [
        Chunk(end - start, start, cached, end == num_tokens)
        for start, end in zip(starts, ends, strict=True)
    ]
    total = math.fsum(cost.step_s((piece,), 0, 0) for piece in pieces)
    assert total == pytest.approx(cost.prefill_s(num_tokens, cached), rel=1e-12)
    assert cost.step_s(pieces, 0, 0) == pytest.approx(total, rel=1e-12)


def test_prompts_that_begin_in_a_step_share_its_constant() -> None:
    cost = FittedCost(prefill=(0.1, 1e-4, 0.0, 0.0), decode=(0.02, 1e-3, 1e-8))
    begins, goes_on = Chunk(256, 0, 0, True), Chunk(256, 256, 0, True)
    assert cost.step_s([begins] * 8, 0, 0) == pytest.approx(0.1 + 8 * 0.0256)
    assert cost.step_s([goes_on, begins], 0, 0) == pytest.approx(0.1 + 2 * 0.0256)
    assert cost.step_s([goes_on] * 2, 0, 0) == pytest.approx(2 * 0.0256)


def test_rows_beyond_the_measured_batches_cost_what_a_prompts_tokens_do() -> None:
    domain = CostDomain(
        prompt_tokens=(16, 512), cached_share=0.5, decode_batch=(1, 4), context_tokens=(64, 1024)
    )
    cost = FittedCost(prefill=(0.0, 1e-3, 0.0, 0.0), decode=(0.02, 0.0, 1e-8), domain=domain)
    assert cost.decode_step_s(4, 0) == pytest.approx(0.02)
    assert cost.decode_step_s(5, 0) == pytest.approx(0.021)
    assert cost.decode_steps_s(9, 0, 3) == pytest.approx(
        math.fsum(cost.step_s((), 9, 9 * i) for i in range(3))
    )
    steeper = FittedCost(prefill=cost.prefill, decode=(0.02, 2e-3, 1e-8), domain=domain)
    assert steeper.decode_step_s(9, 0) == pytest.approx(0.02 + 9 * 2e-3)


def test_weights_are_read_once_for_chunks_and_decodes() -> None:
    cost = FittedCost(prefill=(0.0, 1e-4, 0.0, 0.0), decode=(0.02, 1e-3, 1e-8))
    small, large = Chunk(10, 100, 0, False), Chunk(1000, 100, 0, False)
    decode_s = cost.step_s((), 4, 1000)
    assert decode_s == pytest.approx(0.02 + 4e-3 + 1e-5)
    assert cost.step_s((small,), 4, 1000) == pytest.approx(decode_s), "it hides behind the weights"
    assert cost.step_s((large,), 4, 1000) == pytest.approx(0.1 + 4e-3 + 1e-5)


@given(st.integers(1, 5000), st.integers(0, 6000), st.integers(1, 700))
def test_a_prompt_is_cut_without_gaps(num_tokens: int, cached: int, chunk_tokens: int) -> None:
    pieces = prompt_chunks(num_tokens, cached, chunk_tokens)
    begin = min(cached, num_tokens - 1)
    assert pieces[0].start == begin and pieces[0].first
    assert sum(piece.num_tokens for piece in pieces) == num_tokens - begin
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    at = begin
    for piece in pieces:
        assert piece.start == at and 1 <= piece.num_tokens <= chunk_tokens
        assert piece.cached_tokens == begin
        at += piece.num_tokens


def test_a_prompts_time_is_its_chunks_time() -> None:
    truth = BASES["roofline"]
    by_hand = truth.step_s((Chunk(512, 100, 100, False),), 0, 0)
    by_hand += truth.step_s((Chunk(88, 612, 100, True),), 0, 0)
    assert prompt_s(truth, 700, 100, 512) == pytest.approx(by_hand, rel=1e-14)
