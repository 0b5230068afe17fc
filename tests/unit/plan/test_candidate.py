"""Candidates: what they cost, what is next to them, and the configuration they stand for."""

from __future__ import annotations

import msgspec
import pytest

from moonpool.config import parse_config
from moonpool.plan.candidate import (
    CACHE_STEPS,
    CHUNK_STEPS,
    Candidate,
    NodeKind,
    Priced,
    neighbours,
    stepped,
    tokens,
)
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.hardware.prices import parse_prices

A800, H20 = NodeKind("A800-SXM", 8), NodeKind("H20", 4)
ONE = Candidate(A800, H20, 3, 2, 0, 1_000_000, 2048)
MIXED = Candidate(A800, A800, 0, 0, 4, 1_000_000, 256)


def test_the_price_is_of_nodes_and_of_dram() -> None:
    prices = parse_prices("devices = { A800-SXM = 2.0, H20 = 3.0 }\n[dram]\nusd_per_gb_h = 0.001")
    priced = Priced(prices, 500_000.0)
    assert priced.usd_per_h(ONE) == pytest.approx(3 * 16 + 2 * 12 + 5 * 500 * 0.001)
    assert priced.usd_per_h(MIXED) == pytest.approx(4 * 16 + 4 * 500 * 0.001)
    groups = Priced(prices, 500_000.0, nodes_per_prefill=2)
    assert groups.usd_per_h(ONE) == pytest.approx(6 * 16 + 2 * 12 + 8 * 500 * 0.001)


def test_neighbours_are_one_step_away() -> None:
    found = {n.change: n.candidate for n in neighbours(ONE, 1)}
    assert found["one prefill instance fewer"].prefill == 2
    assert found["one decode instance more"].decode == 3
    assert found["750k cached tokens an instance"].cache_tokens == 750_000
    assert found["1.5M cached tokens an instance"].cache_tokens == 1_500_000
    assert found["chunks of 1024 tokens"].chunk_tokens == 1024
    assert found["admission predictive"].admission == "predictive"
    assert len(found) == 4 + 2 + 2 + 3
    for other in found.values():
        changed = [
            name
            for name in Candidate.__struct_fields__
            if getattr(other, name) != getattr(ONE, name)
        ]
        assert len(changed) == 1


def test_no_neighbour_is_impossible() -> None:
    single = msgspec.structs.replace(
        ONE, prefill=1, decode=1, cache_tokens=CACHE_STEPS[0], chunk_tokens=CHUNK_STEPS[-1]
    )
    found = [n.candidate for n in neighbours(single, 200_000)]
    assert all(one.prefill and one.decode for one in found)
    assert all(
        one.cache_tokens == single.cache_tokens or one.cache_tokens > 200_000 for one in found
    )
    assert {one.mixed for one in (n.candidate for n in neighbours(MIXED, 1))} == {3, 4, 5}


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


def test_what_may_only_lose() -> None:
    change = msgspec.structs.replace
    assert change(ONE, prefill=2).may_only_lose(ONE)
    assert change(ONE, prefill=2, cache_tokens=500_000).may_only_lose(ONE)
    assert not change(ONE, prefill=2, decode=3).may_only_lose(ONE)
    assert not change(ONE, prefill=2, chunk_tokens=512).may_only_lose(ONE)
    assert not ONE.may_only_lose(change(ONE, prefill=2))


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
    assert (MIXED.counts, MIXED.hardware) == ("4M", "8 x A800-SXM")
