"""Tests candidates: their prices, neighbours and configurations."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.config.parse import parse_config
from moonpool.plan.candidate import (
    CACHE_STEPS,
    CHUNK_STEPS,
    Candidate,
    NodeKind,
    Priced,
    Steps,
    can_serve,
    neighbours,
    stepped,
    tokens,
)
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.hardware.prices import parse_prices

A800, H20 = NodeKind("A800-SXM", 8), NodeKind("H20", 4)
ONE = Candidate(A800, H20, 3, 2, 0, 1_000_000, 2048)
PRICED = Priced(parse_prices(""), 500_000.0)
MIXED = Candidate(A800, A800, 0, 0, 4, 1_000_000, 256)


STEPS = Steps(CACHE_STEPS, (0, 1_000_000), ("lru", "lfu"))


def test_the_price_is_of_nodes_of_dram_and_of_ssd() -> None:
    prices = parse_prices(
        "devices = { A800-SXM = 2.0, H20 = 3.0 }\n[dram]\nusd_per_gb_h = 0.001\n[ssd]\n"
        "usd_per_gb_h = 0.0001"
    )
    priced = Priced(prices, 500_000.0)
    assert priced.usd_per_h(ONE) == pytest.approx(3 * 16 + 2 * 12 + 5 * 500 * 0.001)
    assert priced.usd_per_h(MIXED) == pytest.approx(4 * 16 + 4 * 500 * 0.001)
    groups = Priced(prices, 500_000.0, nodes_per_prefill=2)
    assert groups.usd_per_h(ONE) == pytest.approx(6 * 16 + 2 * 12 + 8 * 500 * 0.001)
    staged = msgspec.structs.replace(ONE, prefill_stages=2, mixed=1)
    assert priced.usd_per_h(staged) == pytest.approx(8 * 16 + 2 * 12 + 10 * 500 * 0.001)
    ssd = msgspec.structs.replace(ONE, ssd_tokens=4_000_000)
    assert priced.usd_per_h(ssd) - priced.usd_per_h(ONE) == pytest.approx(5 * 2000 * 0.0001)


def test_neighbours_are_one_step_away() -> None:
    found = {n.change: n.candidate for n in neighbours(ONE, STEPS)}
    assert found["one prefill instance fewer"].prefill == 2
    assert found["one decode instance more"].decode == 3
    assert found["750k cached tokens an instance"].cache_tokens == 750_000
    assert found["1M tokens of SSD an instance"].ssd_tokens == 1_000_000
    assert found["chunks of 1024 tokens"].chunk_tokens == 1024
    assert found["eviction lfu"].eviction == "lfu"
    assert len(found) == 4 + 2 + 1 + 2 + 1
    for other in found.values():
        changed = [
            name
            for name in Candidate.__struct_fields__
            if getattr(other, name) != getattr(ONE, name)
        ]
        assert len(changed) == 1


def test_no_neighbour_is_impossible() -> None:
    single = msgspec.structs.replace(ONE, prefill=1, decode=1, cache_tokens=CACHE_STEPS[0])
    found = [n.candidate for n in neighbours(single, STEPS)]
    assert all(can_serve(one.prefill, one.decode, one.mixed) for one in found)
    assert {one.mixed for one in (n.candidate for n in neighbours(MIXED, STEPS))} == {3, 4, 5}
    helped = msgspec.structs.replace(single, mixed=1)
    assert any(one.prefill == 0 for one in (n.candidate for n in neighbours(helped, STEPS)))
    assert can_serve(0, 1, 1) and not can_serve(2, 0, 0) and not can_serve(1, -1, 1)


def test_it_is_a_cluster_that_can_be_simulated() -> None:
    base = parse_config("", {"hardware": {"cost": "roofline"}}, DEFAULTS)
    config = ONE.config(base)
    assert (config.cluster.prefill, config.cluster.decode, config.cluster.mixed) == (3, 2, 0)
    assert config.hardware.decode_device == "H20" and config.hardware.decode_devices_per_node == 4
    hardware = build_hardware(config)
    assert hardware.prefill.num_blocks * 256 == pytest.approx(1_000_000, abs=256)
    mixed = MIXED.config(base)
    assert mixed.cluster.mixed == 4 and mixed.hardware.decode_device == ""
    assert mixed.engine.chunk_tokens == 256


def test_mixtures_stages_and_ssd_can_be_simulated() -> None:
    base = parse_config("", {"hardware": {"cost": "roofline"}}, DEFAULTS)
    one = msgspec.structs.replace(
        ONE, mixed=2, ssd_tokens=2_000_000, prefill_stages=2, eviction="lfu"
    )
    config = one.config(base)
    assert (config.cluster.prefill, config.cluster.decode, config.cluster.mixed) == (3, 2, 2)
    hardware = build_hardware(config)
    assert hardware.prefill.ground_truth.num_stages == hardware.mixed.ground_truth.num_stages == 2
    assert hardware.decode.ground_truth.num_stages == 1
    assert hardware.decode.num_slots == 2_000_000 // 256 and config.pool.eviction == "lfu"


def test_what_may_only_lose() -> None:
    change = msgspec.structs.replace
    assert change(ONE, cache_tokens=500_000).may_only_lose(ONE)
    assert not change(ONE, cache_tokens=500_000, ssd_tokens=1).may_only_lose(ONE)
    assert not change(ONE, prefill=2).may_only_lose(ONE)
    assert not change(ONE, cache_tokens=500_000, chunk_tokens=512).may_only_lose(ONE)


def test_steps_and_words() -> None:
    assert stepped(CHUNK_STEPS, 2048, -1) == 1024 and stepped(CHUNK_STEPS, 8192, 1) is None
    assert [tokens(n) for n in (40e6, 1.5e6, 999_600, 750e3, 12)] == [
        "40M",
        "1.5M",
        "1M",
        "750k",
        "12",
    ]
    assert (ONE.counts, ONE.hardware) == ("3P+2D", "8 x A800-SXM / 4 x H20")
    assert (MIXED.counts, MIXED.hardware, MIXED.layout) == ("4M", "8 x A800-SXM", "mixed")
    both = msgspec.structs.replace(ONE, mixed=1, prefill_stages=2)
    assert (both.counts, both.layout) == ("3P+2D+1M", "P/D and mixed")
    assert both.hardware == "2 stages of 8 x A800-SXM / 4 x H20"
    assert (MIXED.roles, both.roles) == ("4 mixed", "3 prefill + 2 decode + 1 mixed")


def test_a_cluster_in_words() -> None:
    change, h20 = msgspec.structs.replace, ONE.decode_kind
    one = change(MIXED, mixed=1)
    split = change(ONE, prefill=1, decode=1, decode_kind=ONE.kind)
    lamina = change(ONE, prefill=1, decode_kind=NodeKind("H100-SXM", 2, "H20", 4))
    only = change(MIXED, mixed=0, decode=3, decode_kind=h20)
    on_one = "1 prefill instance on one node of 8 A800-SXM, and"
    for candidate, words in (
        (one, "1 mixed instance on one node of 8 A800-SXM"),
        (MIXED, "4 mixed instances on 4 nodes of 8 A800-SXM"),
        (split, "1 prefill and 1 decode instances on 2 nodes of 8 A800-SXM"),
        (change(split, decode_kind=h20), f"{on_one} 1 decode instance on one node of 4 H20"),
        (only, "3 decode instances on 3 nodes of 4 H20"),
        (change(one, prefill_stages=2), "1 mixed (2 stages) instance on 2 nodes of 8 A800-SXM"),
    ):
        assert PRICED.words(candidate) == words
    with_attention = "2 nodes of 2 H100-SXM and 4 H20 for attention"
    assert PRICED.words(lamina) == f"{on_one} 2 decode instances on {with_attention}"
    wide = change(PRICED, nodes_per_prefill=2)
    assert wide.words(one) == "1 mixed instance on 2 nodes of 8 A800-SXM"
