"""Tests that a request that crashes its instances ends at most two of them, and that the other
requests are served."""

from __future__ import annotations

import random

import pytest
from conductor_desk import Desk, of, sent
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.actions import (
    ConductorAction,
    InstanceCrashed,
    InstanceLost,
    Refuse,
    RequestEnded,
    Tick,
)
from moonpool.conductor.crashes.suspects import ALONE_S, INSTANCES_ENDED, PROOF_TOKENS
from moonpool.protocol.messages import StartPrefill
from moonpool.types import FinishReason, InstanceId


def lose(desk: Desk, name: str) -> list[ConductorAction]:
    return desk.handle(InstanceLost(InstanceId(name), "it died"))


def crash(desk: Desk, name: str, told_first: bool = False) -> list[ConductorAction]:
    crashed = InstanceCrashed(InstanceId(name))
    if told_first:
        return [*desk.handle(crashed), *lose(desk, name)]
    return [*lose(desk, name), *desk.handle(crashed)]


def placed(actions: list[ConductorAction]) -> list[str]:
    return [start.attempt.attempt_id.split("/")[0] for _, start in sent(actions, StartPrefill)]


def work_of(desk: Desk, name: str) -> str:
    tracked = next(t for key, t in desk.conductor.requests.items() if key == name)
    assert tracked.attempt is not None
    return tracked.attempt.attempt_id


@pytest.mark.parametrize("told_first", [False, True])
def test_the_second_crash_shows_the_culprit_and_releases_the_others(told_first: bool) -> None:
    desk = Desk("m0")
    for name in ("poison", "a", "b"):
        desk.ask(name, max_tokens=50)
    assert not of(crash(desk, "m0", told_first), Refuse)
    assert placed(desk.join("m0", incarnation=2)) == ["poison"]
    actions = crash(desk, "m0", told_first)
    (refuse,) = of(actions, Refuse)
    assert (refuse.request_id, refuse.refusal.reason, refuse.refusal.status) == (
        "poison",
        INSTANCES_ENDED,
        500,
    )
    assert refuse.refusal.retry_after_s is None
    assert placed(desk.join("m0", incarnation=3)) == ["a", "b"]


def test_an_innocent_proves_it_by_tokens_and_nothing_new_joins_it_meanwhile() -> None:
    desk = Desk("m0")
    for name in ("a", "b", "c"):
        desk.ask(name, max_tokens=50)
    crash(desk, "m0")
    assert placed(desk.join("m0", incarnation=2)) == ["a"]
    assert not placed(desk.ask("new", max_tokens=50)), "it waits for the end of the turn"
    tokens = [*range(PROOF_TOKENS - 1)]
    assert not placed(desk.tokens("m0", *tokens, work=work_of(desk, "a")))
    assert placed(desk.tokens("m0", 7, work=work_of(desk, "a"))) == ["b"]
    assert placed(desk.tokens("m0", 7, finish=FinishReason.STOP, work=work_of(desk, "b"))) == ["c"]
    assert placed(desk.tokens("m0", *tokens, 7, work=work_of(desk, "c"))) == ["new"]


def test_a_long_turn_ends_so_that_others_are_served() -> None:
    desk = Desk("m0")
    for name in ("a", "b"):
        desk.ask(name, deadline_s=500.0)
    crash(desk, "m0")
    desk.join("m0", incarnation=2)
    desk.now += ALONE_S / 2
    assert not placed(desk.handle(Tick()))
    desk.now += ALONE_S / 2
    assert placed(desk.handle(Tick())) == ["b"]


def test_who_has_run_for_the_shortest_time_is_tried_first() -> None:
    desk = Desk("m0")
    desk.ask("old", max_tokens=50)
    desk.tokens("m0", 1, 2, work=work_of(desk, "old"))
    desk.ask("new", max_tokens=50)
    crash(desk, "m0")
    assert placed(desk.join("m0", incarnation=2)) == ["new"]
    assert of(crash(desk, "m0"), Refuse)[0].request_id == "new"
    assert placed(desk.join("m0", incarnation=3)) == ["old"]


def test_kills_from_outside_accuse_nobody() -> None:
    desk = Desk("m0", max_attempts=9)
    for name in ("a", "b"):
        desk.ask(name)
    for incarnation in range(2, 6):
        assert not of(lose(desk, "m0"), Refuse)
        desk.now += 6.0  # waits for the delay after consecutive faults
        joined = [*desk.join("m0", incarnation=incarnation), *desk.handle(Tick())]
        assert sorted(placed(joined)) == ["a", "b"]


def test_a_decode_instance_that_crashes_accuses_those_that_had_reached_it() -> None:
    desk = Desk("p0", "d0")
    desk.ask("decodes", max_tokens=50)
    desk.decoding("decodes/1")
    desk.ask("prefills", max_tokens=50)
    crash(desk, "d0")
    assert placed(desk.join("d0", incarnation=2)) == ["decodes"]
    desk.decoding(work_of(desk, "decodes"))
    assert of(crash(desk, "d0"), Refuse)[0].request_id == "decodes"
    assert placed(desk.join("d0", incarnation=3)) == ["prefills"]


@pytest.mark.long
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 20))
def test_a_culprit_ends_two_instances_and_everybody_else_is_answered(
    seed: int, num_innocents: int, fine_tokens: int
) -> None:
    """Sends a poison request that crashes its instance after this many tokens of each attempt, or
    at once."""
    rng = random.Random(seed)
    desk = Desk("m0", max_attempts=10)
    names = [f"r{n}" for n in range(num_innocents)] + ["poison"]
    rng.shuffle(names)
    waiting = list(names)
    num_crashes, incarnation = 0, 1
    ended: dict[str, str] = {}

    def note(actions: list[ConductorAction]) -> None:
        ended.update({e.record.request_id: e.record.outcome for e in of(actions, RequestEnded)})

    for _ in range(1500):
        desk.now += 0.2
        note(desk.handle(Tick()))
        if waiting and rng.random() < 0.2:
            note(desk.ask(waiting.pop(), max_tokens=500, deadline_s=desk.now + 900.0))
        present = [t for t in desk.conductor.requests.values() if t.attempt is not None]
        if not present:
            if not waiting and not desk.conductor.requests:
                break
            continue
        tracked = rng.choice(present)
        assert tracked.attempt is not None
        work = tracked.attempt.attempt_id
        num_fine = len(tracked.generated) - tracked.attempt.begins_at
        if tracked.request.request_id == "poison" and num_fine >= fine_tokens:
            num_crashes, incarnation = num_crashes + 1, incarnation + 1
            note(crash(desk, "m0", told_first=rng.random() < 0.5))
            note(desk.join("m0", incarnation=incarnation))
            continue
        is_last = tracked.request.request_id != "poison" and len(tracked.generated) > 30
        finish = FinishReason.STOP if is_last else None
        note(desk.tokens("m0", 5, finish=finish, work=work))
    assert ended.pop("poison") == INSTANCES_ENDED
    assert ended == dict.fromkeys([n for n in names if n != "poison"], "stop")
    assert num_crashes == 2
