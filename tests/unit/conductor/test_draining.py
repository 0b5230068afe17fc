"""Instances that leave: who takes what, what becomes of their requests, and when they are told."""

from __future__ import annotations

from typing import Any

from conductor_desk import Desk, of, sent

from moonpool.conductor.actions import Announce, DrainRequested, InstanceLost, Tick
from moonpool.types import BlockKey, FinishReason, InstanceId, Role, Token
from moonpool.workers.messages import (
    Abort,
    BlocksSnapshot,
    HotPrefix,
    HotPrefixes,
    Leave,
    ListHot,
    PrefillDone,
    ReserveDecode,
    RoleChanged,
    StartPrefill,
    TakenOver,
    TakeOver,
    WantsToLeave,
    WorkId,
)

KEYS, OTHERS = ([BlockKey(bytes([n]) * 16) for n in numbers] for numbers in ((1, 2, 3), (4, 5, 6)))


def holds(desk: Desk, name: str, *keys: BlockKey) -> None:
    desk.report(name, BlocksSnapshot(next_sequence=0, keys=keys))


def drain(desk: Desk, name: str, within_s: float = 60.0) -> list[Any]:
    return desk.handle(DrainRequested(InstanceId(name), within_s, "a test"))


def ticked(desk: Desk, later_s: float = 0.1) -> list[Any]:
    desk.now += later_s
    return desk.handle(Tick())


def hot(desk: Desk, name: str, *prefixes: HotPrefix, number: int = 1) -> list[Any]:
    return desk.report(name, HotPrefixes(number=number, prefixes=prefixes))


def give_room(desk: Desk, num_tokens: int, *names: str) -> None:
    """As if requests had all other tokens of these."""
    fleet = desk.conductor.fleet
    for name in names:
        row = desk.conductor.instances[InstanceId(name)].row
        fleet.capacity_tokens[row] += num_tokens - fleet.room_tokens[row]
        fleet.room_tokens[row] = num_tokens


def test_what_only_it_has_is_taken_by_one_with_room_and_then_it_leaves() -> None:
    desk = Desk("p0", "p1", "p2", "d0")
    holds(desk, "p0", *KEYS, *OTHERS)
    holds(desk, "p1", *OTHERS)
    (asked,) = sent(drain(desk, "p0"), ListHot)
    assert asked[0] == "p0"
    actions = hot(desk, "p0", HotPrefix(tuple(OTHERS), 9), HotPrefix(tuple(KEYS), 3))
    ((taker, command),) = sent(actions, TakeOver)
    assert taker == "p2", "an empty prefill instance"
    assert command.keys == tuple(KEYS) and command.num_uses == 3, "p1 has the others"
    assert command.source.instance_id == "p0"
    assert desk.conductor.fleet.room_tokens[desk.conductor.instances["p2"].row] == 4000 - 12
    assert not sent(ticked(desk), Leave)
    actions = desk.report("p2", TakenOver(number=command.number, num_blocks=3))
    assert sent(actions, ListHot) == [("p0", ListHot(number=2, num_blocks=8189, lost_with_it=True))]
    assert sent(hot(desk, "p0", number=2), Leave) == [("p0", Leave())]
    assert not sent(ticked(desk), Leave), "it was told"
    said = of(desk.handle(InstanceLost(InstanceId("p0"), "it left")), Announce)
    assert "p0 has left; others took 3 of its blocks" in said[0].text
    assert desk.conductor.drains.num_left == 1


def test_it_gets_no_new_requests_and_ends_those_it_has() -> None:
    desk = Desk("p0", "d0", "d1")
    decoder = sent(desk.ask("r"), ReserveDecode)[0][0]
    drain(desk, decoder)
    hot(desk, decoder)
    assert not sent(ticked(desk), Leave)
    assert sent(desk.ask("s"), ReserveDecode)[0][0] != decoder
    desk.report("p0", PrefillDone(work_id=WorkId("r/1"), token=Token(5), finish=FinishReason.STOP))
    assert sent(ticked(desk), ListHot)[0][0] == decoder
    assert sent(hot(desk, decoder, number=2), Leave)


def test_requests_that_last_go_on_elsewhere_after_half_of_the_time() -> None:
    desk = Desk("p0", "d0", "d1", max_attempts=1)
    decoder = sent(desk.ask("r", deadline_s=1000.0), ReserveDecode)[0][0]
    other = "d1" if decoder == "d0" else "d0"
    drain(desk, decoder, within_s=20.0)
    assert not sent(ticked(desk, 9.0), Abort)
    actions = ticked(desk, 1.5)
    assert (decoder, Abort(work_id=WorkId("r/1"))) in sent(actions, Abort)
    assert sent(actions, ReserveDecode)[0][0] == other, "it is nobody's fault: no attempt is lost"
    assert desk.conductor.requests


