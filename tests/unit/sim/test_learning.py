"""Tests learned cost corrections in whole simulations, and replayed records of a live cluster."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from moonpool.config.parse import parse_config
from moonpool.config.tables import Config, ConfigError
from moonpool.cost.fitted import FittedCost
from moonpool.cost.recorded import CostEstimatorRecord, InstanceRecord
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.hardware.calibrated import CALIBRATED
from moonpool.sim.outcome import summarise
from moonpool.sim.perturbation import Perturbation
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys
from moonpool.types import InstanceId, Role

BLOCK = 256
PROFILE = FittedCost(prefill=(0.01, 1e-4, 0.0, 0.0), decode=(0.02, 0.001, 0.0))
EXACT = CALIBRATED  # as a measured profile, this cost is also the Conductor's estimate


def config(learning: bool = True, **overrides: dict[str, Any]) -> Config:
    cluster = {"prefill": 4, "decode": 2}
    tables = {"cluster": cluster, "conductor": {"learning": learning}, **overrides}
    return parse_config("", tables, DEFAULTS)


def arrivals(number: int, gap_s: float) -> list[Arrival]:
    return [
        Arrival(n * gap_s, 4000 + 617 * (n % 9), 20 + n % 30, private_keys(n, 4000, BLOCK))
        for n in range(number)
    ]


def run(
    settings: Config, requests: list[Arrival], error: float = 1.0, **options: Any
) -> tuple[Simulation, dict[str, Any]]:
    hardware = build_hardware(settings, EXACT, prefill_error=error)
    simulation = Simulation(settings, hardware, SimulationSettings(**options))
    simulation.run(requests)
    return simulation, summarise(simulation, 0.0)


@pytest.mark.long
@pytest.mark.parametrize("error", [0.5, 2.0])
def test_a_wrong_belief_is_mended(error: float) -> None:
    requests = arrivals(400, 0.25)
    figures = run(config(), requests, error)[1]
    stubborn = run(config(learning=False), requests, error)[1]
    assert figures["learned"]["prefill"]["most"] == pytest.approx(1 / error, rel=0.05)
    assert figures["learned"]["prefill"]["least"] == pytest.approx(1 / error, rel=0.05)
    ours = figures["predictions"]["ttft_s"]["mean_absolute"]
    assert ours < 0.6 * stubborn["predictions"]["ttft_s"]["mean_absolute"]


@pytest.mark.long
def test_a_straggler_is_avoided() -> None:
    requests, slow = arrivals(500, 0.28), {"prefill-0": 3.0}
    simulation, figures = run(config(), requests, slow=slow)
    other, stubborn = run(config(learning=False), requests, slow=slow)
    name = InstanceId("prefill-0")
    given = simulation.nodes[name].engine.figures.prefill_tokens
    assert given < 0.8 * other.nodes[name].engine.figures.prefill_tokens
    assert figures["ttft_s"]["p90"] < 0.9 * stubborn["ttft_s"]["p90"]
    # Its first prompt is enough to learn from: the instance gets no more prompts while the others
    # have room.
    assert 1.9 < simulation.conductor.instances[name].prefill_factor.value < 3.1


def test_a_belief_that_is_right_stays() -> None:
    requests = arrivals(400, 0.25)
    figures = run(config(), requests)[1]
    assert figures["learned"]["prefill"]["changed"] == figures["learned"]["decode"]["changed"] == 0
    assert figures["ttft_s"] == run(config(learning=False), requests)[1]["ttft_s"]


def test_a_decode_instances_own_check_learns_too() -> None:
    """The slow instance must refuse a request that was placed before its speed was known."""
    found = {}
    for learning in (True, False):
        settings = config(
            cluster={"prefill": 4, "decode": 1},
            conductor={"admission": "baseline", "decode_wait": False, "learning": learning},
            slo={"ttft_s": 30.0, "tbt_s": 0.05},
        )
        found[learning] = run(settings, arrivals(300, 0.2), slow={"decode-0": 1.8})[1]
    late = [found[learning]["rejected_by_reason"].get("tbt_slo_late", 0) for learning in found]
    assert late[0] > late[1]
    assert found[True]["tbt_s"]["p90"] < 0.97 * found[False]["tbt_s"]["p90"]


def test_a_name_that_is_not_there_cannot_be_slow() -> None:
    with pytest.raises(ConfigError, match="prefill-9"):
        run(config(), [], slow={"prefill-9": 2.0})


def recorded(**ratios: tuple[float, ...]) -> CostEstimatorRecord:
    return CostEstimatorRecord(
        (
            InstanceRecord(InstanceId("a"), Role.PREFILL, PROFILE, **ratios),
            InstanceRecord(InstanceId("b"), Role.DECODE, PROFILE, **ratios),
        )
    )


def test_a_recorded_cluster_is_as_wrong_as_it_was() -> None:
    record = recorded(prefill=(1.9, 2.0, 2.1), decode=(1.5,))
    requests = arrivals(300, 1.0)
    simulation, figures = run(config(), requests, recorded=record)
    for state in simulation.conductor.instances.values():
        assert state.info.cost == PROFILE
    assert figures["learned"]["prefill"]["least"] == pytest.approx(2.0, rel=0.06)
    assert figures["learned"]["decode"]["most"] == pytest.approx(1.5, rel=0.02)
    alone = run(config(), arrivals(1, 1.0), recorded=recorded(prefill=(2.0,)))[1]
    assert alone["prefill_compute_s"]["mean"] == pytest.approx(2 * PROFILE.prefill_s(4000, 0))


def test_records_are_used_again_for_more_instances() -> None:
    slow = InstanceRecord(InstanceId("c"), Role.PREFILL, PROFILE, prefill=(3.0,))
    record = CostEstimatorRecord((*recorded(prefill=(1.0,)).instances, slow))
    wrongness, rng = Perturbation(recorded=record), Random(0)
    factors = [
        wrongness.step_factor(InstanceId("x"), Role.PREFILL, number, rng)(True, False)
        for number in range(4)
    ]
    assert factors == [1.0, 3.0, 1.0, 3.0]
    # If the record has no instance of this role, the instances of any role count.
    assert wrongness.step_factor(InstanceId("m"), Role.MIXED, 2, rng)(True, False) == 3.0
