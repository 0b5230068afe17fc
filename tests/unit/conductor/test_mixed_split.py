"""Tests that mixed instances get separate roles if no chunk fits beside their decodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moonpool.conductor.actions import Announce, DrainRequested, InstanceLost, Tick
from moonpool.cost.fitted import FittedCost
from moonpool.protocol.messages import (
    AttemptId,
    DecodeAccepted,
    ReserveDecode,
    RoleChanged,
    StartPrefill,
    SwitchRole,
)
from moonpool.types import FinishReason, InstanceId, Role, Slo
from tests.unit.conductor.conductor_desk import Desk, of, sent

TIGHT = Slo(ttft_s=30.0, tbt_s=0.03)
TILED = FittedCost(prefill=(0.0, 0.001, 0.0, 0.0), decode=(0.01, 0.001, 0.0), tile_tokens=32)
"""A cost: a decode takes 11 ms, and a tile with a chunk of 31 tokens beside it 32 ms."""


def desk(*names: str, tbt_s: float = TIGHT.tbt_s, cost: FittedCost = TILED, **config: Any) -> Desk:
    slo = Slo(ttft_s=30.0, tbt_s=tbt_s)
    config |= {"default_slo": slo, "admission": "none", "cost": cost}
    return Desk(*names, chunk_tokens=256, **config)


def roles(d: Desk) -> str:
    """Returns the first letters of the roles that the Conductor uses."""
    return "".join(state.role.value[0] for state in d.conductor.instances.values())


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("m0",), "m"),
        (("m0", "m1"), "pd"),
        (("m0", "m1", "m2"), "pdp"),
        (("p0", "d0", "m0", "m1"), "pdpd"),
        (("p0", "p1", "d0", "m0", "m1"), "ppddp"),
    ],
)
def test_mixed_instances_join_the_smaller_pool(names: tuple[str, ...], expected: str) -> None:
    assert roles(desk(*names)) == expected


@pytest.mark.parametrize(
    ("tbt_s", "expected"),
    [
        (0.012, "mm"),  # stays mixed, because decodes alone break the SLO, so a split gains nothing
        (0.037, "pd"),
        (0.040, "mm"),  # stays mixed, because 32 ms are less than 0.85 of the SLO
        (float("inf"), "mm"),
    ],
)
def test_the_slo_decides(tbt_s: float, expected: str) -> None:
    assert roles(desk("m0", "m1", tbt_s=tbt_s)) == expected


def test_without_tiles_a_small_chunk_fits() -> None:
    cost = FittedCost(prefill=(0.0, 0.001, 0.0, 0.0), decode=(0.01, 0.001, 0.0))
    assert roles(desk("m0", "m1", tbt_s=0.037, cost=cost)) == "mm"


def test_instances_that_do_not_size_chunks_stay_mixed() -> None:
    assert roles(desk("m0", "m1", inline_chunks=False)) == "mm"


def test_load_does_not_change_it() -> None:
    """With 100 answers under way no chunk fits, and without them a chunk does."""
    d = desk("m0", "m1", tbt_s=0.1, num_blocks=20_000)
    for number in range(200):
        d.ask(f"r{number}", max_tokens=100)
        d.handle(Tick())
    table = d.conductor.instance_table
    assert not table.chunk_fits(np.arange(2)).any()
    assert roles(d) == "mm"


def test_a_request_decodes_beside_no_prompt() -> None:
    d = desk("m0", "m1")
    actions = d.ask()
    assert [name for name, _ in sent(actions, StartPrefill)] == ["m0"]
    assert [name for name, _ in sent(actions, ReserveDecode)] == ["m1"]


def test_the_survivor_of_two_takes_both_roles() -> None:
    d = desk("m0", "m1")
    said = of(d.handle(InstanceLost(InstanceId("m1"), "killed")), Announce)
    assert roles(d) == "m"
    assert "both roles again" in said[0].text
    assert not sent(d.ask(), ReserveDecode)
    said = of(d.join("m1"), Announce)
    assert roles(d) == "pd"
    assert "mixed instances have one role each" in said[0].text


def test_a_pool_is_filled_after_a_loss() -> None:
    d = desk("m0", "m1", "m2")
    d.handle(InstanceLost(InstanceId("m1"), "killed"))
    assert sorted(roles(d)) == ["d", "p"]


def test_a_pool_is_filled_after_a_departure() -> None:
    d = desk("m0", "m1", "m2")
    d.handle(DrainRequested(InstanceId("m1"), 10.0, "a test"))
    serving = [state.role for state in d.conductor.instances.values() if state.drain is None]
    assert sorted(serving) == [Role.DECODE, Role.PREFILL]


@pytest.mark.long
def test_mixed_instances_follow_the_demand_without_a_command() -> None:
    """The prompts are long and the answers short, so that one decode instance is enough.
    `role_balance` is off."""
    d = desk("m0", "m1", "m2", "m3", num_blocks=4000)
    assert roles(d) == "pdpd"
    commands: list[Any] = []
    for number in range(600):
        d.now += 0.1
        if number % 10 == 0:
            d.ask(f"r{number}", token_ids=tuple(range(2000)), max_tokens=2)
        commands += sent(d.handle(Tick()), SwitchRole)
    assert sorted(roles(d)) == ["d", "p", "p", "p"]
    report = d.conductor.roles.report(d.now)
    assert (report.mode, report.num_switches) == ("switch", {Role.PREFILL: 1})
    assert not commands


def test_a_switch_of_one_of_two_ends() -> None:
    """While one instance drains, a single mixed instance is in service."""
    d = desk("p0", "d0", "m0", "m1")
    d.conductor.roles.begin(InstanceId("m0"), Role.DECODE, "a test", d.now)
    assert not of(d.handle(Tick()), SwitchRole)
    assert roles(d) == "pddd"
    assert all(state.drain is None for state in d.conductor.instances.values())


def test_a_switch_ends_though_the_others_are_lost() -> None:
    d = desk("p0", "d0", "m0", "m1")
    d.conductor.roles.begin(InstanceId("m0"), Role.DECODE, "a test", d.now)
    d.handle(InstanceLost(InstanceId("m1"), "killed"))
    for _ in range(2):
        d.handle(Tick())
    assert roles(d) == "pdm"
    assert all(state.drain is None for state in d.conductor.instances.values())


@pytest.mark.long
def test_instances_with_one_role_do_not_switch() -> None:
    d = desk("p0", "d0", "d1", "m0", "m1", num_blocks=4000)
    for number in range(600):
        d.now += 0.1
        if number % 10 == 0:
            d.ask(f"r{number}", token_ids=tuple(range(2000)), max_tokens=2)
        d.handle(Tick())
    assert roles(d)[:3] == "pdd"
    assert roles(d)[3:] == "pp"


@pytest.mark.parametrize(("fixed_s", "expected"), [(0.02, "mm"), (0.022, "pd")])
def test_a_large_fixed_time_splits(fixed_s: float, expected: str) -> None:
    """The fixed times are around a quarter of a step that may take 85 ms."""
    cost = FittedCost(prefill=(fixed_s, 0.0001, 0.0, 0.0), decode=(0.01, 0.0, 0.0))
    assert roles(desk("m0", "m1", tbt_s=0.1, cost=cost)) == expected


def test_last_answers_keep_their_slo_beside_no_prompt() -> None:
    """d1 becomes a prefill instance; while d1 has an answer, prompts go to other instances."""
    d = desk("p0", "d0", "d1", role_balance="switch")
    (first,) = sent(d.ask(max_tokens=100), ReserveDecode)
    answering = InstanceId(first[0])
    d.prefilled()
    d.report(answering, DecodeAccepted(attempt_id=AttemptId("r/1")))
    d.conductor.roles.begin(answering, Role.PREFILL, "a test", d.now)
    d.handle(Tick())
    d.report(answering, RoleChanged(role=Role.PREFILL))
    names = {sent(d.ask(f"s{n}"), StartPrefill)[0][0] for n in range(4)}
    assert names == {"p0"}
    d.tokens(answering, 1, finish=FinishReason.STOP)
    names = {sent(d.ask(f"t{n}"), StartPrefill)[0][0] for n in range(4)}
    assert answering in names
