"""Tests the verdict on attention offloading: the comparison of decode nodes, and the result of the
search."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.config.parse import parse_config
from moonpool.config.tables import ConfigError
from moonpool.plan.assess import Assessment
from moonpool.plan.candidate import Candidate, NodeKind, Priced
from moonpool.plan.confidence import Attainment
from moonpool.plan.demand import prepare
from moonpool.plan.offloading import all_memory, decode_nodes_of, verdict, with_rivals
from moonpool.plan.search import ClusterPlan, MixFound
from moonpool.plan.trial import Outcome, Workload
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.hardware.catalogue import BUILT_IN
from moonpool.sim.hardware.offload_cost import OffloadCost
from moonpool.sim.hardware.prices import parse_prices
from moonpool.trace.row import TraceRow

BASE = parse_config("", {"hardware": {"cost": "roofline"}}, DEFAULTS)
PRICES = parse_prices("devices = { H100-SXM = 11.06, H20 = 4.63 }")
H100, H20 = NodeKind("H100-SXM", 8), NodeKind("H20", 8)
LAMINA = NodeKind("H100-SXM", 2, "H20", 4)
ROWS = tuple(TraceRow(float(n), 4000, 200, ()) for n in range(50))


def cluster(decode_kind: NodeKind, decode: int = 1) -> Candidate:
    return Candidate(H100, decode_kind, 2, decode, 0, 1_000_000, 1024)


def price(candidate: Candidate) -> float:
    return candidate.decode * (10.0 if candidate.decode_kind.offloads else 12.0)


def assessed(candidate: Candidate) -> Assessment:
    return Assessment(candidate, price(candidate), (Outcome(Attainment(100, 95), {}, ()),))


def plan(choice: Candidate | None, *mixes: MixFound) -> ClusterPlan:
    return ClusterPlan(None if choice is None else assessed(choice), None, (), mixes, (), 0.0, "")


def test_the_rival_is_what_the_price_buys() -> None:
    assert LAMINA.usd_per_h(PRICES) == pytest.approx(2 * 11.06 + 4 * 4.63)
    assert all_memory(LAMINA, PRICES) == H20  # 8 x 4.63 = 37.04 USD/h, of 40.64 USD/h
    assert all_memory(NodeKind("H100-SXM", 1, "H20", 2), PRICES).num_devices == 4
    assert with_rivals([H100, LAMINA, H20], PRICES) == [H100, LAMINA, H20]
    assert with_rivals([H100], PRICES) == [H100]


def test_each_node_keeps_the_limit_and_its_memory() -> None:
    found = decode_nodes_of([H100, LAMINA, H20], BASE, BUILT_IN, PRICES, 4000)
    assert [node.tokens_per_usd for node in found] == sorted(
        (node.tokens_per_usd for node in found), reverse=True
    )
    for node in found:
        assert node.batch > 1 and node.step_s <= BASE.slo.tbt_s
        assert node.batch * 4000 <= node.kv_tokens
        assert (node.balance is not None) == node.kind.offloads
    lamina = next(node for node in found if node.kind.offloads)
    assert lamina.balance is not None
    assert 0 < lamina.balance.least_bytes_per_s < lamina.balance.wire_bytes_per_s
    tight = msgspec.structs.replace(BASE, slo=msgspec.structs.replace(BASE.slo, tbt_s=1e-6))
    [none] = decode_nodes_of([LAMINA], tight, BUILT_IN, PRICES, 4000)
    assert none.batch == 0 and none.tokens_per_usd == 0.0


def test_the_verdict_is_that_of_the_choice() -> None:
    lamina, h100 = cluster(LAMINA), cluster(H100)
    settled = MixFound(h100, 1.0, assessed(h100))
    # By the cost model, this candidate was the cheapest, but in simulations it needed three nodes.
    more = MixFound(lamina, 1.0, assessed(cluster(LAMINA, 3)))
    said = verdict(plan(h100, settled, more))
    assert "does not pay: 2 prefill + 1 decode of 8 x H100-SXM (12.00 USD/h) was chosen" in said
    kinds = "8 x H100-SXM / 2 x H100-SXM + 4 x H20"
    assert said.endswith(f"2 prefill + 3 decode of {kinds}, costs 30.00 USD/h.")
    said = verdict(plan(lamina, MixFound(lamina, 1.0), settled))
    assert "attention pays: 2 prefill + 1 decode of 8 x H100-SXM / 2 x" in said
    assert said.endswith("without it, 2 prefill + 1 decode of 8 x H100-SXM, costs 12.00 USD/h.")
    assert verdict(plan(h100, settled, MixFound(lamina, 9.0))).endswith(
        "9.00 USD/h by the cost model."
    )
    assert "only 2 prefill + 1 decode" in verdict(plan(h100, settled))
    assert "is unknown" in verdict(plan(None, settled, more))


def test_it_is_a_mix_that_only_decodes() -> None:
    priced = Priced(PRICES, 327_680.0)
    found = prepare(Workload(ROWS, 0), BASE, [H100, LAMINA], priced, 0.9)
    kinds = {(start.kind, start.decode_kind, bool(start.mixed)) for start in found.starts}
    assert kinds == {(H100, H100, False), (H100, LAMINA, False), (H100, H100, True)}
    with pytest.raises(ConfigError, match="only decode: name --devices that prefill"):
        prepare(Workload(ROWS, 0), BASE, [LAMINA], priced, 0.9)


def test_what_is_simulated_holds_its_cache_on_the_attention_devices() -> None:
    hardware = build_hardware(Candidate(H100, LAMINA, 2, 1, 0, 1_000_000, 1024).config(BASE))
    assert isinstance(hardware.decode.ground_truth, OffloadCost)
    assert not isinstance(hardware.prefill.ground_truth, OffloadCost)
    alone = build_hardware(
        Candidate(H100, NodeKind("H100-SXM", 2), 2, 1, 0, 1_000_000, 1024).config(BASE)
    )
    assert hardware.decode.engine_tokens > 10 * alone.decode.engine_tokens
    assert hardware.decode.nic_bytes_per_s == pytest.approx(2 * alone.decode.nic_bytes_per_s)


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ({"attention_device": "H20"}, "attention_devices_per_node must be 1 to 64 where"),
        ({"attention_devices_per_node": 4}, "attention_devices_per_node must be 1 to 64 where"),
        ({"decode_batches": 0}, "decode_batches must be 1 to 8"),
        (
            {"attention_device": "H20", "attention_devices_per_node": 4, "cost": "a800-llama3-70b"},
            'separates attention from the dense layers; use hardware.cost = "roofline"',
        ),
    ],
)
def test_mistakes_are_named(hardware: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_hardware(parse_config("", {"hardware": hardware}, DEFAULTS))
