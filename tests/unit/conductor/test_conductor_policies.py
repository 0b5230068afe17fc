"""Tests block keys, rejections by decode instances, and what the Conductor learns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from conductor_desk import LAYOUT, Desk, of, sent

from moonpool.conductor.actions import ConductorAction, InstanceLost, Refuse, RequestEnded, Tick
from moonpool.conductor.admission.policies import UNLIMITED
from moonpool.protocol.messages import (
    AttemptFailed,
    AttemptId,
    AttemptTokens,
    BlocksSnapshot,
    DecodeAccepted,
    PrefillStarted,
    ReserveDecode,
    StartPrefill,
    StepTokens,
)
from moonpool.types import BlockKey, FinishReason, InstanceId, RequestId, Slo, Token


class Unread(Sequence[int]):
    """A list of token ids of which the Conductor may read only the length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("the tokens were read")


def names(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(bytes([number]) * 16) for number in numbers)


def test_given_keys_replace_those_of_the_tokens() -> None:
    desk = Desk("p0", "p1", "d0")
    desk.report("p1", BlocksSnapshot(next_sequence=0, keys=names(1, 2)))
    prompt = Unread(15)
    ((name, start),) = sent(desk.ask("a", token_ids=prompt, keys=names(1, 2, 3)), StartPrefill)
    assert name == "p1", "where two of its blocks are"
    assert start.attempt.token_ids is prompt and start.attempt.keys == names(1, 2, 3)
    expecting = desk.conductor.index.expected(InstanceId("p1"))
    assert expecting == set(names(3)), "what is there already need not come"
    work = sent(desk.ask("b", token_ids=Unread(15), keys=names(9), use_cache=False), StartPrefill)
    assert work[0][1].attempt.keys == names(9)
    assert not desk.conductor.index.expected(InstanceId("p0"))


def test_keys_stay_those_of_the_prompt_when_an_answer_goes_on() -> None:
    desk = Desk("p0", "d0", "d1")
    (_, start) = sent(desk.ask(token_ids=range(10), keys=names(1, 2)), StartPrefill)[0]
    assert start.attempt.token_ids == range(10)
    assert start.target is not None
    first = start.target.instance_id
    desk.prefilled()
    desk.report(first, DecodeAccepted(attempt_id=AttemptId("r/1")))
    desk.tokens(first, *range(51, 54))
    (_, start) = sent(desk.handle(InstanceLost(first, "it died")), StartPrefill)[0]
    assert start.attempt.token_ids == (*range(10), 50, 51, 52, 53)
    assert start.attempt.keys == names(1, 2) and start.attempt.num_prompt_tokens == 10
    assert start.attempt.slo == UNLIMITED, "it is not taken back for being slow"


def test_workers_compute_the_keys_of_prompts_with_tokens() -> None:
    (_, start) = sent(Desk("p0", "d0").ask(), StartPrefill)[0]
    assert start.attempt.keys is None


def test_several_steps_in_one_report_keep_their_gaps() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    desk.decoding()
    desk.now = 1.0
    item = AttemptTokens(attempt_id=AttemptId("r/1"), tokens=(Token(1), Token(2), Token(3)))
    desk.report("d0", StepTokens(attempts=(item,), gap_s=0.25))
    assert desk.conductor.requests[RequestId("r")].record.gaps_s == [0.5, 0.25, 0.25]


def fail(desk: Desk, reason: str = "tbt_slo", work: str = "r/1") -> list[ConductorAction]:
    failed = AttemptFailed(attempt_id=AttemptId(work), reason=reason, message="too slow")
    return desk.report("d0", failed)


@pytest.mark.parametrize("admission", ["baseline", "early", "predictive"])
def test_the_decode_instance_checks_last(admission: str) -> None:
    desk = Desk("p0", "d0", "d1", admission=admission)
    desk.ask()
    desk.prefilled()
    actions = fail(desk)
    assert not sent(actions, StartPrefill), "it is not placed again"
    (refuse,) = of(actions, Refuse)
    assert (refuse.refusal.status, refuse.refusal.reason) == (429, "tbt_slo_late")
    record = of(actions, RequestEnded)[0].record
    assert record.outcome == "tbt_slo_late" and record.prefill_done_s is not None
    desk.assert_nothing_is_booked()
    desk.ask("s")
    assert sent(fail(desk, "engine_error", "s/2"), StartPrefill), "other failures are tried again"


