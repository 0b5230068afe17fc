"""No step of any cost model takes less than its floor."""

from __future__ import annotations

import random

import pytest

from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import Chunk, StepCost
from moonpool.sim.hardware.calibrated import CALIBRATED
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.domain_cost import DomainCost
from moonpool.sim.hardware.parallel_cost import Nic, group_cost
from moonpool.sim.hardware.roofline import RooflineCost
from moonpool_lab.oracle.floors import CostFloor, floor_of

SEQUENCES, TOKENS = 96, 2048
DEVICE, SHAPE = BUILT_IN.device("A800-SXM"), BUILT_IN.shape("llama3-70b")
ROOFLINE = RooflineCost(DEVICE, SHAPE, 8)
CURVED = FittedCost(
    prefill=(0.01, 2e-4, 5e-9, 4e-9),
    decode=(0.02, 4e-4, 3e-8),
    mixed=(9e-4, 2e-8),
    decode_curve=((1, 0.021), (8, 0.022), (9, 0.03), (64, 0.05)),
)
NIC = Nic.of(DEVICE, 8)
DOMAIN = DomainCost(CALIBRATED, ROOFLINE)
COSTS: dict[str, StepCost] = {
    "calibrated": CALIBRATED,
    "domain": DOMAIN,
    "curved": CURVED,
    "roofline": ROOFLINE,
    "pipeline": group_cost(ROOFLINE, SHAPE, 4, "cpp", NIC),
    "pipeline by domain": group_cost(DOMAIN, SHAPE, 2, "cpp", NIC),
    "fitted pipeline": group_cost(CALIBRATED, SHAPE, 2, "pp", NIC),
}


def random_chunks(rng: random.Random, tokens: int) -> list[Chunk]:
    chunks = []
    while tokens > 0 and rng.random() < 0.8:
        new = rng.randint(1, tokens)
        cached = rng.choice([0, rng.randint(0, 60_000)])
        start = cached + rng.choice([0, rng.randint(0, 20_000)])
        last = rng.random() < 0.5
        prompt = start + new + (0 if last else rng.randint(1, 100_000))
        chunks.append(Chunk(new, start, cached, last, prompt))
        tokens -= new
    return chunks


def chunk_floor_s(floor: CostFloor, chunk: Chunk) -> float:
    """Returns the floor of a chunk with its share of its prompt's departure."""
    end, prompt, cached = chunk.start + chunk.num_tokens, chunk.prompt_tokens, chunk.cached_tokens
    share = chunk.num_tokens / (prompt - cached)
    return floor.prefill_s(float(chunk.start), float(end)) + share * floor.departure(prompt, cached)


@pytest.mark.long
@pytest.mark.parametrize("name", COSTS)
def test_no_step_takes_less_than_its_floor(name: str) -> None:
    cost, rng = COSTS[name], random.Random(name)
    floor = floor_of(cost, SEQUENCES, TOKENS + SEQUENCES)
    lines = [floor.support(batch) for batch in (1, 5, 33, SEQUENCES)]
    for _ in range(3000):
        batch = rng.choice([0, rng.randint(1, SEQUENCES)])
        context = batch * rng.randint(1, 30_000)
        chunks = random_chunks(rng, TOKENS) if rng.random() < 0.7 else []
        step_s = cost.step_s(chunks, batch, context) * (1 + 1e-9) + 1e-12
        prompts_s = sum(chunk_floor_s(floor, chunk) for chunk in chunks)
        prompts_s += floor.prompt_s * any(chunk.first for chunk in chunks)
        assert step_s >= prompts_s + floor.beside_sequence_s * batch + floor.context_s * context
        if batch:
            assert step_s >= floor.alone_s[batch - 1] + floor.context_s * context
            assert all(step_s >= e + f * batch + floor.context_s * context for e, f in lines)


@pytest.mark.parametrize("name", ["calibrated", "roofline", "domain"])
def test_the_floor_is_near_what_steps_take(name: str) -> None:
    cost, floor = COSTS[name], floor_of(COSTS[name], SEQUENCES, TOKENS)
    chunk_s = cost.step_s((Chunk(TOKENS, 0, 0, False),), 0, 0)
    assert floor.prompt_s + floor.prefill_s(0.0, float(TOKENS)) > 0.9 * chunk_s
    e, f = floor.support(32)
    assert e + f * 32 > 0.94 * cost.step_s((), 32, 0)
