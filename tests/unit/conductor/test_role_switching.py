"""Tests role switches: an instance computes its prompts before it switches, and ends its answers
after the switch. A switch may be given up, and reservations stay right."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.conductor.actions import Announce, InstanceLost, Tick
from moonpool.protocol.messages import (
    AttemptId,
    PrefillDone,
    ReserveDecode,
    RoleChanged,
    StartPrefill,
    SwitchRole,
)
from moonpool.types import FinishReason, InstanceId, Role, Token
from tests.unit.conductor.conductor_desk import Desk, of, sent


def desk(*names: str, **config: Any) -> Desk:
    return Desk(*names, role_balance="switch", **config)


def drain(desk: Desk, name: str, role: Role) -> None:
    desk.conductor.roles.begin(InstanceId(name), role, "a test", desk.now)
    desk.conductor.validate()


def ticked(desk: Desk, later_s: float = 0.1) -> list[Any]:
    desk.now += later_s
    return desk.handle(Tick())


def test_an_idle_instance_switches_at_once_and_serves_after_its_report() -> None:
    d = desk("p0", "p1", "d0")
    drain(d, "p1", Role.DECODE)
    assert sent(ticked(d), SwitchRole) == [("p1", SwitchRole(role=Role.DECODE))]
    assert not sent(ticked(d), SwitchRole)
    assert (d.conductor.instance_table.num_prefills, d.conductor.instance_table.num_decodes) == (
        1,
        1,
    )
    said = of(d.report("p1", RoleChanged(role=Role.DECODE)), Announce)
    assert "p1 is a decode instance" in said[0].text
    assert (d.conductor.instance_table.num_prefills, d.conductor.instance_table.num_decodes) == (
        1,
        2,
    )
    assert d.conductor.roles.num_switches[Role.DECODE] == 1
    names = {sent(d.ask(f"r{i}"), ReserveDecode)[0][0] for i in range(2)}
    assert names == {"d0", "p1"}


def test_prompts_end_before_the_switch_and_none_is_added() -> None:
    d = desk("p0", "p1", "d0")
    (to_p,) = sent(d.ask("r"), StartPrefill)
    prefiller = to_p[0]
    other = "p1" if prefiller == "p0" else "p0"
    drain(d, prefiller, Role.DECODE)
    assert not sent(ticked(d), SwitchRole)
    assert sent(d.ask("s"), StartPrefill)[0][0] == other
    d.report(
        prefiller,
        PrefillDone(attempt_id=AttemptId("r/1"), token=Token(5), finish=FinishReason.STOP),
    )
    assert sent(ticked(d), SwitchRole)[0][0] == prefiller


def answering_prefill_instance() -> Desk:
    """Makes d0 a prefill instance while it still has the answer of "r"."""
    d = desk("p0", "d0", "d1", num_blocks=2000, chunk_tokens=256)
    assert sent(d.ask("r", max_tokens=100), ReserveDecode)[0][0] == "d0"
    d.prefilled()
    d.decoding()
    drain(d, "d0", Role.PREFILL)
    assert sent(ticked(d), SwitchRole) == [("d0", SwitchRole(role=Role.PREFILL))]
    d.report("d0", RoleChanged(role=Role.PREFILL))
    d.conductor.validate()
    return d


def test_an_instance_takes_prompts_while_its_answers_end() -> None:
    d = answering_prefill_instance()
    table = d.conductor.instance_table
    assert (table.num_prefills, table.num_decodes) == (2, 1)
    assert sent(d.ask("s"), ReserveDecode)[0][0] == "d1", "no answer is added"
    assert sent(d.ask("t"), StartPrefill)[0][0] == "d0", "p0 computes the prompt of s"
    d.tokens("d0", 1, finish=FinishReason.STOP)
    assert not d.conductor.instances[InstanceId("d0")].decodes


def test_prompts_beside_answers_are_expected_to_take_longer() -> None:
    d = answering_prefill_instance()
    table = d.conductor.instance_table
    rows = [d.conductor.instances[InstanceId(name)].row for name in ("p0", "d0")]
    alone_s, beside_s = table.prefill_s(100, 0.0)[rows]
    assert beside_s > 1.005 * alone_s
    d.tokens("d0", 1, finish=FinishReason.STOP)
    alone_s, beside_s = table.prefill_s(100, 0.0)[rows]
    assert beside_s == alone_s


def test_answers_that_remain_are_no_load_of_the_other_decode_instances() -> None:
    d = answering_prefill_instance()
    table = d.conductor.instance_table
    tokens = float(table.total_decoding_context)
    assert table.total_decoding == 1 and tokens
    assert table.without_remainders(3.0, 500.0 + tokens) == (2.0, 500.0)


def test_an_instance_may_switch_back_before_its_answers_have_ended() -> None:
    d = answering_prefill_instance()
    drain(d, "d0", Role.DECODE)
    assert sent(ticked(d), SwitchRole) == [("d0", SwitchRole(role=Role.DECODE))]
    d.report("d0", RoleChanged(role=Role.DECODE))
    d.conductor.validate()
    table = d.conductor.instance_table
    assert table.num_decodes == 2
    assert table.without_remainders(1.0, 50.0) == (1.0, 50.0)


def test_a_prefill_instance_need_not_wait_for_the_answers_it_handed_over() -> None:
    d = desk("p0", "p1", "d0")
    (prefill,) = sent(d.ask("r"), StartPrefill)
    assert prefill[0] == "p0"
    drain(d, "p0", Role.DECODE)
    d.prefilled()
    # no switch yet, because the KVCache may still be in transfer
    assert not sent(ticked(d), SwitchRole)
    d.decoding()
    assert sent(ticked(d), SwitchRole)[0][0] == "p0"
    d.report("p0", RoleChanged(role=Role.DECODE))
    d.tokens("d0", 1, finish=FinishReason.STOP)
    d.assert_nothing_is_booked()


def test_prompts_that_last_too_long_end_the_drain() -> None:
    d = desk("p0", "p1", "d0")
    prefiller = sent(d.ask("r", deadline_s=10_000.0), StartPrefill)[0][0]
    drain(d, prefiller, Role.DECODE)
    said = of(ticked(d, later_s=301.0), Announce)
    assert f"{prefiller} stays a prefill instance: its prompts last too long" in said[0].text
    assert d.conductor.instance_table.num_prefills == 2
    assert d.conductor.roles.num_given_up == 1


def test_the_last_of_a_role_returns_to_service() -> None:
    d = desk("p0", "p1", "d0")
    d.ask("r")
    drain(d, "p0", Role.DECODE)
    d.handle(InstanceLost(InstanceId("p1"), "it died"))
    assert d.conductor.instance_table.num_prefills == 1
    assert sent(d.ask("s"), StartPrefill)[0][0] == "p0"


def test_an_instance_lost_while_it_drains_rejoins_with_its_reported_role() -> None:
    d = desk("p0", "p1", "d0")
    drain(d, "p1", Role.DECODE)
    ticked(d)
    d.handle(InstanceLost(InstanceId("p1"), "it died"))
    assert d.conductor.roles.num_given_up == 1
    d.join("p1", incarnation=2)
    assert (d.conductor.instance_table.num_prefills, d.conductor.instance_table.num_decodes) == (
        2,
        1,
    )


@pytest.mark.long
def test_rejected_requests_count_and_instances_switch_one_after_another() -> None:
    d = desk("p0", "p1", "p2", "d0", role_balance_window_s=10.0)
    said: list[str] = []
    for number in range(1200):
        d.now += 0.05
        d.ask(f"r{number}", max_tokens=2000, ttft_s=0.001)  # refused requests count as wanted, too
        actions = ticked(d, 0.0)
        for name, _ in sent(actions, SwitchRole):
            actions += d.report(name, RoleChanged(role=Role.DECODE))
        said += [action.text for action in of(actions, Announce)]
    switched = [text for text in said if " is a decode instance" in text]
    assert len(switched) == 2
    assert (d.conductor.instance_table.num_prefills, d.conductor.instance_table.num_decodes) == (
        1,
        3,
    )


@pytest.mark.long
def test_advice_switches_nothing_and_is_reported_once() -> None:
    d = Desk("p0", "p1", "p2", "d0", role_balance="advise", role_balance_window_s=10.0)
    said: list[str] = []
    for number in range(600):
        d.now += 0.05
        d.ask(f"r{number}", max_tokens=2000, ttft_s=0.001)
        said += [action.text for action in of(ticked(d, 0.0), Announce)]
    assert len(said) == 1
    assert "decode instances are short: 3P+1D" in said[0]
    assert d.conductor.instance_table.num_decodes == 1
    advice = d.conductor.roles.report(d.now).advice
    assert advice is not None and advice.num_switches == 2
