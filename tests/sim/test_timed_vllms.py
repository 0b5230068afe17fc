"""Measures in virtual time how many requests meet both SLOs if each server fills its steps with
prompts. `moonpool bench routers` measures the same on live servers."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.suite.conversations.player import program_figures
from moonpool.config.tables import ConductorConfig
from tests.sim.timed_vllms import CASES, ServerTimes, TimedVllms, played

CAPACITY_RPS, SLO = CASES["conversations"]
SECONDS = 10.0


@cache
def conversations(load: float, admission: str, waits: bool = True) -> TimedVllms:
    config = ConductorConfig(admission=admission, decode_wait=waits)
    return played("conversations", load, SECONDS, config)


@pytest.mark.long
@pytest.mark.parametrize("admission", ["goodput", "baseline", "none"])
def test_below_the_capacity_all_are_served_in_time(admission: str) -> None:
    fleet = conversations(0.8, admission)
    assert not fleet.refused
    assert fleet.num_effective >= 0.95 * len(fleet.records)


@pytest.mark.long
@pytest.mark.parametrize("load", [1.5, 2.5])
def test_in_overload_the_servers_are_as_good_as_at_their_capacity(load: float) -> None:
    fleet = conversations(load, "goodput")
    assert fleet.num_effective >= 0.85 * CAPACITY_RPS * SECONDS
    num_served = len(fleet.records) - len(fleet.refused)
    assert fleet.num_effective >= 0.85 * num_served, "most who are admitted are served in time"


@pytest.mark.long
def test_without_the_wait_admission_alone_keeps_most_of_it() -> None:
    fleet = conversations(1.5, "goodput", waits=False)
    assert fleet.num_effective >= 0.75 * CAPACITY_RPS * SECONDS
    assert fleet.num_effective < conversations(1.5, "goodput").num_effective


@pytest.mark.long
def test_without_admission_control_nobody_is_refused() -> None:
    fleet = conversations(1.5, "none")
    assert not fleet.refused
    assert all(record.outcome == "length" for record in fleet.records)
    # The wait for a batch ends when the first token is in danger of being late.
    assert fleet.longest_wait_s <= SLO.ttft_s


@pytest.mark.long
def test_a_program_that_has_begun_gets_through_in_overload() -> None:
    fleet = played("agents", 2.5, SECONDS)
    found = program_figures(fleet.calls)
    assert found["finished"] == found["begun"] > 50
    later = [turn for turn in fleet.calls if turn.call is not None and turn.call.step]
    assert later and not any(turn.num_refused for turn in later)


def test_before_anything_is_learned_a_request_waits_and_is_not_refused_for_its_gaps() -> None:
    """A chunk of a prompt takes 82 % of the TBT SLO, and the steps vary."""
    times = ServerTimes(tbt_s=0.047, jitter=0.05)
    fleet = played("conversations", 0.8, SECONDS, times=times, before=0.0)
    assert "decode_load_predicted" not in fleet.refused
    assert fleet.num_effective >= 0.8 * len(fleet.records)


def test_the_router_of_programs_loses_no_call() -> None:
    fleet = played("agents", 2.5, SECONDS, times=ServerTimes(router="programs"))
    found = program_figures(fleet.calls)
    assert found["finished"] == found["begun"] > 50