def test_without_admission_no_instance_checks_an_slo_either() -> None:
    desk = Desk("p0", "d0", admission="none", decode_wait=False)
    (_, start) = sent(desk.ask(tbt_s=0.001), StartPrefill)[0]
    assert start.attempt.slo == UNLIMITED and start.attempt.max_step_s is None
    (_, start) = sent(Desk("p0", "d0", load_limit=0.5).ask(tbt_s=1.0), StartPrefill)[0]
    assert start.attempt.slo.tbt_s == 0.5, "the second look is at the same load"


@pytest.mark.parametrize("admission", ["none", "baseline", "early", "predictive", "goodput"])
def test_an_admitted_request_waits_for_room_whatever_the_admission(admission: str) -> None:
    """`decode_wait` must not depend on the admission policy: the decode instance learns which step
    time to wait for."""
    (_, start) = sent(Desk("p0", "d0", admission=admission).ask(tbt_s=0.015), StartPrefill)[0]
    assert start.attempt.max_step_s is not None and start.attempt.max_step_s <= 0.015
    desk = Desk("p0", "d0", admission=admission, decode_wait=False)
    (_, start) = sent(desk.ask(tbt_s=0.015), StartPrefill)[0]
    assert start.attempt.max_step_s is None


@pytest.mark.parametrize("admission", ["none", "baseline", "early", "predictive", "goodput"])
def test_only_none_goes_on_waiting_after_the_ttft_slo(admission: str) -> None:
    """The policy `none` rejects no request for its SLO, so it must not reject a request that waits
    for a decode batch."""
    desk = Desk("p0", "d0", admission=admission)
    desk.ask(ttft_s=2.0, tbt_s=0.015)
    desk.prefilled()
    desk.now = 2.5
    refused = of(desk.handle(Tick()), Refuse)
    assert [one.refusal.reason for one in refused] == (
        [] if admission == "none" else ["ttft_slo_late"]
    )


@pytest.mark.parametrize(
    ("admission", "tolerance"), [("baseline", 1.0), ("early", 1.1), ("predictive", 1.1)]
)
def test_only_a_first_check_is_strict(admission: str, tolerance: float) -> None:
    (_, start) = sent(Desk("p0", "d0", admission=admission).ask(), StartPrefill)[0]
    assert start.attempt.tolerance == tolerance


@pytest.mark.parametrize("admission", ["goodput", "baseline", "early", "predictive"])
def test_a_request_that_lost_its_instance_is_not_refused_for_its_slo(admission: str) -> None:
    desk = Desk("p0", "p1", "d0", admission=admission)
    first = sent(desk.ask(ttft_s=5.0), StartPrefill)[0][0]
    desk.now = 4.995  # 5 ms before its first token is due; a prefill takes 10 ms
    again = desk.handle(InstanceLost(InstanceId(first), "it died"))
    assert not of(again, Refuse)
    ((second, start),) = sent(again, StartPrefill)
    assert second != first and start.attempt.slo is UNLIMITED


def test_the_limit_of_an_attempt_that_waits_for_room_ends_with_it() -> None:
    desk = Desk("p0", "d0", "d1")
    ((first, _),) = sent(desk.ask(ttft_s=2.0, tbt_s=0.015), ReserveDecode)
    desk.prefilled()
    again = desk.handle(InstanceLost(InstanceId(first), "it died"))
    ((_, start),) = sent(again, StartPrefill)
    desk.now = 1.99
    desk.prefilled(start.attempt.attempt_id)
    desk.now = 2.01
    assert not of(desk.handle(Tick()), Refuse)


def test_the_queue_is_the_waiting_and_the_rest_of_the_running_prefills() -> None:
    desk = Desk("p0", "d0")
    for number in (1, 2, 3):
        prompt = tuple(range(1000 * number, 1000 * number + 100))  # a prompt that takes 0.1 s
        desk.ask(f"r{number}", token_ids=prompt)
    queue_s = lambda: float(desk.conductor.instance_table.queue_s(desk.now)[0])  # noqa: E731
    assert queue_s() == pytest.approx(0.3)
    started = PrefillStarted(attempt_id=AttemptId("r1/1"), cached_tokens=0, fetched_tokens=0)
    desk.report("p0", started)
    desk.now = 0.06
    assert queue_s() == pytest.approx(0.24)
    started = PrefillStarted(attempt_id=AttemptId("r2/2"), cached_tokens=0, fetched_tokens=0)
    desk.report("p0", started)  # runs beside the first request, because they share the instance
    assert queue_s() == pytest.approx(0.24)
    desk.now = 0.08
    desk.prefilled("r1/1")
    assert queue_s() == pytest.approx(0.2)
    desk.now = 5.0
    assert queue_s() == pytest.approx(0.1), "what should be over long since counts for nothing"


