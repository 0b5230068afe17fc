"""Tests departures: hand-over of blocks, moved requests, and the time of the command to leave."""

from __future__ import annotations

from typing import Any

from conductor_desk import Desk, of, sent

from moonpool.conductor.actions import Announce, DrainRequested, InstanceLost, Refuse, Tick
from moonpool.protocol.messages import (
    Abort,
    AttemptId,
    BlocksSnapshot,
    HotPrefix,
    HotPrefixes,
    LeaveCluster,
    LeaveRequested,
    ListHot,
    PrefillDone,
    PrefixTakenOver,
    ReserveDecode,
    RoleChanged,
    StartPrefill,
    TakeOverPrefix,
)
from moonpool.types import BlockKey, FinishReason, InstanceId, RequestId, Role, Token

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
    """Leaves only this much room, as if requests occupied the rest."""
    table = desk.conductor.instance_table
    for name in names:
        row = desk.conductor.instances[InstanceId(name)].row
        table.capacity_tokens[row] += num_tokens - table.room_tokens[row]
        table.room_tokens[row] = num_tokens


def test_ticks_may_be_late_only_while_nothing_is_under_way() -> None:
    desk = Desk("p0", "p1", "d0")
    assert not desk.conductor.is_busy
    desk.ask()
    assert desk.conductor.is_busy, "a request"
    desk = Desk("p0", "p1", "d0")
    drain(desk, "p0")
    assert desk.conductor.is_busy, "a drain"


def test_unique_blocks_are_handed_over_before_the_instance_leaves() -> None:
    desk = Desk("p0", "p1", "p2", "d0")
    holds(desk, "p0", *KEYS, *OTHERS)
    holds(desk, "p1", *OTHERS)
    (asked,) = sent(drain(desk, "p0"), ListHot)
    assert asked[0] == "p0"
    actions = hot(desk, "p0", HotPrefix(tuple(OTHERS), 9), HotPrefix(tuple(KEYS), 3))
    ((taker, command),) = sent(actions, TakeOverPrefix)
    assert taker == "p2", "an empty prefill instance"
    assert command.keys == tuple(KEYS) and command.num_uses == 3, "p1 has the others"
    assert command.source.instance_id == "p0"
    assert (
        desk.conductor.instance_table.room_tokens[desk.conductor.instances["p2"].row] == 4000 - 12
    )
    assert not sent(ticked(desk), LeaveCluster)
    actions = desk.report("p2", PrefixTakenOver(number=command.number, num_blocks=3))
    assert sent(actions, ListHot) == [("p0", ListHot(number=2, num_blocks=8189, lost_with_it=True))]
    assert sent(hot(desk, "p0", number=2), LeaveCluster) == [("p0", LeaveCluster())]
    assert not sent(ticked(desk), LeaveCluster), "it was told"
    said = of(desk.handle(InstanceLost(InstanceId("p0"), "it left")), Announce)
    assert "p0 has left; others took 3 of its blocks" in said[0].text
    assert desk.conductor.drains.num_left == 1


def test_a_draining_instance_ends_its_requests_and_gets_no_new_ones() -> None:
    desk = Desk("p0", "d0", "d1")
    decoder = sent(desk.ask("r"), ReserveDecode)[0][0]
    drain(desk, decoder)
    hot(desk, decoder)
    assert not sent(ticked(desk), LeaveCluster)
    assert sent(desk.ask("s"), ReserveDecode)[0][0] != decoder
    desk.report(
        "p0", PrefillDone(attempt_id=AttemptId("r/1"), token=Token(5), finish=FinishReason.STOP)
    )
    assert sent(ticked(desk), ListHot)[0][0] == decoder
    assert sent(hot(desk, decoder, number=2), LeaveCluster)


def test_remaining_requests_move_after_half_of_the_time() -> None:
    desk = Desk("p0", "d0", "d1", max_attempts=1)
    decoder = sent(desk.ask("r", deadline_s=1000.0), ReserveDecode)[0][0]
    other = "d1" if decoder == "d0" else "d0"
    drain(desk, decoder, within_s=20.0)
    assert not sent(ticked(desk, 9.0), Abort)
    actions = ticked(desk, 1.5)
    assert (decoder, Abort(attempt_id=AttemptId("r/1"))) in sent(actions, Abort)
    assert sent(actions, ReserveDecode)[0][0] == other, "it is nobody's fault: no attempt is lost"
    assert desk.conductor.requests


