"""Tests that when the last instance of a role is told to end, the Conductor replaces it, or reports
that the role is missing."""

from __future__ import annotations

import pytest
from conductor_desk import Desk, of

from moonpool.conductor.actions import (
    Announce,
    ConductorAction,
    InstanceLost,
    InstancesLaunched,
    Refuse,
    Relaunch,
)
from moonpool.protocol.messages import LeaveRequested
from moonpool.types import InstanceId


def told_to_end(desk: Desk, name: str) -> list[ConductorAction]:
    return desk.report(name, LeaveRequested(within_s=5.0))


def launched(*names: str) -> Desk:
    desk = Desk(*names)
    desk.handle(InstancesLaunched(tuple(map(InstanceId, names))))
    return desk


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_the_last_one_of_its_role_is_replaced_and_requests_wait_for_it(name: str) -> None:
    desk = launched("p0", "d0")
    actions = told_to_end(desk, name)
    assert [one.instance_id for one in of(actions, Relaunch)] == [name]
    (said,) = [one for one in of(actions, Announce) if one.is_warning]
    assert f"{name} was told to end, and is the last instance that" in said.text
    assert not of(told_to_end(desk, name), Relaunch), "once"
    desk.handle(InstanceLost(InstanceId(name), "it left"))
    assert not of(desk.ask("r"), Refuse)
    role = "prefill" if name == "p0" else "decode"
    assert desk.conductor.lack == f"no {role} instance is up: {name} should be back soon"
    desk.join(name, incarnation=2)
    assert (desk.conductor.lack, desk.conductor.num_waiting) == ("", 0)


def test_one_of_several_leaves_for_good() -> None:
    desk = launched("p0", "d0", "d1")
    actions = told_to_end(desk, "d1")
    assert not of(actions, Relaunch)
    assert not any(one.is_warning for one in of(actions, Announce))
    assert of(told_to_end(desk, "d0"), Relaunch), "now it is the last one"


def test_a_mixed_instance_does_the_work_of_both_roles() -> None:
    desk = launched("p0", "d0", "m0")
    assert not of(told_to_end(desk, "d0"), Relaunch)
    assert of(told_to_end(desk, "m0"), Relaunch)


def test_one_that_somebody_else_started_leaves_and_its_lack_is_told() -> None:
    desk = Desk("p0", "d0")
    actions = told_to_end(desk, "d0")
    assert not of(actions, Relaunch)
    (said,) = [one for one in of(actions, Announce) if one.is_warning]
    assert "start one: moonpool worker --role decode --head HOST:PORT" in said.text
    desk.handle(InstanceLost(InstanceId("d0"), "it left"))
    (refuse,) = of(desk.ask("r"), Refuse)
    assert refuse.refusal.reason == "no_decode_instance"
    assert desk.conductor.lack.startswith("no decode instance is up: start one: moonpool worker")
