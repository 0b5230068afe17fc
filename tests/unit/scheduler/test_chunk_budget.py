"""Tests that chunks beside decodes are as large as the TBT SLO allows, in each step."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import LEAST_CHUNK_TOKENS, Chunk
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import StartPrefill
from moonpool.scheduler.actions import RunStep, StepEnded
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.types import Role, SamplingParams, Token
from moonpool_lab.solo import solo_attempt

LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=16,
    num_layers=2,
    num_kv_heads=1,
    head_dim=8,
)
COST = FittedCost(prefill=(0.0, 1e-3, 0.0, 0.0), decode=(0.01, 0.0, 0.0), mixed=(2e-3, 0.0))


class Bench:
    """Runs a mixed instance with one step at a time, each as long as its cost model predicts."""

    def __init__(self, cost: FittedCost = COST, slowness: float = 1.0, **config: Any) -> None:
        self.instance = Instance(
            InstanceConfig(**config), LAYOUT, 4096, Role.MIXED, cost, (1 << 30,)
        )
        self.cost, self.slowness = cost, slowness
        self.step: RunStep | None = None

    def start(self, name: str, num_tokens: int, tbt_s: float) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=10_000)
        work = solo_attempt(name, range(num_tokens), sampling, tbt_s=tbt_s, use_cache=False)
        self._take(self.instance.handle(StartPrefill(attempt=work), 0.0))

    def shares(self) -> dict[str, int]:
        assert self.step is not None
        return {str(e.attempt_id): len(e.new_token_ids) for e in self.step.entries}

    def end_step(self) -> None:
        step, self.step = self.step, None
        assert step is not None
        chunks = [
            Chunk(len(e.new_token_ids), e.start, 0, e.draw is not None)
            for e in step.entries
            if not e.generated
        ]
        contexts = [e.start + 1 for e in step.entries if e.generated]
        seconds = self.cost.step_s(chunks, len(contexts), sum(contexts))
        tokens = [None if e.draw is None else Token(7) for e in step.entries]
        self._take(self.instance.handle(StepEnded(tokens, seconds * self.slowness), 0.0))

    def _take(self, actions: list[Any]) -> None:
        self.instance.validate()
        for action in actions:
            if isinstance(action, RunStep):
                assert self.step is None
                self.step = action


def decoding(bench: Bench, tbt_s: float = 0.1) -> Bench:
    """Returns an instance with one decode."""
    bench.start("old", 16, tbt_s)
    bench.end_step()
    return bench


def test_a_chunk_is_cut_to_the_slo_of_the_decodes() -> None:
    bench = decoding(Bench())
    bench.start("new", 1000, 99.0)
    bench.end_step()
    assert bench.shares() == {"old": 1, "new": 83}, "85 ms: 2 of the decode, 83 of the chunk"


def test_a_pipeline_s_step_is_as_long_as_all_its_stages() -> None:
    """The cost model gives a chunk's time in one stage; two tokens are two stages apart."""
    bench = decoding(Bench(micro_batches=2))
    bench.start("new", 1000, 99.0)
    bench.end_step()
    assert bench.shares() == {"old": 1, "new": 41}


def test_the_strictest_slo_of_the_decodes_counts() -> None:
    bench = decoding(Bench(), tbt_s=5.0)
    bench.start("strict", 16, 0.05)
    bench.end_step()
    bench.end_step()
    bench.start("new", 1000, 99.0)
    bench.end_step()
    assert bench.shares() == {"old": 1, "strict": 1, "new": 38}


def test_without_decodes_the_whole_budget_is_used() -> None:
    bench = Bench()
    bench.start("new", 1000, 0.01)
    assert bench.shares() == {"new": 512}


def test_requests_without_an_slo_have_the_instances() -> None:
    bench = decoding(Bench(tbt_slo_s=0.2), tbt_s=float("inf"))
    bench.start("new", 1000, float("inf"))
    bench.end_step()
    assert bench.shares() == {"old": 1, "new": 168}


