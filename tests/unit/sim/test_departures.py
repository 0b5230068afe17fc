"""Tests drains and restarts of simulated instances."""

from __future__ import annotations

import pytest
from test_simulation import BLOCK, assert_nothing_left, config

from moonpool.config.tables import ConfigError
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival
from moonpool.trace.blocks import private_keys
from moonpool.types import InstanceId

CLUSTER = {"prefill": 4, "decode": 2}
RESTART_S = 100.0


def sessions(number: int, turns: int, gap_s: float) -> list[Arrival]:
    """Makes conversations that share their first blocks. Each continues after all the others have
    had a turn."""
    shared = private_keys(9999, 20 * BLOCK, BLOCK)
    made = []
    for turn in range(turns):
        for who in range(number):
            tokens = (28 + 4 * turn) * BLOCK + 100
            keys = (*shared, *private_keys(who, tokens, BLOCK)[20 : tokens // BLOCK])
            made.append(Arrival(len(made) * gap_s, tokens, 20, keys))
    return made


def simulate(
    requests: list[Arrival], **departures: dict[str, float]
) -> tuple[Simulation, list[tuple[float, str]]]:
    """Runs a simulation, and also records which prefill instance was chosen when."""
    settings = config(cluster=CLUSTER)
    simulation = Simulation(
        settings,
        build_hardware(settings),
        SimulationSettings(**departures),  # type: ignore[arg-type]
    )
    placed: list[tuple[float, str]] = []
    note_ended = simulation.collector.note_ended

    def note(record, slo_class=""):  # type: ignore[no-untyped-def]
        placed.append((record.arrived_s, record.prefill_instance))
        note_ended(record, slo_class)

    simulation.collector.note_ended = note  # type: ignore[method-assign]
    simulation.run(requests)
    assert_nothing_left(simulation)
    return simulation, placed


@pytest.mark.long
def test_a_new_empty_instance_attracts_its_share_and_no_more() -> None:
    requests = sessions(500, 8, 0.05)  # more requests than all instances can serve
    simulation, placed = simulate(requests, restart={"prefill-1": RESTART_S})
    assert simulation.conductor.drains.num_left == 1
    left_s = next(at_s for at_s, text in simulation.announced if "has left" in text)
    assert RESTART_S <= left_s <= RESTART_S + 61
    during = [name for at_s, name in placed if RESTART_S + 1 < at_s < left_s - 1]
    assert "prefill-1" not in during

    def share(from_s: float, to_s: float) -> float:
        names = [n for at_s, n in placed if n and left_s + from_s < at_s < left_s + to_s]
        return names.count("prefill-1") / len(names)

    assert share(0.0, 20.0) <= 0.5, "until its queue is as long as theirs"
    assert 0.15 < share(20.0, 60.0) < 0.35
    assert [n.info.incarnation for name, n in simulation.nodes.items() if name == "prefill-1"] == [
        2
    ]
    figures = summarise(simulation, 0.0)
    assert figures["requests"] == len(requests) and figures["drains"]["left"] == 1


@pytest.mark.long
def test_what_it_had_is_not_lost_with_it() -> None:
    requests = sessions(60, 8, 0.5)
    stays, _ = simulate(requests)
    leaves, placed = simulate(requests, drain={"prefill-1": RESTART_S})
    before = summarise(stays, 0.0)["cache"]["hit_ratio"]
    after = summarise(leaves, 0.0)["cache"]["hit_ratio"]
    assert after > 0.95 * before
    assert all(name != "prefill-1" for at_s, name in placed if at_s > RESTART_S + 60)


def test_an_unknown_instance_cannot_drain() -> None:
    settings = config(cluster=CLUSTER)
    with pytest.raises(ConfigError, match="there is no instance 'prefill-9'"):
        Simulation(settings, build_hardware(settings), SimulationSettings(drain={"prefill-9": 1.0}))


def test_the_last_of_its_role_stays() -> None:
    settings = config(cluster={"prefill": 1, "decode": 2})
    simulation = Simulation(
        settings, build_hardware(settings), SimulationSettings(drain={"prefill-0": 1.0})
    )
    simulation.run(sessions(5, 2, 0.5))
    assert [text for _, text in simulation.announced if "is the last instance" in text]
    assert simulation.collector.num_completed == 10


@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_the_last_of_its_role_restarts_and_requests_wait_for_it(name: str) -> None:
    settings = config(cluster={"prefill": 1, "decode": 1})
    simulation = Simulation(
        settings, build_hardware(settings), SimulationSettings(restart={name: 1.0})
    )
    simulation.run(sessions(5, 2, 0.5))
    assert_nothing_left(simulation)
    assert simulation.conductor.drains.num_left == 1
    assert simulation.nodes[InstanceId(name)].info.incarnation == 2
    assert simulation.collector.num_completed == 10


def test_a_drained_instance_does_not_return_for_a_restart_planned_for_later() -> None:
    settings = config(cluster=CLUSTER)
    planned = SimulationSettings(drain={"prefill-1": 1.0}, restart={"prefill-1": 500.0})
    simulation = Simulation(settings, build_hardware(settings), planned)
    simulation.run([*sessions(5, 2, 0.5), Arrival(600.0, 100, 5, ())])
    assert "prefill-1" not in simulation.conductor.instances
    assert "there is no instance 'prefill-1'" in simulation.announced[-1][1]
