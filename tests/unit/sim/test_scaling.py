"""Tests that autoscale starts and ends simulated instances without losing a request."""

from __future__ import annotations

from typing import Any

import pytest
from test_roles import documents
from test_simulation import assert_nothing_left, run

from moonpool.conductor.actions import DrainRequested, InstancesWanted
from moonpool.config.parse import parse_config
from moonpool.config.tables import Config, ConfigError
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.simulation import Simulation
from moonpool.types import InstanceId


def settings(autoscale: bool = True, num_prefills: int = 1, **conductor: Any) -> Config:
    overrides: dict[str, Any] = {
        "cluster": {"prefill": num_prefills, "decode": 1},
        "conductor": {
            "autoscale": autoscale,
            "role_balance_window_s": 60.0,
            "admission": "none",
            **conductor,
        },
        "slo": {"ttft_s": 10.0},
    }
    return parse_config("", overrides, DEFAULTS)


def test_instances_boot_serve_and_leave() -> None:
    busy, quiet = documents(80, 0.0, 1.0), documents(6, 200.0, 40.0)
    simulation, figures = run(settings(), [*busy, *quiet], boot_s=20.0)
    assert_nothing_left(simulation)
    assert figures["completed"] == 86
    most = max(prefill for _, prefill, _ in simulation.wanted)
    assert most >= 3 and simulation.wanted[-1][1] < most
    scaling = figures["scaling"]
    assert scaling["boots"] >= most - 1 and scaling["drains"] >= 2
    first_s = simulation.wanted[0][0]
    assert first_s < 40.0
    _, fixed = run(settings(False), [*busy, *quiet])
    assert figures["effective"] > fixed["effective"]
    hours = figures["instance_hours"]
    span_s = figures["simulated_s"]
    assert span_s / 3600 < hours["prefill"] < most * span_s / 3600
    assert fixed["instance_hours"] == pytest.approx(
        {"prefill": fixed["simulated_s"] / 3600, "decode": fixed["simulated_s"] / 3600}, rel=0.01
    )


def test_a_longer_boot_serves_fewer_in_time() -> None:
    requests = documents(80, 0.0, 1.0)
    _, soon = run(settings(), requests, boot_s=5.0)
    _, late = run(settings(), requests, boot_s=60.0)
    assert soon["effective"] > late["effective"]


@pytest.mark.parametrize(("returns", "boots"), [(True, 0), (False, 1)])
def test_an_instance_that_restarts_is_not_replaced(returns: bool, boots: int) -> None:
    config = settings(num_prefills=2)
    simulation = Simulation(config, build_hardware(config))
    leaves = DrainRequested(InstanceId("prefill-0"), 60.0, "a test", returns)
    simulation.conductor.handle(leaves, 0.0)
    simulation.scaling.want(InstancesWanted(prefill=2, decode=1))
    assert simulation.scaling.num_boots.total() == boots


def test_an_instance_that_has_restarted_leaves_for_good_when_it_drains() -> None:
    requests = [*documents(3, 0.0, 1.0), *documents(2, 400.0, 1.0)]
    restart, drain = {"prefill-0": 1.0}, {"prefill-0": 200.0}
    simulation, figures = run(
        settings(False, num_prefills=2), requests, restart=restart, drain=drain
    )
    assert figures["drains"]["left"] == 2
    assert set(simulation.conductor.instances) == {"prefill-1", "decode-0"}


def test_it_does_not_go_with_role_switches() -> None:
    with pytest.raises(ConfigError, match="role_balance must be"):
        settings(role_balance="switch")
