"""Tests the sizes that a profile recommends: complete tiles, within the SLO. The profile must be
readable as costs."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.cost.fitted import FittedCost, Profile
from moonpool_lab.profiling.chunk_sizes import recommend

COST = FittedCost(
    prefill=(0.01, 1e-3, 0.0, 0.0), decode=(0.02, 1e-3, 0.0), mixed=(2e-3, 0.0), tile_tokens=16
)
CURVE = {tokens: COST.prefill_s(tokens, 0) for tokens in (16, 64, 256, 512, 1024)}


def test_the_largest_chunk_that_keeps_the_slo_with_headroom() -> None:
    (choice,) = recommend(COST, CURVE, [0.2], decodes=8, context_tokens=1000).chunks
    assert (choice.chunk_tokens + 8) % 16 == 0
    assert choice.chunk_tokens == 136, "10 + 136 + 16 ms of 170; 152 would take 178"
    assert choice.step_s == pytest.approx(0.162) and choice.holds


def test_a_hopeless_slo_says_so() -> None:
    (choice,) = recommend(COST, CURVE, [0.01], decodes=8, context_tokens=1000).chunks
    assert choice.chunk_tokens == 8 and not choice.holds


def test_a_loose_slo_has_the_largest_that_was_measured() -> None:
    (choice,) = recommend(COST, CURVE, [9.0], decodes=8, context_tokens=1000).chunks
    assert choice.chunk_tokens == 1024
    assert recommend(COST, CURVE, [], 8, 1000).saturation_tokens == 256


def test_the_file_serves_as_costs() -> None:
    found = recommend(COST, CURVE, [0.2], decodes=8, context_tokens=1000)
    text = msgspec.json.encode(msgspec.to_builtins(found, str_keys=True))
    again = msgspec.json.decode(text, type=Profile)
    assert again == found and again.prefill == COST.prefill
    assert msgspec.json.decode(msgspec.json.encode(COST), type=Profile).decode == COST.decode
