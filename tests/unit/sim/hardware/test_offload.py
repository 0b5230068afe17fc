"""Tests a decode step whose attention runs on other devices."""

from __future__ import annotations

from math import fsum

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.offload_cost import (
    AttentionPool,
    OffloadCost,
    OffloadNetwork,
    least_bandwidth_bytes_per_s,
)
from moonpool.sim.hardware.roofline import RooflineCost

H100, H20 = BUILT_IN.device("H100-SXM"), BUILT_IN.device("H20")
LLAMA3, LLAMA_65B = BUILT_IN.shape("llama3-70b"), BUILT_IN.shape("llama-65b")


def offloaded(num_batches: int = 2, early: bool = True, num_attention: int = 4) -> OffloadCost:
    pool = AttentionPool(H20, num_attention)
    return OffloadCost(
        RooflineCost(H100, LLAMA3, 2), pool, OffloadNetwork.of(H100, 2, pool), num_batches, early
    )


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 600),
    context=st.integers(1, 20_000),
    steps=st.integers(1, 90),
    num_batches=st.integers(1, 4),
)
def test_many_steps_take_as_long_as_each_of_them(
    batch: int, context: int, steps: int, num_batches: int
) -> None:
    cost = offloaded(num_batches)
    each = fsum(cost.step_s((), batch, batch * (context + i)) for i in range(steps))
    assert cost.decode_steps_s(batch, batch * context, steps) == pytest.approx(each, rel=1e-9)


def test_two_batches_hide_the_shorter_side() -> None:
    one, two = offloaded(1), offloaded(2)
    batch, context = 400, 4_096
    serial_s, staggered_s = (
        one.step_s((), batch, batch * context),
        two.step_s((), batch, batch * context),
    )
    assert staggered_s < serial_s
    half = two.layer_times(batch / 2, batch / 2 * context)
    busy_s = LLAMA3.layers * 2 * max(half.model_s, half.attention_s)
    assert staggered_s >= busy_s, "no device can do more than it can"


def test_three_batches_need_two_replicas_and_share_the_attention() -> None:
    three = offloaded(3)
    assert three.num_replicas == 2
    batch, context = 600, 8_192
    third = three.layer_times(batch / 3, batch / 3 * context)
    assert third.attention_s > third.model_s, "long contexts: attention sets the pace"
    per_layer = (three.step_s((), batch, batch * context) - three.model.engine_overhead_s) / 80
    assert per_layer == pytest.approx(3 * third.attention_s, rel=0.05)


def test_the_query_first_hides_keys_and_values() -> None:
    early, late = (
        offloaded(1).layer_times(200, 200 * 4096),
        offloaded(1, False).layer_times(200, 200 * 4096),
    )
    kv_bytes = 200 * 2 * LLAMA3.kv_heads * LLAMA3.head_dim * 2
    assert late.network_s - early.network_s == pytest.approx(kv_bytes / (2 * 50e9 * 0.71))
    # Without context, attention takes no time that could hide the transfer.
    none = offloaded(1).layer_times(2000, 0).network_s
    assert none > offloaded(1).layer_times(2000, 2000 * 4096).network_s


def test_kv_heads_that_cannot_be_divided_evenly_set_the_pace() -> None:
    eight, five = AttentionPool(H20, 8), AttentionPool(H20, 5)
    assert five.key_s(LLAMA3) == pytest.approx(2 * eight.key_s(LLAMA3))
    assert five.capacity_tokens(LLAMA3, 0.9) == AttentionPool(H20, 4).capacity_tokens(LLAMA3, 0.9)


@pytest.mark.parametrize(
    ("context", "batch", "gb_per_s"), [(1024, 300, 66), (4096, 100, 20), (4096, 300, 31)]
)
def test_least_bandwidth_against_ideal_rooflines(context: int, batch: int, gb_per_s: float) -> None:
    """Lamina's equation gives these bandwidths if devices reach their peaks."""
    ideal = {"bandwidth_share": 1.0, "flops_share": 1.0, "launch_s": 0.0}
    gemm = msgspec.structs.replace(H100.gemm, **ideal, sharpness=8, tile_tokens=1)
    h100 = msgspec.structs.replace(H100, gemm=gemm, elementwise_share=1e3)
    h20 = msgspec.structs.replace(H20, attention=msgspec.structs.replace(H20.attention, **ideal))
    model = RooflineCost(h100, LLAMA3, 1, engine_overhead_s=0.0)
    found = least_bandwidth_bytes_per_s(model, AttentionPool(h20, 1), batch, context) / 1e9
    assert found == pytest.approx(gb_per_s, rel=0.1)


def test_no_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        offloaded(0)
