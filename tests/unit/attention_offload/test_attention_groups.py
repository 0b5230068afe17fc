"""Tests that attention workers keep their places, and that spare workers replace lost ones."""

from __future__ import annotations

from moonpool.head.attention_links import AttentionAssignments
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId

ONE, OTHER = InstanceId("decode-0"), InstanceId("decode-1")


def at(name: str, port: int = 1) -> PeerAddress:
    return PeerAddress(
        instance_id=InstanceId(name), host_id="h", unix_name="", tcp_host="x", tcp_port=port
    )


def test_an_instance_starts_when_its_group_is_complete() -> None:
    assignments = AttentionAssignments(2)
    assert assignments.join(at("a")) is None
    assert assignments.group_of(ONE) is None
    assignments.join(at("b"))
    assignments.join(at("c"))
    assert assignments.group_of(ONE) == (at("a"), at("b"))
    assert assignments.group_of(OTHER) is None
    assert assignments.owners() == {"a": ONE, "b": ONE, "c": None}
    # the successor of the instance gets the same group
    assert assignments.group_of(ONE) == (at("a"), at("b"))


def test_a_lost_worker_is_replaced_by_a_spare_or_by_itself() -> None:
    assignments = AttentionAssignments(2)
    for name in ("a", "b", "c"):
        assignments.join(at(name))
    assignments.group_of(ONE)
    assert assignments.lose("a") == (ONE, 0, at("c"))
    assert assignments.group_of(ONE) == (at("c"), at("b"))
    assert assignments.lose("b") is None
    assert assignments.group_of(ONE) is None
    assert assignments.join(at("b", 2)) == (ONE, 1)
    assert assignments.group_of(ONE) == (at("c"), at("b", 2))
    assert assignments.join(at("a")) is None  # the worker's place is taken, so it is a spare now
    assert assignments.lose("b") == (ONE, 1, at("a"))


def test_a_new_worker_takes_the_place_of_a_lost_one() -> None:
    assignments = AttentionAssignments(1)
    assignments.join(at("a"))
    assignments.group_of(ONE)
    assignments.lose("a")
    assert assignments.join(at("new")) == (ONE, 0)
    assert assignments.group_of(ONE) == (at("new"),)


def test_a_restarted_head_learns_the_groups_from_the_instances() -> None:
    assignments = AttentionAssignments(1)
    assignments.join(at("a"))
    assignments.join(at("b"))
    assert assignments.group_of(OTHER) == (at("a"),)
    assignments.remember(ONE, ("a",))
    assert assignments.group_of(ONE) == (at("a"),)
    assert assignments.group_of(OTHER) == (at("b"),)
