"""Tests the KVCache occupation of a long prompt on the ways to compute it."""

from __future__ import annotations

import pytest

from benchmarks.suite.engine.busy_memory import WAYS, bench_occupation, separate_s
from moonpool.cost.fitted import FittedCost

pytestmark = pytest.mark.long

MODEL = "random:hidden=64,layers=4,heads=4,kv_heads=2,inter=96,vocab=300"
RATE = 1e6
COST = FittedCost(
    prefill=(0.0, 0.001, 0.0, 0.0),
    decode=(0.01, 0.0, 0.0),
    token_bytes=512,
    shared_memory_bytes_per_s=RATE,
    control_latency_s=1e-9,
)


def test_simulated_a_prompt_is_held_while_it_is_computed_and_until_it_has_left() -> None:
    kv_bytes = 2048 * COST.token_bytes
    after = separate_s(2048, COST, layer_wise=False)
    assert after == pytest.approx(kv_bytes * (2.048 + kv_bytes / RATE), rel=0.02)
    # Sending takes half as long as computing, so computing hides all of it but the end.
    beside = separate_s(2048, COST, layer_wise=True)
    assert beside == pytest.approx(kv_bytes * 2.048, rel=0.1)


def test_all_ways_are_measured_and_simulated() -> None:
    said: list[str] = []
    found = bench_occupation(MODEL, 1024, 0.02, 1, said.append)
    assert set(found["measured"]) == set(found["simulated"]) == set(WAYS)
    kv_bytes = 1024 * 2 * 4 * 2 * 16 * 2
    assert all(value > 0 for value in found["measured"].values())
    assert found["simulated"]["separate"] > found["simulated"]["separate, layer-wise"] > 0
    assert found["measured"]["separate"] < kv_bytes * 60.0
    assert len(said) == len(WAYS)
