"""Tests programs (agents) in the Conductor: which calls wait, and which blocks are kept."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_desk import Desk
from conductor_desk import of as of_kind

from moonpool.conductor.actions import ConductorAction, Refuse, RequestEnded, Send, Tick
from moonpool.conductor.programs import programs
from moonpool.conductor.programs.programs import HORIZON_S
from moonpool.protocol.messages import (
    BlocksChanged,
    BlocksSnapshot,
    MarkReplicas,
    PrefillStarted,
    StartPrefill,
)
from moonpool.types import FinishReason, ProgramContext, RequestId, paying


def of(kind: type[Any], actions: list[ConductorAction]) -> list[Any]:
    """Returns the commands of a kind."""
    sent = of_kind(actions, Send)
    return [one.command for one in sent if isinstance(one.command, kind)]


class Agents:
    """Runs a mixed instance, and clients that name their programs."""

    def __init__(self, num_blocks: int = 1000, **config: object) -> None:
        self.desk = Desk("m0", num_blocks=num_blocks, **{"admission": "none", **config})
        self.num_stored = 0
        self.desk.report("m0", BlocksSnapshot(next_sequence=0, keys=()))

    def call(self, name: str, agent: str, **known: Any) -> list[ConductorAction]:
        context = ProgramContext(program_id=agent, **known.pop("program", {}))
        tokens = tuple(range(known.pop("num_tokens", 40)))
        tokens = (ord(agent[0]), *tokens[1:])
        return self.desk.ask(name, token_ids=tokens, program=context, **known)

    def answer(self, actions: list[ConductorAction]) -> list[ConductorAction]:
        """Answers the call that was started."""
        (start,) = of(StartPrefill, actions)
        work, request = start.attempt.attempt_id, start.attempt.attempt_id.partition("/")[0]
        tracked = self.desk.conductor.requests[request]  # type: ignore[index]
        self.desk.report("m0", PrefillStarted(attempt_id=work, cached_tokens=0, fetched_tokens=0))
        stored = BlocksChanged(sequence=self.num_stored, stored=tuple(tracked.keys), removed=())
        self.num_stored += 1
        self.desk.report("m0", stored)
        return self.desk.tokens("m0", 5, 6, finish=FinishReason.STOP, work=work)

    @property
    def waiting(self) -> int:
        return self.desk.conductor.num_programs_waiting


def ended(actions: list[ConductorAction]) -> RequestEnded:
    (one,) = [action for action in actions if isinstance(action, RequestEnded)]
    return one


def test_new_programs_wait_while_others_need_the_memory() -> None:
    agents = Agents(num_blocks=30)  # 120 tokens
    first = agents.call("a1", "a", num_tokens=80)
    assert not of(StartPrefill, agents.call("b1", "b", num_tokens=80))
    assert agents.waiting == 1
    assert not of(StartPrefill, agents.call("c1", "c", num_tokens=8)), "not past one before it"
    done = agents.answer(first)
    assert not of(StartPrefill, done), "its tool runs, and its blocks are needed soon"
    second = agents.call("a2", "a", num_tokens=84, program={"ends": True})
    assert of(StartPrefill, second), "a program that has begun goes on"
    began = agents.answer(second)
    assert [one.attempt.attempt_id.partition("/")[0] for one in of(StartPrefill, began)] == ["b1"]
    assert agents.waiting == 1 and len(agents.desk.conductor.programs) == 2


def test_a_request_by_itself_does_not_wait_for_programs() -> None:
    agents = Agents(num_blocks=30)
    agents.call("a1", "a", num_tokens=80)
    agents.call("b1", "b", num_tokens=80)
    assert of(StartPrefill, agents.desk.ask("r", token_ids=tuple(range(500, 510))))


def test_without_the_rules_nobody_waits_for_a_program() -> None:
    agents = Agents(num_blocks=60, programs="off")
    agents.call("a1", "a", num_tokens=80)
    assert of(StartPrefill, agents.call("b1", "b", num_tokens=80))
    assert not len(agents.desk.conductor.programs)


@pytest.mark.parametrize("rules", ["named", "off"])
def test_only_later_calls_of_a_program_wait_where_others_are_refused(rules: str) -> None:
    agents = Agents(num_blocks=100_000, programs=rules, admission="early")
    agents.answer(agents.call("a1", "a"))
    for number in range(40):  # queues prompts of 1 s each before the program
        agents.desk.ask(f"r{number}", token_ids=tuple(range(number * 2000, number * 2000 + 1000)))
    new = agents.call("n1", "n", num_tokens=2000, ttft_s=4.0, tbt_s=9.0)
    later = agents.call("a2", "a", num_tokens=2000, ttft_s=4.0, tbt_s=9.0)
    refused = {one.request_id for one in later + new if isinstance(one, Refuse)}
    assert ("a2" in refused) is (rules == "off")


def test_blocks_of_an_ended_program_leave_first() -> None:
    agents = Agents()
    actions = agents.answer(agents.call("a1", "a", program={"ends": True}))
    (mark,) = of(MarkReplicas, actions)
    assert len(mark.spare) == 10 and not mark.last
    assert not len(agents.desk.conductor.programs)


def with_a_long_pause() -> tuple[Agents, list[ConductorAction]]:
    """Returns agents of which one program makes a long pause, and the actions of the tick in that
    pause."""
    agents = Agents()
    for number in range(60):  # teaches the Conductor that programs pause for 100 s
        agents.answer(agents.call(f"a{number}", "a"))
        agents.desk.now += 100.0
    agents.answer(agents.call("last", "a"))
    agents.desk.now += 1.0
    return agents, agents.desk.handle(Tick())


def marks_at(actions: list[ConductorAction]) -> list[tuple[str, int, int]]:
    """Returns the instances that get marks, with the numbers of blocks that leave first and of
    blocks that do not."""
    return [
        (one.instance_id, len(one.command.spare), len(one.command.last))
        for one in of_kind(actions, Send)
        if isinstance(one.command, MarkReplicas)
    ]


def test_a_long_pause_parks_a_program_until_it_comes_back() -> None:
    agents, ticked = with_a_long_pause()
    assert marks_at(ticked) == [("m0", 10, 0)]
    assert agents.desk.conductor.programs.num_parked == 1 and HORIZON_S < 99.0
    assert marks_at(agents.call("again", "a")) == [("m0", 0, 10)]


def test_a_parked_program_is_marked_again_where_a_snapshot_follows() -> None:
    agents, _ = with_a_long_pause()
    desk = agents.desk
    (program,) = desk.conductor.programs
    snapshot = BlocksSnapshot(next_sequence=0, keys=tuple(program.keys))
    assert marks_at(desk.report("m0", snapshot)) == [("m0", 10, 0)]
    agents.call("again", "a")
    assert marks_at(desk.report("m0", snapshot)) == []


def test_a_program_that_comes_back_leaves_the_marks_of_spare_replicas() -> None:
    agents, _ = with_a_long_pause()
    desk = agents.desk
    (program,) = desk.conductor.programs
    desk.join("m1")
    desk.report("m1", BlocksSnapshot(next_sequence=0, keys=tuple(program.keys)))
    ((spare_at, *numbers),) = marks_at(desk.handle(Tick()))
    assert numbers == [10, 0]
    ((kept_at, *numbers),) = marks_at(agents.call("again", "a"))
    assert numbers == [0, 10] and kept_at != spare_at


def test_the_last_copies_of_a_parked_program_still_leave_first() -> None:
    agents, _ = with_a_long_pause()
    desk = agents.desk
    (program,) = desk.conductor.programs
    keys = tuple(program.keys)
    desk.join("m1")
    desk.report("m1", BlocksSnapshot(next_sequence=0, keys=keys))
    ((spare_at, *_),) = marks_at(desk.handle(Tick()))
    owner = "m1" if spare_at == "m0" else "m0"
    sequence = agents.num_stored if owner == "m0" else 0
    desk.report(owner, BlocksChanged(sequence=sequence, stored=(), removed=keys))
    assert marks_at(desk.handle(Tick())) == []
    assert marks_at(agents.call("again", "a")) == [(spare_at, 0, 10)]


def test_an_explanation_names_the_program() -> None:
    agents = Agents()
    agents.answer(agents.call("a1", "a"))
    agents.desk.now += 3.0
    actions = agents.answer(agents.call("k1", "k", program={"parent_id": "a"}))
    assert ended(actions).record.program == "k"
    assert ended(actions).explanation.lines()[0] == "call 1 of program k, of a"
    actions = agents.answer(agents.call("a2", "a"))
    assert "call 2 of program a; it paused for 3.0 s" in ended(actions).explanation.lines()[0]


def test_the_lead_of_a_task_goes_by_both_of_its_names() -> None:
    agents = Agents()
    for lead, parent, child in (("t", "t:lead", "t:a"), ("u:lead", "u", "u:a")):
        agents.answer(agents.call(f"{lead}1", lead))
        agents.answer(agents.call(f"{child}1", child, program={"parent_id": parent}))
        known = {one.program_id: one for one in agents.desk.conductor.programs}
        assert known[child].parent is known[lead]


def test_a_program_does_not_wait_for_sub_agents_in_the_background() -> None:
    agents = Agents()
    agents.answer(agents.call("a1", "a"))
    agents.call("b1", "b", program={"parent_id": "a", "blocks_parent": False})
    known = {one.program_id: one for one in agents.desk.conductor.programs}
    assert known["b"].parent is known["a"] and not known["a"].awaits_children
    agents.call("c1", "c", program={"parent_id": "a"})
    assert known["a"].awaits_children


def test_an_expected_length_is_what_the_answer_is_predicted_to_have() -> None:
    agents = Agents(decode_prediction="length")
    conductor = agents.desk.conductor
    agents.call("a1", "a", program={"expected_tokens": 7})
    agents.call("b1", "b")
    named, other = (conductor.requests[RequestId(name)] for name in ("a1", "b1"))
    assert named.predicted_output_tokens == 7.0 < other.predicted_output_tokens
    agents.call("c1", "c", program={"expected_tokens": 1 << 24})
    boundless = conductor.requests[RequestId("c1")]
    assert boundless.predicted_output_tokens == boundless.request.sampling.max_tokens
    usual = conductor.output_predictor.usual_tokens
    assert usual(named.request) == 7 < usual(other.request)


def test_tenants_do_not_share_programs() -> None:
    agents = Agents()
    agents.call("a1", "a", tenant="x")
    agents.call("a2", "a", tenant="y")
    assert len(agents.desk.conductor.programs) == 2


def test_a_growing_prompt_is_recognised_if_asked_for() -> None:
    agents = Agents(programs="all")
    agents.answer(agents.desk.ask("r1", token_ids=tuple(range(40))))
    agents.desk.now += 2.0
    actions = agents.answer(agents.desk.ask("r2", token_ids=tuple(range(60))))
    assert (
        "(recognised by its prompt); it paused for 2.0 s" in ended(actions).explanation.lines()[0]
    )
    assert len(agents.desk.conductor.programs) == 1


def test_a_growing_prompt_is_recognised_only_as_a_program_of_its_tenant() -> None:
    agents = Agents(programs="all")
    agents.answer(agents.desk.ask("r1", token_ids=tuple(range(40)), tenant=paying("x")))
    agents.answer(agents.desk.ask("r2", token_ids=tuple(range(60)), tenant=paying("y")))
    known = {one.tenant: one.num_calls for one in agents.desk.conductor.programs}
    assert known == {"x": 1, "y": 1}


def test_a_program_is_recognised_though_a_named_one_began_with_its_prompt() -> None:
    agents = Agents(programs="all")
    prompt = (ord("a"), *range(1, 40))
    agents.answer(agents.desk.ask("r1", token_ids=prompt))
    agents.answer(agents.call("a1", "a"))
    agents.answer(agents.call("a2", "a", num_tokens=60))
    agents.answer(agents.desk.ask("r2", token_ids=(*prompt, *range(100, 104))))
    calls = {one.is_named: one.num_calls for one in agents.desk.conductor.programs}
    assert calls == {True: 2, False: 2} and len(agents.desk.conductor.programs) == 2


def test_a_client_that_invents_names_costs_a_bounded_look_and_nobody_elses_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 20)
    monkeypatch.setattr(programs, "MAX_LOOKS_PER_TICK", 8)
    agents = Agents()
    agents.answer(agents.call("kept", "x", tenant="small"))
    for number in range(50):
        agents.answer(agents.call(f"c{number}", f"p{number}", tenant="flood"))
    known = agents.desk.conductor.programs
    assert len(known) == 20
    assert known.get("small", "x") is not None, "the oldest of the one with most went"
    assert known.get("flood", "p0") is None and known.get("flood", "p49") is not None
    looked = 0
    chance = known.pauses.chance

    def counted(*arguments: Any) -> float:
        nonlocal looked
        looked += 1
        return chance(*arguments)

    monkeypatch.setattr(known.pauses, "chance", counted)
    for turn in range(1, 4):
        agents.desk.now += 0.1
        agents.desk.handle(Tick())
        assert looked <= 8 * turn
    assert looked > 16, "and the others have their turn"
