"""Tests whole simulations: reproducible by seed, without leaks, with correct figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moonpool.sim.simulation as simulation_module
from moonpool.config.parse import parse_config
from moonpool.config.tables import Admission, Config, Placement, choices
from moonpool.cost.model import prompt_s
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import CONTROL_LATENCY_S, build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys
from moonpool.types import BlockKey

BLOCK = 256


def config(**overrides: dict[str, Any]) -> Config:
    cluster = {"prefill": 2, "decode": 2}
    return parse_config("", {"cluster": cluster, **overrides}, DEFAULTS)


def arrivals(number: int, gap_s: float = 0.5, shared_blocks: int = 8) -> list[Arrival]:
    """Makes prompts of growing length, of which every second one shares its first blocks with the
    others of this kind."""
    shared = tuple(BlockKey(b"shared" + bytes([i])) for i in range(shared_blocks))
    made = []
    for n in range(number):
        tokens = 2000 + 617 * (n % 23)
        own = private_keys(n, tokens, BLOCK)
        keys = (*shared, *own[shared_blocks:])[: tokens // BLOCK] if n % 2 else own
        made.append(Arrival(n * gap_s, tokens, 2 + (37 * n) % 150, keys))
    return made


def run(
    settings: Config, requests: list[Arrival], **options: Any
) -> tuple[Simulation, dict[str, Any]]:
    simulation = Simulation(settings, build_hardware(settings), SimulationSettings(**options))
    simulation.run(requests)
    return simulation, summarise(simulation, 0.0)


def assert_nothing_left(simulation: Simulation) -> None:
    for node in simulation.nodes.values():
        node.instance.validate()
        assert not node.instance.requests and node.instance.pool.owners() == {}
        tier = node.instance.tier
        assert tier is None or tier.slots.owners() == {}
    assert not simulation.conductor.requests
    assert all(link.num_flows == 0 for link in simulation.network.links.values())


def conversations(number: int, turns: int, gap_s: float = 0.4) -> list[Arrival]:
    """Makes conversations that each continue after all the others have had a turn."""
    made = []
    for turn in range(turns):
        for who in range(number):
            tokens = (8 + 4 * turn) * BLOCK + 100
            keys = private_keys(who, tokens, BLOCK)[: tokens // BLOCK]
            made.append(Arrival(len(made) * gap_s, tokens, 20, keys))
    return made


def with_ssd(**pool: Any) -> Config:
    return config(pool={"dram_tokens_per_instance": 60_000, **pool})


@pytest.mark.long
def test_an_ssd_brings_back_what_dram_could_not_keep() -> None:
    requests = conversations(40, 4)
    _, without = run(with_ssd(), requests)
    simulation, found = run(with_ssd(ssd_tokens_per_instance=2_000_000), requests)
    assert_nothing_left(simulation)
    assert without["ssd"]["slots"] == 0 and without["cache"]["loaded_tokens"] == 0
    assert found["cache"]["hit_ratio"] > without["cache"]["hit_ratio"] + 0.08
    assert found["ttft_s"]["mean"] < without["ttft_s"]["mean"]
    assert found["ssd"]["used_prefetched_blocks"] > found["ssd"]["wasted_prefetched_blocks"]
    ssd, block_bytes = found["ssd"], simulation.hardware.layout.block_bytes
    assert found["cache"]["loaded_tokens"] > 0 < ssd["promoted_blocks"]
    assert ssd["written_bytes"] == ssd["demoted_blocks"] * block_bytes
    assert ssd["read_bytes"] == ssd["promoted_blocks"] * block_bytes
    assert 0 < ssd["blocks"] <= ssd["slots"]
    carried = sum(
        link.bytes_carried
        for name, link in simulation.network.links.items()
        if name.endswith("ssd-read")
    )
    assert carried == pytest.approx(ssd["read_bytes"])
    assert found == run(with_ssd(ssd_tokens_per_instance=2_000_000), requests)[1]


def test_an_ssd_is_as_large_in_bytes_as_in_tokens() -> None:
    layout = build_hardware(with_ssd()).layout
    for settings in (
        with_ssd(ssd_tokens_per_instance=100 * BLOCK),
        with_ssd(ssd_bytes_per_instance=101 * layout.block_bytes - 1),
    ):
        hardware = build_hardware(settings)
        assert (hardware.prefill.num_slots, hardware.decode.num_slots) == (100, 100)


def test_the_last_copy_in_dram_is_evicted_last() -> None:
    """One copy in the DRAM of both pools together is enough, because a handover leaves two copies
    of each prompt."""
    requests = conversations(40, 4)
    _, blind = run(
        config(pool={"dram_tokens_per_instance": 60_000}, conductor={"spare_copies_first": False}),
        requests,
    )
    _, found = run(with_ssd(), requests)
    assert found["cache"]["hit_ratio"] > 2 * blind["cache"]["hit_ratio"] > 0
    assert found["ttft_s"]["mean"] < blind["ttft_s"]["mean"]


def test_an_ssd_slower_than_computing_is_not_read() -> None:
    slow = config(
        pool={"dram_tokens_per_instance": 60_000, "ssd_tokens_per_instance": 2_000_000},
        hardware={"ssd_read_bytes_per_s": 1e6},
    )
    _, found = run(slow, conversations(40, 4))
    assert found["ssd"]["written_bytes"] > 0 == found["ssd"]["read_bytes"]


@pytest.mark.parametrize("admission", choices(Admission))
@pytest.mark.parametrize("placement", choices(Placement))
def test_every_request_ends_and_nothing_is_left(placement: str, admission: str) -> None:
    settings = config(
        conductor={"placement": placement, "admission": admission}, slo={"ttft_s": 4.0}
    )
    simulation, figures = run(settings, arrivals(120, gap_s=0.2))
    assert figures["requests"] == 120
    assert figures["completed"] + figures["rejected"] + figures["failed"] == 120
    assert figures["completed"] > 20
    assert (figures["rejected"] == 0) or admission != "none"
    assert_nothing_left(simulation)


def test_an_unloaded_request_takes_what_its_parts_take() -> None:
    settings = config()
    request = Arrival(0.0, 2000, 40, private_keys(0, 2000, BLOCK))
    simulation, figures = run(settings, [request])
    truth = simulation.hardware.prefill.ground_truth
    layout = simulation.hardware.layout
    prefill_s = prompt_s(truth, 2000, 0, settings.engine.chunk_tokens)
    # The first token is sent when the second one can follow, because the decode instance has loaded
    # all KVCache.
    load_s = layout.blocks_for(2000) * layout.block_bytes
    load_s /= simulation.hardware.decode.pcie_bytes_per_s
    hops_s = 3 * CONTROL_LATENCY_S  # a command, the last bytes, and a report
    assert figures["ttft_s"]["mean"] == pytest.approx(prefill_s + load_s + hops_s, abs=1e-5)
    assert figures["prefill_compute_s"]["mean"] == pytest.approx(prefill_s, rel=1e-4)
    assert figures["transfer"]["bytes"] == layout.blocks_for(2000) * layout.block_bytes
    assert figures["tbt_s"]["p50"] == pytest.approx(truth.step_s((), 1, 2000), rel=0.1)
    assert (figures["output_tokens"], figures["cache"]["hit_tokens"]) == (40, 0)


def test_steps_advanced_together_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    together, figures = run(config(), arrivals(60))
    monkeypatch.setattr(simulation_module, "MAX_REPEATS", 1)
    one_by_one, plain = run(config(), arrivals(60))
    assert one_by_one.clock.num_run > 2.5 * together.clock.num_run
    for name in ("completed", "output_tokens", "cache", "rejected"):
        assert figures[name] == plain[name]
    for name in ("ttft_s", "tbt_s", "tbt_top10_mean_s"):
        for part in ("mean", "p50", "p90"):
            assert figures[name][part] == pytest.approx(plain[name][part], rel=0.02), (name, part)
    assert figures["utilisation"] == pytest.approx(plain["utilisation"], rel=0.01)


def test_cached_prefixes_are_found_fetched_and_save_time() -> None:
    with_cache = run(config(), arrivals(80))[1]
    without = run(config(pool={"prefix_caching": False}), arrivals(80))[1]
    assert with_cache["cache"]["hit_tokens"] >= 30 * 8 * BLOCK
    assert without["cache"]["hit_tokens"] == 0
    assert with_cache["prefill_compute_s"]["mean"] < 0.95 * without["prefill_compute_s"]["mean"]


def test_estimates_do_not_change_the_ground_truth() -> None:
    settings = config(conductor={"learning": False, "admission": "none"})
    wrong = build_hardware(settings, prefill_error=3.0)
    simulation = Simulation(settings, wrong)
    simulation.run(arrivals(60))
    figures = summarise(simulation, 0.0)
    right = run(settings, arrivals(60))[1]
    assert figures["predicted_ttft_error_s"]["bias"] > 1.0
    assert abs(right["predicted_ttft_error_s"]["bias"]) < 0.3
    assert figures["prefill_compute_s"] == pytest.approx(right["prefill_compute_s"], rel=0.1)


def test_noise_stays_within_its_bound() -> None:
    quiet = run(config(), arrivals(40, gap_s=5.0))[1]
    noisy = run(config(), arrivals(40, gap_s=5.0), noise=0.3, seed=1)[1]
    other = run(config(), arrivals(40, gap_s=5.0), noise=0.3, seed=2)[1]
    assert noisy["ttft_s"] != quiet["ttft_s"] and noisy["ttft_s"] != other["ttft_s"]
    assert noisy["ttft_s"]["mean"] == pytest.approx(quiet["ttft_s"]["mean"], rel=0.31)


@pytest.mark.long
def test_colocated_instances_serve_too() -> None:
    for batching in ("chunked", "prefill-first"):
        settings = config(
            cluster={"prefill": 0, "decode": 0, "mixed": 3}, engine={"batching": batching}
        )
        simulation, figures = run(settings, arrivals(80))
        assert figures["completed"] == 80 and figures["transfer"]["streams"] == 0
        assert_nothing_left(simulation)


@pytest.mark.long
def test_chunked_batches_stall_decodes_less_than_prefill_first() -> None:
    worst_s = {}
    for batching, chunk_tokens in (("chunked", 512), ("prefill-first", 16384)):
        settings = config(
            cluster={"prefill": 0, "decode": 0, "mixed": 2},
            engine={"batching": batching, "chunk_tokens": chunk_tokens},
        )
        worst_s[batching] = run(settings, arrivals(80, gap_s=1.0))[1]["tbt_s"]["p99"]
    assert worst_s["chunked"] < 0.5 * worst_s["prefill-first"]


def test_a_pipeline_of_stages_shortens_long_prompts() -> None:
    long = [Arrival(0.0, 64_000, 2, private_keys(0, 64_000, BLOCK))]
    ttft_s = {}
    for kind, nodes in (("tp", 1), ("cpp", 4)):
        settings = config(hardware={"parallelism": kind, "nodes_per_prefill": nodes})
        simulation, figures = run(settings, long)
        ttft_s[kind] = figures["ttft_s"]["mean"]
        assert_nothing_left(simulation)
    assert ttft_s["tp"] / 4 < ttft_s["cpp"] < ttft_s["tp"] / 3


SCRIPT = """
import json
from tests.unit.sim.test_simulation import arrivals, config, run
settings = config(conductor={"placement": "random", "admission": "predictive", "seed": 5})
print(json.dumps(run(settings, arrivals(150, gap_s=0.3), noise=0.2, seed=3)[1]))
"""


@pytest.mark.long
def test_the_same_seed_gives_the_same_bytes_under_any_hash_seed() -> None:
    outputs = set()
    for hash_seed in ("0", "1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1
    assert json.loads(outputs.pop())["requests"] == 150


def test_what_is_given_up_at_its_deadline_leaves_nothing_either() -> None:
    settings = config(api={"request_timeout_s": 1.5}, conductor={"admission": "none"})
    simulation, figures = run(settings, arrivals(60, gap_s=0.1))
    assert figures["failed"] > 20
    assert_nothing_left(simulation)
    # A prompt that was begun and then given up must not be remembered for ever.
    assert [node.engine.num_begun for node in simulation.nodes.values()] == [0] * 4


@pytest.mark.long
def test_a_silent_year_costs_next_to_nothing() -> None:
    year_s = 365 * 86_400.0
    first = Arrival(0.0, 2000, 40, private_keys(0, 2000, BLOCK))
    last = Arrival(year_s, 2000, 40, private_keys(1, 2000, BLOCK))
    late = config(api={"request_timeout_s": 0.2})
    for settings, outcome in ((config(), "completed"), (late, "failed")):
        simulation, figures = run(settings, [first, last])
        assert figures[outcome] == 2
        # Deadlines are checked as if there had been no silence: at the next whole second.
        if outcome == "failed":
            assert simulation.last_end_s == year_s + 1.0
        assert simulation.clock.num_run < 20_000


def test_goodput_of_requests_that_come_at_once_counts_until_their_last_answer() -> None:
    together = [Arrival(0.0, 2000, 40, private_keys(n, 2000, BLOCK)) for n in range(3)]
    simulation, figures = run(config(), together)
    assert figures["effective"] == 3
    assert figures["goodput_rps"] == pytest.approx(3 / simulation.last_end_s, rel=1e-5)