def test_loads_are_present_and_projected() -> None:
    desk = Desk("p0", "d0", "d1")
    desk.conductor.default_slo = Slo(ttft_s=1.0, tbt_s=0.1)
    assert desk.conductor.loads(0.0) == (0.0, 0.0, 0.0)
    desk.ask(token_ids=tuple(range(500)))
    loads = desk.conductor.loads(0.0)
    assert loads.prefill == pytest.approx(0.5) and loads.decode == 0.0
    assert loads.decode_projected == pytest.approx((0.01 + 0.0005) / 0.1)
    desk.now = 0.5
    work = desk.conductor.requests[RequestId("r")].attempt
    assert work is not None
    desk.prefilled()
    desk.report(work.decoder, DecodeAccepted(attempt_id=AttemptId("r/1")))
    loads = desk.conductor.loads(0.5)
    assert loads.prefill == 0.0 and loads.decode == pytest.approx(0.011 / 0.1 / 2)


@pytest.mark.parametrize("prediction", ["duration", "length"])
def test_durations_and_lengths_are_learned_from_answers(prediction: str) -> None:
    desk = Desk("p0", "d0", decode_prediction=prediction)
    for number in range(1, 40):
        desk.ask(f"r{number}", max_tokens=50)
        desk.prefilled(f"r{number}/{number}")
        desk.report("d0", DecodeAccepted(attempt_id=AttemptId(f"r{number}/{number}")))
        desk.now += 0.5
        desk.tokens("d0", *range(9), work=f"r{number}/{number}", finish=FinishReason.STOP)
    assert desk.conductor.forecast.mean_s == pytest.approx(0.5)
    assert desk.conductor.output_predictor.lengths.predict(10, (), 0) == pytest.approx(10.0)
    assert (
        desk.conductor.output_predictor.lengths.error.count
        == {"duration": 0, "length": 39}[prediction]
    )
    desk.ask("new", max_tokens=50)
    attempt = desk.conductor.requests[RequestId("new")].attempt
    assert attempt is not None and attempt.interval is not None
    begins_s = desk.now + 0.01
    there = [desk.conductor.forecast.project(begins_s + s, desk.now)[0] for s in (0.2, 2.0)]
    # These are 10 tokens of 11 ms, or half a second.
    assert there[0] == {"duration": 1.0, "length": 0.0}[prediction]
    assert there[1] < 0.2, "the first guess of 20 s at most is not forgotten yet"


def test_an_answer_that_outlives_its_prediction_stays_in_the_forecast() -> None:
    desk = Desk("p0", "d0", decode_prediction="length")
    desk.conductor.output_predictor.lengths.learn(10, (), 4, 4.0)
    desk.ask(max_tokens=500)
    desk.decoding()
    attempt = desk.conductor.requests[RequestId("r")].attempt
    assert attempt is not None and attempt.interval_tokens == 4
    desk.now = 2.0
    assert desk.conductor.forecast.project(2.0, 2.0)[0] == 0
    desk.tokens("d0", *range(100))
    assert attempt.interval_tokens == 152
    assert desk.conductor.forecast.project(2.0, 2.0)[0] == 1


def test_a_prompt_that_just_fits_is_admitted() -> None:
    """The predicted length of an answer is 256 tokens."""
    desk = Desk("p0", "d0", num_blocks=10)
    capacity = 10 * LAYOUT.block_tokens
    assert sent(desk.ask(token_ids=range(capacity - 1), max_tokens=100), StartPrefill)
    full = Desk("p0", "d0", num_blocks=10)
    (refuse,) = of(full.ask(token_ids=range(capacity), max_tokens=100), Refuse)
    assert (refuse.refusal.status, refuse.refusal.reason) == (422, "no_prefill_capacity")
    assert "the prompt of 40 tokens and an answer do not fit" in refuse.refusal.message
