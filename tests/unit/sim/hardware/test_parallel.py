"""Tests that the costs of parallelism over nodes agree with the arguments of the papers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.config.tables import Parallelism
from moonpool.cost.model import Chunk, StepCost, prompt_chunks
from moonpool.sim.hardware.calibrated import CALIBRATED
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.parallel_cost import Nic, group_cost
from moonpool.sim.hardware.roofline import RooflineCost
from papers.mooncake.cpp import group_nic_bytes, group_node_s, group_prefill_s, pipeline_s

A800, SHAPE = BUILT_IN.device("A800-SXM"), BUILT_IN.shape("llama3-70b")
NIC = Nic.of(A800, 8)
BASES: dict[str, StepCost] = {
    "calibrated": CALIBRATED,
    "roofline": RooflineCost(A800, SHAPE, 8),
}
KINDS: tuple[Parallelism, ...] = ("tp", "tp+sp", "pp", "cpp")
CHUNK_TOKENS = 1024


def latency_s(base: str, kind: Parallelism, nodes: int, num_tokens: int) -> float:
    cost = group_cost(BASES[base], SHAPE, nodes, kind, NIC)
    return group_prefill_s(cost, kind, num_tokens, 0, CHUNK_TOKENS)


def node_s(base: str, kind: Parallelism, nodes: int, num_tokens: int) -> float:
    cost = group_cost(BASES[base], SHAPE, nodes, kind, NIC)
    return group_node_s(cost, nodes, kind, num_tokens, 0, CHUNK_TOKENS)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_node_is_itself(base: str, kind: Parallelism) -> None:
    assert group_cost(BASES[base], SHAPE, 1, kind, NIC) is BASES[base]
    assert group_nic_bytes(SHAPE, 1, kind, 8192) == 0


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("nodes", [2, 4])
def test_chunked_pipelines_shorten_long_prompts_and_plain_ones_do_not(
    base: str, nodes: int
) -> None:
    for num_tokens in (32768, 131072):
        alone_s = latency_s(base, "cpp", 1, num_tokens)
        assert alone_s / nodes < latency_s(base, "cpp", nodes, num_tokens) < 1.2 * alone_s / nodes
        whole_s = latency_s(base, "pp", 1, num_tokens)
        assert latency_s(base, "pp", nodes, num_tokens) == pytest.approx(whole_s, rel=0.02)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("nodes", [2, 4])
def test_a_chunked_pipeline_costs_short_inputs_nothing(base: str, nodes: int) -> None:
    """In a chunked pipeline, all nodes together take the time of one node for a prompt of one
    chunk. Tensor parallelism and (separately) sequence parallelism take much more."""
    alone_s = node_s(base, "cpp", 1, CHUNK_TOKENS)
    assert node_s(base, "cpp", nodes, CHUNK_TOKENS) <= 1.10 * alone_s
    assert node_s(base, "tp", nodes, CHUNK_TOKENS) > 1.4 * alone_s
    if base == "roofline":
        assert node_s(base, "tp+sp", nodes, CHUNK_TOKENS) > 1.15 * alone_s


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("num_tokens", [1024, 8192, 131072])
def test_it_sends_least(nodes: int, num_tokens: int) -> None:
    sent = {kind: group_nic_bytes(SHAPE, nodes, kind, num_tokens) for kind in KINDS}
    assert sent["cpp"] == sent["pp"] == (nodes - 1) * num_tokens * 8192 * 2
    assert sent["tp+sp"] == 20 * sent["cpp"], "every layer's KVCache, 1/4 of its activations"
    assert sent["tp"] == 320 * sent["cpp"], "two all-reduces per layer, each there and back"


@pytest.mark.parametrize("base", BASES)
def test_tensor_parallelism_over_nics_gains_little(base: str) -> None:
    """With four nodes and 32k tokens, the gain must be less than half of a chunked pipeline's
    gain."""
    one = latency_s(base, "tp", 1, 32768)
    assert one / latency_s(base, "tp", 4, 32768) < 2
    assert one / latency_s(base, "cpp", 4, 32768) > 3


@pytest.mark.parametrize("base", BASES)
def test_a_slow_network_hurts_the_parallelism_that_sends_much(base: str) -> None:
    slow = Nic(bytes_per_s=NIC.bytes_per_s / 10, latency_s=NIC.latency_s)
    chunk = (Chunk(1024, 0, 0, True),)

    def slowdown(kind: Parallelism) -> float:
        at_full = group_cost(BASES[base], SHAPE, 4, kind, NIC)
        at_tenth = group_cost(BASES[base], SHAPE, 4, kind, slow)
        return at_tenth.step_s(chunk, 0, 0) / at_full.step_s(chunk, 0, 0)

    assert slowdown("cpp") == 1.0, "hops overlap with the next chunk"
    assert slowdown("tp+sp") > 1.1
    if base == "calibrated":  # the roofline uses the NICs of its device instead
        assert slowdown("tp") > 2


@given(
    st.integers(1, 60_000),
    st.floats(0, 1),
    st.sampled_from((256, 1024, 4096)),
    st.sampled_from((2, 3, 4)),
)
@settings(max_examples=60, deadline=None)
def test_pipelines_match_the_closed_form(
    num_tokens: int, share: float, chunk_tokens: int, nodes: int
) -> None:
    """The time is sum(t)/X, plus hops, plus (X-1)/X of a chunk between the shortest and the
    longest."""
    cached = min(int(share * num_tokens), num_tokens - 1)
    cost = group_cost(CALIBRATED, SHAPE, nodes, "cpp", NIC)
    chunks = prompt_chunks(num_tokens, cached, chunk_tokens)
    steps = [CALIBRATED.step_s((chunk,), 0, 0) / nodes for chunk in chunks]
    hops = (nodes - 1) * cost.hop_s(chunk_tokens)
    total, fill = math.fsum(steps), nodes - 1
    seconds = pipeline_s(cost, chunks)
    assert total + fill * min(steps) <= seconds * (1 + 1e-12)
    assert seconds <= (total + fill * max(steps) + hops) * (1 + 1e-12)


def test_a_stage_with_more_layers_sets_the_pace() -> None:
    base = RooflineCost(A800, SHAPE, 8, engine_overhead_s=0.0)
    three = group_cost(base, SHAPE, 3, "pp", NIC)  # the first stage has 27 of 80 layers
    chunk = (Chunk(2048, 0, 0, False),)
    expected = base.step_s(chunk, 0, 0) * 27 / 80
    assert three.step_s(chunk, 0, 0) == pytest.approx(expected, rel=1e-12)
    assert three.num_stages == 3


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="80 layers: it cannot have 81 stages"):
        group_cost(CALIBRATED, SHAPE, 81, "cpp", NIC)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("num_tokens", [1024, 8192, 32768, 131072])
def test_what_a_prompt_alone_costs_each_kind_of_group(
    base: str, nodes: int, num_tokens: int
) -> None:
    alone_s = latency_s(base, "tp", 1, num_tokens)
    lasts_s = {kind: latency_s(base, kind, nodes, num_tokens) for kind in KINDS}
    busy_s = {kind: node_s(base, kind, nodes, num_tokens) for kind in KINDS}
    sent = {kind: group_nic_bytes(SHAPE, nodes, kind, num_tokens) for kind in KINDS}
    for kind in KINDS:
        assert alone_s / nodes <= lasts_s[kind] and alone_s <= busy_s[kind] * 1.001
    # With tensor parallelism, all nodes compute each layer; in a pipeline, the other nodes are free
    # for other prompts.
    assert busy_s["tp"] == pytest.approx(nodes * lasts_s["tp"])
    assert busy_s["tp+sp"] == pytest.approx(nodes * lasts_s["tp+sp"])
    assert busy_s["pp"] == pytest.approx(alone_s, rel=0.1)
    assert lasts_s["tp+sp"] < lasts_s["tp"] and lasts_s["tp+sp"] < lasts_s["pp"]
    in_chunks = num_tokens > CHUNK_TOKENS
    assert (lasts_s["cpp"] < 0.7 * lasts_s["pp"]) == in_chunks
    assert busy_s["cpp"] == pytest.approx(alone_s, rel=0.2)  # chunks add a little time
    assert sent["tp"] > sent["tp+sp"] > sent["cpp"] == sent["pp"] > 0
    once = group_nic_bytes(SHAPE, 2, "pp", num_tokens)  # one transfer from each stage to the next
    assert sent["pp"] == pytest.approx((nodes - 1) * once)