def test_whoever_has_no_room_is_not_asked_again() -> None:
    desk = Desk("p0", "p1", "p2", "d0")
    drain(desk, "p0")
    actions = hot(desk, "p0", HotPrefix(tuple(KEYS), 1), HotPrefix(tuple(OTHERS), 1))
    asked = []
    while taking := sent(actions, TakeOver):
        assert len({name for name, _ in taking}) == len(taking), "one at a time"
        actions = []
        for name, command in taking:
            asked.append((name, command.keys))
            full = TakenOver(number=command.number, num_blocks=0, full=True)
            actions += desk.report(name, full)
    assert sorted(name for name, _ in asked) == ["d0", "p1", "p2"]
    assert sent(actions, ListHot), "nothing is left to hand over"


def test_what_nobody_has_room_for_waits_until_requests_have_left_some() -> None:
    desk = Desk("p0", "p1", "d0", num_blocks=100)
    drain(desk, "p0", within_s=60.0)
    give_room(desk, 12, "p1", "d0")  # for three blocks
    assert not sent(hot(desk, "p0", HotPrefix(tuple(KEYS), 1)), TakeOver), "none for requests then"
    actions = ticked(desk, 20.0)
    assert not sent(actions, TakeOver) and not sent(actions, Leave)
    give_room(desk, 24, "d0")
    ((taker, command),) = sent(ticked(desk), TakeOver)
    assert (taker, command.timeout_s) == ("d0", 15.0), "its room is not booked until the end"


def test_what_has_found_no_room_by_half_of_the_time_is_let_go() -> None:
    desk = Desk("p0", "p1", "d0", num_blocks=100)
    drain(desk, "p0", within_s=60.0)
    give_room(desk, 12, "p1", "d0")
    actions = hot(desk, "p0", HotPrefix(tuple(KEYS), 2), HotPrefix(tuple(OTHERS[:1]), 1))
    ((_, command),) = sent(actions, TakeOver)
    assert command.keys == tuple(OTHERS[:1]), "what is small need not wait behind it"
    desk.report("p1", TakenOver(number=command.number, num_blocks=1))
    assert not sent(ticked(desk, 29.0), Leave)
    assert sent(ticked(desk, 1.5), ListHot), "once more, and it goes"
    assert sent(hot(desk, "p0", HotPrefix(tuple(KEYS), 2), number=2), Leave)


def test_what_is_larger_than_anybody_may_take_is_let_go_at_once() -> None:
    desk = Desk("p0", "p1", "d0", num_blocks=5)
    drain(desk, "p0", within_s=60.0)
    assert sent(hot(desk, "p0", HotPrefix(tuple(KEYS), 1)), ListHot)


def test_a_taker_that_dies_leaves_nothing_booked() -> None:
    desk = Desk("p0", "p1", "d0")
    drain(desk, "p0")
    ((taker, _),) = sent(hot(desk, "p0", HotPrefix(tuple(KEYS), 1)), TakeOver)
    desk.handle(InstanceLost(InstanceId(taker), "it died"))
    ticked(desk)
    assert not any(state.taking for state in desk.conductor.instances.values())


def test_one_that_says_nothing_leaves_when_its_time_is_up() -> None:
    desk = Desk("p0", "p1", "d0")
    drain(desk, "p0", within_s=10.0)
    assert not sent(ticked(desk, 4.0), Leave)
    assert sent(ticked(desk, 6.5), Leave) == [("p0", Leave())]


def test_the_last_of_a_role_cannot_be_spared_but_may_go_when_its_process_ends() -> None:
    desk = Desk("p0", "d0", "d1")
    drains = desk.conductor.drains
    assert "last instance that prefills" in drains.why_not(InstanceId("p0"))
    assert "no instance 'x'" in drains.why_not(InstanceId("x"))
    assert drains.why_not(InstanceId("d0")) == ""
    assert sent(desk.report("p0", WantsToLeave(within_s=5.0)), ListHot)
    assert not sent(desk.ask("r"), StartPrefill)


def test_a_change_of_roles_gives_way() -> None:
    desk = Desk("p0", "p1", "d0", "d1", role_balance="switch")
    desk.conductor.roles.begin(InstanceId("d0"), Role.PREFILL, "a test", desk.now)
    ticked(desk)  # it is told
    assert sent(drain(desk, "d0"), ListHot)
    desk.report("d0", RoleChanged(role=Role.PREFILL))
    assert not desk.conductor.fleet.prefills[desk.conductor.instances["d0"].row]
    assert sent(hot(desk, "d0"), ListHot)
    assert sent(hot(desk, "d0", number=2), Leave)


def test_a_signal_hurries_a_drain_that_was_asked_for() -> None:
    desk = Desk("p0", "p1", "d0")
    drain(desk, "p0", within_s=600.0)
    desk.report("p0", WantsToLeave(within_s=2.0))
    assert sent(ticked(desk, 2.5), Leave)