def test_chunks_shrink_as_the_context_grows() -> None:
    cost = FittedCost(prefill=(0.0, 1e-3, 1e-7, 2e-7), decode=(0.01, 0.0, 0.0))
    bench = decoding(Bench(cost, chunk_tokens=4096), tbt_s=0.5)
    bench.start("new", 16_000, 99.0)
    bench.end_step()
    sizes = []
    while bench.shares().get("new", 1) > 1:
        sizes.append(bench.shares()["new"])
        bench.end_step()
    assert sum(sizes) == 16_000
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sizes[0] > 3 * sizes[-2]


def test_an_slo_that_cannot_be_met_leaves_the_least_chunk() -> None:
    bench = decoding(Bench(), tbt_s=1e-6)
    bench.start("new", 102, 99.0)
    bench.end_step()
    sizes = []
    while bench.shares().get("new", 1) > 1:
        sizes.append(bench.shares()["new"])
        bench.end_step()
    whole, rest = divmod(102, LEAST_CHUNK_TOKENS)
    assert sizes == [LEAST_CHUNK_TOKENS] * whole + [rest]


def test_slow_steps_are_learned_from() -> None:
    bench = decoding(Bench(slowness=2.0))
    bench.start("new", 5000, 99.0)
    bench.end_step()
    for _ in range(30):
        bench.end_step()
    assert bench.shares()["new"] == pytest.approx(40, abs=1), "(85 / 2 - 2) ms"


def test_one_interrupted_step_does_not_stop_prefills() -> None:
    bench = decoding(Bench())
    bench.start("new", 5000, 99.0)
    bench.end_step()
    bench.slowness = 1000.0
    bench.end_step()
    assert bench.shares()["new"] >= LEAST_CHUNK_TOKENS
    bench.slowness = 1.0
    for _ in range(12):
        bench.end_step()
    assert bench.shares()["new"] == pytest.approx(83, abs=2), "one in eleven is less than a tenth"


def test_nine_in_ten_steps_meet_the_slo() -> None:
    """Steps take 0.8 to 1.2 times the expected time, in turn, and nine in ten must stay within the
    SLO."""
    bench = decoding(Bench())
    bench.start("new", 50_000, 99.0)
    bench.end_step()
    for number in range(62):
        bench.slowness = 0.8 + 0.4 * (number % 10) / 9
        bench.end_step()
    assert bench.shares()["new"] == pytest.approx(85 / 1.2 - 2, abs=4)


def tiled(slow_tiles: float) -> list[int]:
    """Returns the chunk sizes of a prompt in 550 steps on a device with tiles of 64. In the first
    200 steps, two tiles take `slow_tiles` times the predicted time, and after that the predicted
    time."""
    cost = FittedCost(
        prefill=(0.0, 5e-4, 0.0, 0.0), decode=(0.01, 0.0, 0.0), mixed=(2e-3, 0.0), tile_tokens=64
    )
    bench = decoding(Bench(cost, chunk_tokens=128))
    bench.start("new", 60_000, 99.0)
    bench.end_step()
    sizes = []
    for number in range(550):
        sizes.append(bench.shares()["new"])
        bench.slowness = slow_tiles if sizes[-1] > 64 and number < 200 else 1.0
        bench.end_step()
    return sizes


@pytest.mark.long
def test_a_size_that_is_slow_is_learned_apart() -> None:
    """Two tiles take 104 ms instead of the predicted 65 ms. Steps of one tile do not show when two
    tiles are fast again, so the instance tries two tiles again in the end."""
    sizes = tiled(1.6)
    assert 0 < sizes[:200].count(127) < 20
    assert set(sizes[:200]) == {63, 127}
    assert sizes[-1] == 127
    assert set(tiled(1.0)[:400]) == {127}


@pytest.mark.parametrize("batching", ["whole-prompts", "prefill-first", "alternating"])
def test_the_baselines_ignore_the_slo(batching: str) -> None:
    bench = decoding(Bench(batching=batching), tbt_s=0.01)
    bench.start("new", 400, 0.01)
    bench.end_step()
    while "new" not in bench.shares():
        bench.end_step()
    assert bench.shares()["new"] == 400
