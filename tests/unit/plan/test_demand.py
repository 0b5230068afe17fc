"""Tests the demand and the candidates that follow from the cost model, before any simulation."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.config.parse import parse_config
from moonpool.config.tables import ConfigError
from moonpool.plan.candidate import NodeKind, Priced
from moonpool.plan.demand import (
    Demand,
    busiest_span,
    demand_of,
    mixed_chunk_tokens,
    prepare,
    truth_for,
)
from moonpool.plan.trial import WHOLE, Workload
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.hardware.prices import parse_prices
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.row import TraceRow

BASE = parse_config("", {}, DEFAULTS)
A800, H100 = NodeKind("A800-SXM", 8), NodeKind("H100-SXM", 8)
PRICED = Priced(parse_prices(), 327_680.0)


def conversation(requests: int = 1500, rate: float = 3.4) -> Workload:
    rows = generate(BUILT_IN["conversation"], num_requests=requests, seed=1, rate_rps=rate)
    return Workload(tuple(rows), BLOCK_TOKENS)


def test_hits_are_those_of_an_endless_cache() -> None:
    rows = (
        TraceRow(0.0, 1024, 10, (1, 2)),
        TraceRow(1.0, 1500, 10, (1, 2, 3)),
        TraceRow(2.0, 600, 10, (4, 5)),
    )
    demand = demand_of(Workload(rows, 512), 256)
    assert demand.hit_tokens == (0, 1024, 0) and demand.longest_tokens == 1510
    assert demand_of(Workload(rows, 0), 256).hit_tokens == (0, 0, 0)


def test_the_busiest_part_is_where_most_work_is() -> None:
    times = tuple(float(i) for i in range(3600))
    demand = Demand(times, (100,) * 3600, (0,) * 3600, (10,) * 3600)
    work = [10.0 if 2000 <= at < 2300 else 1.0 for at in times]
    span = busiest_span(demand, work)
    assert span.begin_s <= 2000 and span.end_s >= 2300
    assert span.end_s - span.begin_s == pytest.approx(3599 / 6)
    assert span.warm_up_s == pytest.approx(3599 / 12)
    short = Demand(times[:100], (1,) * 100, (0,) * 100, (1,) * 100)
    assert busiest_span(short, work[:100]) == WHOLE


def test_twice_the_load_starts_with_about_twice_the_instances() -> None:
    counts = []
    for rate in (3.0, 6.0):
        found = prepare(conversation(rate=rate), BASE, [A800], PRICED, 0.9, "disaggregated")
        [start] = found.starts
        counts.append((start.prefill, start.decode))
    assert counts[1][0] == pytest.approx(2 * counts[0][0], abs=2)
    assert counts[1][1] >= counts[0][1] >= 1


def test_every_mix_is_a_start_and_what_does_not_fit_is_left_out() -> None:
    base = truth_for(BASE, [A800, H100], None)
    small = NodeKind("A40", 2)
    found = prepare(conversation(), base, [A800, small, H100], PRICED, 0.9)
    mixes = {(s.kind, s.decode_kind, bool(s.mixed)) for s in found.starts}
    assert len(found.starts) == len(mixes) == 6
    [reason] = found.left_out
    assert "does not fit 2 A40" in reason
    faster = {s.kind: s.prefill for s in found.starts if s.decode_kind == A800 and not s.mixed}
    assert faster[H100] < faster[A800]


def test_a_reason_is_said_once_for_all_sizes_of_a_node() -> None:
    sizes = [NodeKind("A40", size) for size in (1, 2)]
    found = prepare(conversation(300), truth_for(BASE, sizes, None), [*sizes, A800], PRICED, 0.9)
    [reason] = found.left_out
    assert reason.startswith("llama3-70b does not fit 2 A40") and reason.endswith(
        "(nodes of 1, too)"
    )
    drawn = msgspec.structs.replace(PRICED, device_power_w={"H100-SXM": 700.0}, max_power_w=500.0)
    sizes = [NodeKind("H100-SXM", size) for size in (1, 2, 4, 8)]
    with pytest.raises(ConfigError) as error:
        prepare(conversation(300), truth_for(BASE, sizes, None), sizes, drawn, 0.9)
    assert str(error.value) == (
        "1 mixed instance on one node of 1 H100-SXM may draw 0.7 kW, more than the 0.5 kW of"
        " --max-power (nodes of 2, 4 and 8, too)"
    )


def test_the_power_of_one_mixed_node_is_enough_for_it() -> None:
    """Split pools need two nodes of the same device, which draw more than the limit."""
    base = truth_for(BASE, [H100], None)
    watts = msgspec.structs.replace(PRICED, device_power_w={"H100-SXM": 700.0})
    small = conversation(300, rate=0.05)
    enough = msgspec.structs.replace(watts, max_power_w=6000.0)
    found = prepare(small, base, [H100], enough, 0.9)
    assert [(start.mixed, start.prefill) for start in found.starts] == [(1, 0)]
    with pytest.raises(ConfigError, match=r"within 6 kW.* draw 11\.2 kW; give --max-power as"):
        prepare(small, base, [H100], enough, 0.9, "disaggregated")


def test_the_measured_node_is_used_for_itself_alone() -> None:
    assert truth_for(BASE, [A800], None).hardware.cost == "a800-llama3-70b"
    assert truth_for(BASE, [A800, H100], None).hardware.cost == "roofline"
    assert truth_for(BASE, [NodeKind("A800-SXM", 4)], None).hardware.cost == "roofline"
    assert truth_for(BASE, [A800], "roofline").hardware.cost == "roofline"


def test_colocated_chunks_leave_room_for_the_tbt() -> None:
    demand = demand_of(conversation(), 256)
    node = build_hardware(BASE).mixed
    chunk = mixed_chunk_tokens(demand, node, BASE)
    assert chunk in (128, 256, 512)
    loose = parse_config("", {"slo": {"tbt_s": 2.0}}, DEFAULTS)
    assert mixed_chunk_tokens(demand, node, loose) > chunk


def test_what_shares_nothing_is_given_no_cache_to_keep() -> None:
    """Pools are sized only for running requests: without SSD, with one eviction policy, and at most
    as large as the whole trace."""
    rows = tuple(TraceRow(float(i), 3000, 100, ()) for i in range(60))
    found = prepare(Workload(rows, 0), BASE, [A800], PRICED, 0.9)
    assert not found.shares_prefixes
    assert found.steps.ssds == (0,) and len(found.steps.evictions) == 1
    assert found.steps.caches[0] == 32_000 and found.steps.caches[-1] == 250_000
    shared = prepare(conversation(300), BASE, [A800], PRICED, 0.9)
    assert shared.shares_prefixes and len(shared.steps.ssds) > 1
    assert len(shared.steps.evictions) > 1


def test_two_stages_are_tried_where_prompts_are_late_on_one() -> None:
    rows = tuple(TraceRow(float(i), 60_000, 100, ()) for i in range(20))
    base = truth_for(BASE, [H100], None)
    counts = []
    for ttft_s in (60.0, 8.0):
        slo = msgspec.structs.replace(base.slo, ttft_s=ttft_s)
        found = prepare(
            Workload(rows, 0), msgspec.structs.replace(base, slo=slo), [H100], PRICED, 0.9
        )
        counts.append({start.prefill_stages for start in found.starts})
    assert counts == [{1}, {1, 2}]