def test_a_request_of_which_both_instances_leave_moves_once() -> None:
    desk = Desk("p0", "p1", "d0", "d1", max_attempts=1)
    actions = desk.ask("r", deadline_s=1000.0)
    for name in (sent(actions, StartPrefill)[0][0], sent(actions, ReserveDecode)[0][0]):
        drain(desk, name, within_s=20.0)
    moved = ticked(desk, 10.5)
    assert len(sent(moved, StartPrefill)) == len(sent(moved, ReserveDecode)) == 1
    desk.handle(Tick())
    for name in (sent(moved, StartPrefill)[0][0], sent(moved, ReserveDecode)[0][0]):
        drain(desk, name, within_s=20.0)
    (refused,) = of(ticked(desk, 10.5), Refuse)
    assert refused.refusal.status == 503 and not desk.conductor.requests


def test_an_answer_that_could_not_continue_elsewhere_stays_until_the_end() -> None:
    desk = Desk("m0")
    desk.ask("begun", forwarded=True, deadline_s=1000.0)
    desk.tokens("m0", 1, work="begun/1")
    desk.ask("other", forwarded=True, deadline_s=1000.0)
    desk.join("m1")
    drain(desk, "m0", within_s=20.0)
    moved = ticked(desk, 10.5)
    assert not of(moved, Refuse) and sent(moved, StartPrefill)[0][0] == "m1"
    assert [tracked.request.request_id for tracked in desk.conductor.requests.values()] == [
        "begun",
        "other",
    ]
    assert sent(ticked(desk, 10.0), LeaveCluster)
    (refused,) = of(desk.handle(InstanceLost(InstanceId("m0"), "it left")), Refuse)
    assert refused.request_id == "begun"


def test_a_call_that_a_gateway_sends_stays_on_an_instance_that_drains() -> None:
    desk = Desk("m0")
    desk.ask("sent", pinned=True, deadline_s=1000.0)
    desk.join("m1")
    drain(desk, "m0", within_s=20.0)
    assert not sent(ticked(desk, 10.5), StartPrefill)
    assert RequestId("sent") in desk.conductor.requests


def test_an_instance_without_room_is_not_tried_again() -> None:
    desk = Desk("p0", "p1", "p2", "d0")
    drain(desk, "p0")
    actions = hot(desk, "p0", HotPrefix(tuple(KEYS), 1), HotPrefix(tuple(OTHERS), 1))
    asked = []
    while taking := sent(actions, TakeOverPrefix):
        assert len({name for name, _ in taking}) == len(taking), "one at a time"
        actions = []
        for name, command in taking:
            asked.append((name, command.keys))
            full = PrefixTakenOver(number=command.number, num_blocks=0, full=True)
            actions += desk.report(name, full)
    assert sorted(name for name, _ in asked) == ["d0", "p1", "p2"]
    assert sent(actions, ListHot), "nothing is left to hand over"


def test_a_prefix_goes_to_another_instance_if_its_fetch_fails() -> None:
    desk = Desk("p0", "p1", "p2", "d0", "d1")
    drain(desk, "p0")
    actions = hot(desk, "p0", HotPrefix(tuple(KEYS), 1))
    asked = []
    while taking := sent(actions, TakeOverPrefix):
        ((name, command),) = taking
        asked.append(name)
        failed = PrefixTakenOver(number=command.number, num_blocks=0, error="cut off")
        actions = desk.report(name, failed)
    assert len(set(asked)) == 3 and sent(actions, ListHot), "given up after the third instance"
    assert sent(hot(desk, "p0", number=2), LeaveCluster)
    (said,) = of(desk.handle(InstanceLost(InstanceId("p0"), "it left")), Announce)
    assert "others took 0 of its blocks; 3 fetches failed" in said.text
    assert f"the last at {asked[-1]}: cut off" in said.text


