"""Tests the Conductor over the replicas of a Serve deployment, without Ray and without a clock."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from moonpool.ray.replicas.calls import ReplicaCall, count_tokens, hints_of, read_call
from moonpool.ray.replicas.replica_conductor import PlacedCall, RefusedCall, ReplicaConductor, Seen
from moonpool.ray.replicas.settings import RouterSettings
from moonpool.types import ProgramContext, RequestId

PREFILL_S, STEP_S = 0.05, 0.01


def text_call(call_id: str, text: str, max_tokens: int = 4) -> ReplicaCall:
    return read_call(call_id, [{"prompt": text, "max_tokens": max_tokens}], {})


class Driver:
    """Replicas that answer a call in a fixed time, one token per step."""

    def __init__(self, num_replicas: int = 2, **settings: Any) -> None:
        self.state = ReplicaConductor(RouterSettings(**settings))
        self.now = 1.0
        self.state.set_replicas([f"r{i}" for i in range(num_replicas)], self.now)

    def send(self, call: ReplicaCall) -> PlacedCall | RefusedCall | None:
        """Sends a call, and returns its replica, or None while the call waits."""
        self.state.arrive(call, self.now)
        found = {each.call_id: each for each in self.state.take_decisions()}
        return found.get(call.call_id)

    def answer(self, call_id: str, num_tokens: int = 4) -> None:
        self.now += PREFILL_S
        self.state.see([Seen(call_id, self.now, 1)])
        for _ in range(num_tokens - 1):
            self.now += STEP_S
            self.state.see([Seen(call_id, self.now, 1)])
        self.state.see([Seen(call_id, self.now, has_ended=True)])
        self.state.conductor.validate()

    def run(self, call: ReplicaCall, num_tokens: int = 4) -> str:
        placed = self.send(call)
        assert isinstance(placed, PlacedCall), placed
        self.answer(call.call_id, num_tokens)
        return placed.replica


def test_a_conversation_goes_on_where_its_prefix_is() -> None:
    driver = Driver(num_replicas=3)
    texts = {name: f"system prompt of {name} " * 40 for name in "abc"}
    first = {name: driver.run(text_call(f"{name}-0", text)) for name, text in texts.items()}
    for turn in range(1, 4):
        for name in random.Random(turn).sample("abc", 3):
            texts[name] += f" turn {turn} " * 20
            assert driver.run(text_call(f"{name}-{turn}", texts[name])) == first[name]


def test_a_multiplexed_model_is_served_by_every_replica_and_has_its_own_blocks() -> None:
    driver = Driver(num_replicas=1)
    text = "a" * 4 * 500

    def found_tokens(call_id: str, model: str) -> int | None:
        placed = driver.send(replace(text_call(call_id, text), model=model))
        assert placed == PlacedCall(call_id, "r0")
        found = driver.state.conductor.requests[RequestId(call_id)].found_tokens
        driver.answer(call_id)
        return found

    assert found_tokens("base", "") == 0
    assert found_tokens("french", "french") == 0
    assert found_tokens("again", "french") == found_tokens("base again", "") != 0


def test_calls_of_one_time_are_spread() -> None:
    driver = Driver()
    placed = [driver.send(text_call(f"c{i}", f"{i} " * 300, 200)) for i in range(8)]
    names = [each.replica for each in placed if isinstance(each, PlacedCall)]
    assert sorted(names) == ["r0"] * 4 + ["r1"] * 4


def test_what_would_miss_its_slo_is_refused_with_the_reason() -> None:
    driver = Driver(num_replicas=1, ttft_s=0.2)
    for i in range(12):  # measures enough requests for the times to be known
        driver.run(text_call(f"first-{i}", f"{i} " * (50 + 40 * (i % 4))), 9)
    decisions = [driver.send(text_call(f"c{i}", f"{i} " * 400, 50)) for i in range(20)]
    refused = [each for each in decisions if isinstance(each, RefusedCall)]
    assert isinstance(decisions[0], PlacedCall) and refused
    why = refused[-1].refusal
    assert (why.status, why.reason) == (429, "ttft_slo")
    assert "TTFT" in why.message and (why.retry_after_s or 0) > 0


def test_without_an_slo_nothing_is_refused_for_it() -> None:
    driver = Driver(num_replicas=1)
    decisions = [driver.send(text_call(f"c{i}", f"{i} " * 400, 50)) for i in range(50)]
    assert not any(isinstance(each, RefusedCall) for each in decisions)


def test_what_waits_for_room_is_placed_when_there_is_some() -> None:
    driver = Driver(num_replicas=1, kv_tokens=1024, max_model_tokens=1024)
    first = driver.send(text_call("a", "a" * 4 * 500, 300))
    second = driver.send(text_call("b", "b" * 4 * 500, 300))
    assert isinstance(first, PlacedCall) and second is None
    driver.answer("a")
    driver.state.tick(driver.now)
    assert driver.state.take_decisions() == [PlacedCall("b", "r0")]


def test_the_times_of_a_replica_are_those_that_routers_see() -> None:
    driver = Driver(num_replicas=1)
    for i in range(12):
        driver.run(text_call(f"c{i}", f"{i} " * (50 + 40 * (i % 4)), 9), 9)
    (state,) = driver.state.conductor.instances.values()
    assert state.info.cost.prefill_s(100, 0) == pytest.approx(PREFILL_S, rel=0.05)
    assert state.info.cost.decode_step_s(1, 100) == pytest.approx(STEP_S, rel=0.05)


def test_a_lost_replica_gives_its_calls_back() -> None:
    driver = Driver()
    sent = driver.send(text_call("sent", "a" * 400))
    began = driver.send(text_call("began", "b" * 400))
    assert isinstance(sent, PlacedCall) and isinstance(began, PlacedCall)
    driver.state.see([Seen("began", driver.now, 1)])
    driver.state.set_replicas({"r0", "r1"} - {sent.replica}, driver.now)
    (other,) = {"r0", "r1"} - {sent.replica}
    assert PlacedCall("sent", other) in driver.state.take_decisions()
    driver.state.set_replicas([other], driver.now)
    assert driver.run(text_call("next", "c" * 400)) == other


def test_an_end_of_an_earlier_try_does_not_end_the_next_one() -> None:
    driver = Driver()
    first = driver.send(text_call("c", "a" * 400))
    assert isinstance(first, PlacedCall)
    (other,) = {"r0", "r1"} - {first.replica}
    driver.state.see([Seen("c", driver.now, has_ended=True, replica=other)])
    assert len(driver.state.conductor.requests) == 1
    driver.state.see([Seen("c", driver.now, has_ended=True, replica=first.replica)])
    assert not driver.state.conductor.requests


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "token", "end", "fail", "lose", "join", "tick"]),
        st.integers(0, 5),
        st.floats(0, 0.5),
    ),
    max_size=60,
)


@given(EVENTS)
def test_no_order_of_events_leaves_a_call_behind(events: list[tuple[str, int, float]]) -> None:
    driver = Driver(kv_tokens=2048, max_model_tokens=1024)
    for what, number, later_s in events:
        driver.now += later_s
        name, call_id = f"r{number % 3}", f"c{number}"
        present = set(driver.state.replicas)
        match what:
            case "arrive":
                driver.send(text_call(call_id, f"{number} " * 300, 100))
            case "token":
                driver.state.see([Seen(call_id, driver.now - 0.1, 1)])
            case "end":
                driver.state.see([Seen(call_id, driver.now, has_ended=True)])
            case "fail":
                driver.state.see([Seen(call_id, driver.now, has_failed=True)])
            case "lose":
                driver.state.set_replicas(present - {name}, driver.now)
            case "join":
                driver.state.set_replicas(present | {name}, driver.now)
            case "tick":
                driver.state.tick(driver.now)
        driver.state.conductor.validate()
    for number in range(6):
        driver.state.see([Seen(f"c{number}", driver.now, has_failed=True)])
    assert not driver.state.conductor.requests


class _Message(SimpleNamespace):
    def model_dump(self, **_: Any) -> dict[str, Any]:
        return dict(self.__dict__)


@pytest.mark.parametrize(
    ("argument", "more"),
    [
        ({"prompt": "a" * 400}, {"prompt": "a" * 400 + "b" * 40}),
        ("a" * 400, "a" * 400 + "b"),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3, 4]}),
        (
            {"messages": [{"role": "user", "content": "a" * 400}]},
            {"messages": [{"role": "user", "content": "a" * 400}, {"role": "x", "content": "b"}]},
        ),
        (
            SimpleNamespace(messages=[_Message(role="user", content="a" * 400)]),
            SimpleNamespace(
                messages=[_Message(role="user", content="a" * 400), _Message(role="x")]
            ),
        ),
        ({"input": "a" * 400}, {"input": "a" * 400 + "\ud800"}),
    ],
)
def test_a_longer_prompt_begins_with_the_tokens_of_a_shorter_one(argument: Any, more: Any) -> None:
    short, long = (read_call("c", [each], {}).token_ids for each in (argument, more))
    assert len(short) >= 3 and long[: len(short) - 1] == short[:-1] and len(long) >= len(short)


def test_a_call_may_name_its_program() -> None:
    hint = {"session_id": "s"}
    asked = SimpleNamespace(prompt="x" * 40, agent_hint=hint)
    assert hints_of([object(), asked], {}) == (None, hint, None)
    assert hints_of(["text"], {}) == (None, None, None)
    driver = Driver()
    call = replace(text_call("a1", "x" * 40), program=ProgramContext(program_id="s"))
    driver.run(call)
    driver.run(replace(text_call("a2", "x" * 80), program=call.program))
    (program,) = driver.state.conductor.programs
    assert (program.program_id, program.num_calls) == ("s", 2)


def test_limits_are_read_and_a_raw_request_is_a_call_all_the_same() -> None:
    body = {"prompt": "x", "max_tokens": 5}
    assert read_call("c", [], {"body": body}, "model").max_tokens == 5
    assert read_call("c", [object()], {}).token_ids == (0,)


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("data: {1}\n\ndata: {2}\n\n", 2),
        (b"data: {}\n\n", 1),
        (["data: {}", "data: {}"], 2),
        (object(), 1),
        ("text", 1),
    ],
)
def test_tokens_of_an_item(item: Any, expected: int) -> None:
    assert count_tokens(item) == expected


def test_a_call_whose_tokens_come_stays_counted() -> None:
    driver = Driver(num_replicas=1, timeout_s=10.0)
    assert isinstance(driver.send(text_call("long", "a" * 400, 4000)), PlacedCall)
    silent = driver.send(text_call("silent", "b" * 400, 4000))
    assert isinstance(silent, PlacedCall)
    for _ in range(30):
        driver.now += 1.0
        driver.state.see([Seen("long", driver.now, 1)])
        driver.state.tick(driver.now)
        driver.state.conductor.validate()
    assert set(driver.state.conductor.requests) == {"long"}
    driver.now += 11.0
    driver.state.tick(driver.now)
    assert not driver.state.conductor.requests
    for i in range(12):  # each request is alone again, so its times count as samples
        driver.run(text_call(f"c{i}", f"{i} " * (50 + 40 * (i % 4)), 9), 9)
    (state,) = driver.state.conductor.instances.values()
    assert state.info.cost.prefill_s(100, 0) == pytest.approx(PREFILL_S, rel=0.05)