def test_a_prefix_without_room_waits_until_requests_have_ended() -> None:
    desk = Desk("p0", "p1", "d0", num_blocks=100)
    drain(desk, "p0", within_s=60.0)
    give_room(desk, 12, "p1", "d0")  # leaves room for three blocks
    assert not sent(hot(desk, "p0", HotPrefix(tuple(KEYS), 1)), TakeOverPrefix), (
        "none for requests then"
    )
    actions = ticked(desk, 20.0)
    assert not sent(actions, TakeOverPrefix) and not sent(actions, LeaveCluster)
    give_room(desk, 24, "d0")
    ((taker, command),) = sent(ticked(desk), TakeOverPrefix)
    assert (taker, command.timeout_s) == ("d0", 15.0), "its room is not booked until the end"


def test_a_prefix_without_room_is_dropped_after_half_of_the_time() -> None:
    desk = Desk("p0", "p1", "d0", num_blocks=100)
    drain(desk, "p0", within_s=60.0)
    give_room(desk, 12, "p1", "d0")
    actions = hot(desk, "p0", HotPrefix(tuple(KEYS), 2), HotPrefix(tuple(OTHERS[:1]), 1))
    ((_, command),) = sent(actions, TakeOverPrefix)
    assert command.keys == tuple(OTHERS[:1]), "what is small need not wait behind it"
    desk.report("p1", PrefixTakenOver(number=command.number, num_blocks=1))
    assert not sent(ticked(desk, 29.0), LeaveCluster)
    assert sent(ticked(desk, 1.5), ListHot), "once more, and it goes"
    assert sent(hot(desk, "p0", HotPrefix(tuple(KEYS), 2), number=2), LeaveCluster)


def test_a_prefix_too_large_for_any_instance_is_dropped_at_once() -> None:
    desk = Desk("p0", "p1", "d0", num_blocks=5)
    drain(desk, "p0", within_s=60.0)
    assert sent(hot(desk, "p0", HotPrefix(tuple(KEYS), 1)), ListHot)


def test_a_taker_that_dies_leaves_nothing_booked_and_another_one_takes_the_prefix() -> None:
    desk = Desk("p0", "p1", "d0")
    drain(desk, "p0")
    ((first, _),) = sent(hot(desk, "p0", HotPrefix(tuple(KEYS), 1)), TakeOverPrefix)
    desk.handle(InstanceLost(InstanceId(first), "it died"))
    ((second, command),) = sent(ticked(desk), TakeOverPrefix)
    assert {first, second} == {"p1", "d0"}
    desk.report(second, PrefixTakenOver(number=command.number, num_blocks=3))
    assert not any(state.handover_tokens for state in desk.conductor.instances.values())


def test_a_silent_instance_leaves_when_its_time_is_up() -> None:
    desk = Desk("p0", "p1", "d0")
    drain(desk, "p0", within_s=10.0)
    assert not sent(ticked(desk, 4.0), LeaveCluster)
    assert sent(ticked(desk, 6.5), LeaveCluster) == [("p0", LeaveCluster())]


def test_the_last_of_a_role_may_only_leave_when_its_process_ends() -> None:
    desk = Desk("p0", "d0", "d1")
    drains = desk.conductor.drains
    assert "last instance that prefills" in drains.why_not(InstanceId("p0"))
    assert "no instance 'x'" in drains.why_not(InstanceId("x"))
    assert drains.why_not(InstanceId("d0")) == ""
    assert sent(desk.report("p0", LeaveRequested(within_s=5.0)), ListHot)
    assert not sent(desk.ask("r"), StartPrefill)


def test_a_departure_replaces_a_change_of_roles() -> None:
    desk = Desk("p0", "p1", "d0", "d1", role_balance="switch")
    desk.conductor.roles.begin(InstanceId("d0"), Role.PREFILL, "a test", desk.now)
    ticked(desk)  # sends the command to the instance
    assert sent(drain(desk, "d0"), ListHot)
    desk.report("d0", RoleChanged(role=Role.PREFILL))
    assert not desk.conductor.instance_table.prefills[desk.conductor.instances["d0"].row]
    assert sent(hot(desk, "d0"), ListHot)
    assert sent(hot(desk, "d0", number=2), LeaveCluster)


def test_a_signal_shortens_a_drain() -> None:
    desk = Desk("p0", "p1", "d0")
    drain(desk, "p0", within_s=600.0)
    desk.report("p0", LeaveRequested(within_s=2.0))
    shown = desk.conductor.instances[InstanceId("p0")].drain
    assert shown is not None and shown.until_s <= 2.0
    assert sent(ticked(desk, 2.5), LeaveCluster)
