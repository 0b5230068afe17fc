"""Tests that the Conductor books each request once, places it again after faults, and ends it
once."""

from __future__ import annotations

import msgspec
import pytest
from conductor_desk import LAYOUT, PROMPT, Desk, of, sent

from moonpool.conductor.actions import (
    Deliver,
    InstanceLost,
    Refuse,
    RequestCancelled,
    RequestEnded,
    RequestFinished,
    Send,
    Tick,
)
from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    BlocksChanged,
    BlocksSnapshot,
    DecodeAccepted,
    PrefillDone,
    PrefillStarted,
    ReserveDecode,
    Resync,
    StartDecode,
    StartPrefill,
    StopReceiving,
    StreamBroken,
    TransferDone,
)
from moonpool.rewind.snapshot import dump
from moonpool.types import FinishReason, InstanceId, RequestId, Token


def test_the_life_of_a_request() -> None:
    desk = Desk("p0", "d0")
    first = desk.ask()
    assert [type(s.command) for s in of(first, Send)] == [ReserveDecode, StartPrefill]
    (_, start) = sent(first, StartPrefill)[0]
    assert start.target is not None and start.target.instance_id == "d0" and start.fetch is None
    desk.now = 1.0
    desk.report(
        "p0", PrefillStarted(attempt_id=AttemptId("r/1"), cached_tokens=4, fetched_tokens=0)
    )
    desk.now = 2.0
    assert sent(desk.prefilled(), StartDecode) == [
        ("d0", StartDecode(attempt_id=AttemptId("r/1"), token=Token(50)))
    ]
    desk.now = 3.0
    (deliver,) = of(desk.report("d0", DecodeAccepted(attempt_id=AttemptId("r/1"))), Deliver)
    assert deliver.tokens == (Token(50),) and deliver.cached_tokens == 4
    desk.tokens("d0", 51)
    last = desk.tokens("d0", 52, finish=FinishReason.STOP)
    (ended,) = of(last, RequestEnded)
    assert of(last, Deliver)[0].finish is FinishReason.STOP and not of(last, Send)
    record = ended.record
    assert record.outcome == "stop" and record.num_generated_tokens == 3
    assert (record.placed_s, record.prefill_started_s, record.prefill_done_s) == (0.0, 1.0, 2.0)
    assert (record.decode_started_s, record.ttft_s) == (3.0, 3.0)
    desk.assert_nothing_is_booked()


def test_an_answer_of_one_token_frees_the_reservation() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    done = PrefillDone(attempt_id=AttemptId("r/1"), token=Token(50), finish=FinishReason.STOP)
    actions = desk.report("p0", done)
    assert sent(actions, Abort) == [("d0", Abort(attempt_id=AttemptId("r/1")))]
    assert of(actions, RequestEnded)[0].record.outcome == "stop"
    desk.assert_nothing_is_booked()


def test_a_mixed_instance_serves_alone() -> None:
    desk = Desk("m0")
    (_, start) = sent(desk.ask(), StartPrefill)[0]
    assert start.target is None
    assert of(desk.tokens("m0", 50), Deliver)
    assert not desk.conductor.instances[InstanceId("m0")].prefills
    assert of(desk.tokens("m0", 51, finish=FinishReason.LENGTH), RequestEnded)
    desk.assert_nothing_is_booked()


def test_cancelling_aborts_both_halves() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    actions = desk.handle(RequestCancelled(RequestId("r")))
    assert {name for name, _ in sent(actions, Abort)} == {"p0", "d0"}
    assert of(actions, RequestEnded)[0].record.outcome == "abort" and not of(actions, Refuse)
    desk.assert_nothing_is_booked()
    assert desk.handle(RequestCancelled(RequestId("r"))) == []


def test_the_deadline_ends_a_request_in_any_stage() -> None:
    desk = Desk("p0", "d0")
    desk.ask(deadline_s=5.0)
    desk.now = 4.9
    assert desk.handle(Tick()) == []
    desk.now = 5.0
    actions = desk.handle(Tick())
    (refuse,) = of(actions, Refuse)
    assert (refuse.refusal.status, refuse.refusal.reason, refuse.refusal.retry_after_s) == (
        504,
        "deadline",
        None,
    )
    assert "during prefill" in refuse.refusal.message
    assert {name for name, _ in sent(actions, Abort)} == {"p0", "d0"}
    desk.assert_nothing_is_booked()


def test_a_lost_prefill_instance_ends_the_decode_half_at_once() -> None:
    desk = Desk("p0", "p1", "d0")
    first = sent(desk.ask(), StartPrefill)[0][0]
    other = {"p0": "p1", "p1": "p0"}[first]
    actions = desk.handle(InstanceLost(InstanceId(first), "it died"))
    assert sent(actions, Abort) == [("d0", Abort(attempt_id=AttemptId("r/1")))]
    ((name, start),) = sent(actions, StartPrefill)
    assert name == other and start.attempt.attempt_id == "r/2"


def test_after_a_loss_an_answer_goes_on_where_it_was() -> None:
    desk = Desk("p0", "d0", "d1")
    (_, start) = sent(desk.ask(), StartPrefill)[0]
    assert start.target is not None
    first = start.target.instance_id
    second = {"d0": "d1", "d1": "d0"}[first]
    desk.prefilled()
    desk.report(first, DecodeAccepted(attempt_id=AttemptId("r/1")))
    desk.tokens(first, 51)
    (_, start) = sent(desk.handle(InstanceLost(first, "it died")), StartPrefill)[0]
    assert start.attempt.token_ids == (*PROMPT, 50, 51)
    assert start.attempt.num_prompt_tokens == len(PROMPT)
    desk.prefilled("r/2", 52)
    actions = desk.report(second, DecodeAccepted(attempt_id=AttemptId("r/2")))
    assert of(actions, Deliver)[0].tokens == (Token(52),)
    actions = desk.tokens(second, 53, finish=FinishReason.STOP, work="r/2")
    assert of(actions, RequestEnded)[0].record.num_generated_tokens == 4
    desk.assert_nothing_is_booked()


def test_a_prefill_instance_lost_later_may_leave_an_unbegun_stream() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    desk.decoding()
    actions = desk.handle(InstanceLost(InstanceId("p0"), "it died"))
    assert sent(actions, StopReceiving) == [("d0", StopReceiving(attempt_id=AttemptId("r/1")))]
    assert len(actions) == 1, "the answer goes on"
    assert of(desk.tokens("d0", 51, finish=FinishReason.STOP), RequestEnded)
    desk.assert_nothing_is_booked()


def test_reports_of_an_old_attempt_are_ignored() -> None:
    desk = Desk("p0", "d0", "d1")
    desk.ask()
    decode = desk.conductor.requests[RequestId("r")].attempt.decode  # type: ignore[union-attr]
    assert decode is not None
    desk.prefilled()
    desk.handle(InstanceLost(decode, "it died"))
    assert desk.tokens("d0", 99) == []
    assert desk.report("d0", DecodeAccepted(attempt_id=AttemptId("r/1"))) == []
    assert (
        desk.report("p0", AttemptFailed(attempt_id=AttemptId("r/1"), reason="x", message="")) == []
    )


def test_a_failed_instance_is_tried_last() -> None:
    desk = Desk("p0", "p1", "d0")
    first = sent(desk.ask(), StartPrefill)[0][0]
    desk.ask("busy", token_ids=tuple(range(500, 900)))
    failed = AttemptFailed(attempt_id=AttemptId("r/1"), reason="engine_error", message="broken")
    second = sent(desk.report(first, failed), StartPrefill)[0][0]
    assert second != first, "though it would be faster"


def test_attempts_are_bounded() -> None:
    desk = Desk("p0", "d0", max_attempts=2)
    desk.ask()
    first = AttemptFailed(attempt_id=AttemptId("r/1"), reason="engine_error", message="broken")
    assert sent(desk.report("p0", first), StartPrefill)
    second = AttemptFailed(attempt_id=AttemptId("r/2"), reason="engine_error", message="broken")
    actions = desk.report("p0", second)
    (refuse,) = of(actions, Refuse)
    assert (refuse.refusal.status, refuse.refusal.reason) == (
        503,
        "engine_error",
    ) and "broken" in refuse.refusal.message
    assert (
        refuse.refusal.retry_after_s is not None
        and of(actions, RequestEnded)[0].record.attempts == 2
    )
    desk.assert_nothing_is_booked()


def test_a_request_that_an_engine_refuses_is_not_retried() -> None:
    desk = Desk("p0", "p1", "d0")
    desk.ask()
    name = desk.conductor.requests[RequestId("r")].attempt.prefill  # type: ignore[union-attr]
    failed = AttemptFailed(
        attempt_id=AttemptId("r/1"), reason="refused_by_engine", message="no such form"
    )
    actions = desk.report(name, failed)
    (refuse,) = of(actions, Refuse)
    assert (refuse.refusal.status, refuse.refusal.message) == (400, "no such form")
    assert refuse.refusal.retry_after_s is None
    assert not sent(actions, StartPrefill)
    desk.assert_nothing_is_booked()


def test_the_handle_of_a_kvcache_reaches_the_decode_instance() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    done = PrefillDone(attempt_id=AttemptId("r/1"), token=Token(token_id=7), handle=b"there")
    ((decode, start),) = sent(desk.report("p0", done), StartDecode)
    assert (decode, start.handle) == ("d0", b"there")


def test_a_begun_answer_is_not_rejected_for_its_slo() -> None:
    desk = Desk("p0", "d0")
    desk.ask(ttft_s=0.05)
    desk.decoding()
    for number in range(40):  # makes the queue far longer than the SLO allows
        desk.ask(f"other{number}", token_ids=tuple(range(100 * number, 100 * number + 50)))
    failed = AttemptFailed(attempt_id=AttemptId("r/1"), reason="engine_error", message="broken")
    actions = desk.report("d0", failed)
    assert sent(actions, StartPrefill) and not of(actions, Refuse)


def test_overload_is_rejected_before_any_work() -> None:
    desk = Desk("p0", "d0", admission="early")
    refused: list[Refuse] = []
    for number in range(40):
        prompt = tuple(range(100 * number, 100 * number + 50))
        actions = desk.ask(f"r{number}", token_ids=prompt, ttft_s=0.5)
        if of(actions, Refuse):
            assert not of(actions, Send)
            assert of(actions, RequestEnded)[0].record.attempts == 0
            refused += of(actions, Refuse)
    assert len(refused) == 30, "10 prompts of 50 ms fit into half a second"
    assert all((r.refusal.status, r.refusal.reason) == (429, "ttft_slo") for r in refused)
    assert all(1 <= (r.refusal.retry_after_s or 0) <= 120 for r in refused)


def test_room_is_booked_for_the_answer_too() -> None:
    desk = Desk("p0", "d0", num_blocks=10)  # answers have 4 tokens; the prompts have 10
    assert sent(desk.ask("a", max_tokens=13), StartPrefill)  # 23 tokens, which hold 6 blocks
    # 17 tokens would fit as tokens, but not as blocks
    refused = desk.ask("b", max_tokens=7, ttft_s=0.02)
    (refuse,) = of(refused, Refuse)
    assert (refuse.refusal.status, refuse.refusal.reason) == (503, "no_decode_capacity")
    assert sent(desk.ask("c", max_tokens=6), StartPrefill)
    desk.handle(RequestCancelled(RequestId("a")))
    assert sent(desk.ask("d", max_tokens=14), StartPrefill)


def test_an_answer_longer_than_booked_takes_room() -> None:
    desk = Desk("m0", num_blocks=10)  # 40 tokens
    desk.conductor.output_predictor.lengths.mean.value = 1.0
    desk.ask("r", max_tokens=25)
    assert sent(desk.ask("early", max_tokens=1, token_ids=tuple(range(28))), StartPrefill)
    desk.handle(RequestCancelled(RequestId("early")))
    desk.tokens("m0", *range(20))
    (refuse,) = of(desk.ask("late", max_tokens=2, ttft_s=0.02), Refuse)
    assert refuse.refusal.reason == "no_decode_capacity"


def test_a_prefill_on_a_mixed_instance_takes_room_from_the_decodes() -> None:
    """Otherwise, the Conductor could admit a request for which prefills leave no blocks."""
    desk = Desk("m0", num_blocks=10)  # 40 tokens
    desk.ask("one", max_tokens=1, token_ids=tuple(range(30)))  # 8 blocks
    (refuse,) = of(desk.ask("b", max_tokens=2, ttft_s=0.02), Refuse)
    assert refuse.refusal.reason == "no_decode_capacity"
    desk.tokens("m0", 50, finish=FinishReason.LENGTH, work="one/1")
    assert sent(desk.ask("c", max_tokens=2), StartPrefill)


def test_without_instances_a_request_is_rejected() -> None:
    (refuse,) = of(Desk().ask(), Refuse)
    assert (refuse.refusal.status, refuse.refusal.reason, refuse.refusal.retry_after_s) == (
        503,
        "no_instance",
        5.0,
    )


def test_requests_of_one_prefix_follow_it() -> None:
    """The second request arrives while the first is computed: expected blocks count as a hit."""
    desk = Desk("p0", "p1", "d0")
    prompt = tuple(range(400))
    busy = sent(desk.ask("z", token_ids=tuple(range(500, 600))), StartPrefill)[0][0]
    first = sent(desk.ask("a", token_ids=prompt), StartPrefill)[0][0]
    second = sent(desk.ask("b", token_ids=(*prompt, 1)), StartPrefill)[0][0]
    other = sent(desk.ask("c", token_ids=(*prompt, 1), tenant="x"), StartPrefill)[0][0]
    assert second == first != busy
    assert other == busy, "what another tenant computes is no hit"


def test_a_fetch_names_the_time_its_source_reads_from_the_ssd() -> None:
    desk = Desk("p0", "d0")
    prompt = tuple(range(400))
    keys = block_keys(prompt, LAYOUT.block_tokens, root_key(LAYOUT.fingerprint, ""))
    row = desk.conductor.instances[InstanceId("d0")].row
    desk.conductor.instance_table.s_per_ssd_byte[row] = 1e-3 / LAYOUT.block_bytes
    desk.report("d0", BlocksSnapshot(next_sequence=0, keys=tuple(keys[:40])))
    desk.report("d0", BlocksChanged(sequence=0, demoted=tuple(keys[40:])))
    (_, start) = sent(desk.ask("a", token_ids=prompt), StartPrefill)[0]
    assert start.fetch is not None and start.fetch.num_blocks == 99
    assert start.fetch.load_s == pytest.approx(0.059)


def test_a_prefix_on_another_instance_is_fetched() -> None:
    desk = Desk("p0", "d0")
    prompt = tuple(range(400))
    keys = block_keys(prompt, LAYOUT.block_tokens, root_key(LAYOUT.fingerprint, ""))
    desk.report("d0", BlocksSnapshot(next_sequence=0, keys=tuple(keys)))
    (_, start) = sent(desk.ask("a", token_ids=prompt), StartPrefill)[0]
    assert start.fetch is not None and start.fetch.source.instance_id == "d0"
    assert start.fetch.num_blocks == 99, "one token must be computed"
    assert len(desk.conductor.instances[InstanceId("d0")].serving) == 1
    private = sent(desk.ask("b", token_ids=prompt, use_cache=False), StartPrefill)[0][1]
    assert private.fetch is None
    desk.handle(InstanceLost(InstanceId("d0"), "it died"))
    assert desk.conductor.num_waiting == 2, "nobody is left to decode"


def test_a_gap_in_the_events_requests_a_snapshot() -> None:
    desk = Desk("p0", "d0")
    assert desk.report("p0", BlocksSnapshot(next_sequence=3, keys=())) == []
    assert desk.report("p0", BlocksChanged(sequence=3)) == []
    assert sent(desk.report("p0", BlocksChanged(sequence=5)), Resync) == [("p0", Resync())]
    assert desk.report("p0", BlocksChanged(sequence=6)) == [], "it was asked already"
    assert desk.report("p0", BlocksSnapshot(next_sequence=7, keys=())) == []
    assert sent(desk.report("p0", BlocksChanged(sequence=8)), Resync) == [("p0", Resync())]


def test_joining_again_ends_the_old_incarnation() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    actions = desk.join("p0", incarnation=2)
    assert sent(actions, Abort) == [("d0", Abort(attempt_id=AttemptId("r/1")))]
    assert sent(actions, Resync)
    assert [name for name, _ in sent(actions, StartPrefill)] == ["p0"]
    assert not of(actions, Refuse)


def test_a_broken_stream_is_not_waited_for() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    actions = desk.report("p0", StreamBroken(attempt_id=AttemptId("r/1"), error="no route"))
    assert sent(actions, StopReceiving) == [("d0", StopReceiving(attempt_id=AttemptId("r/1")))]
    assert len(actions) == 1


def test_a_decode_with_a_broken_stream_is_told_to_go_on_unless_its_attempt_has_ended() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    desk.prefilled()
    broken = TransferDone(AttemptId("r/1"), 0, 0.1, corrupt_slices=1, error="broken")
    stop = StopReceiving(attempt_id=AttemptId("r/1"))
    assert sent(desk.report("d0", broken), StopReceiving) == [("d0", stop)]
    desk.handle(RequestCancelled(RequestId("r")))
    assert not desk.report("d0", broken)


def test_the_second_check_of_the_slo_may_reject() -> None:
    desk = Desk("p0", "d0", max_attempts=1)
    desk.ask()
    desk.prefilled()
    failed = AttemptFailed(attempt_id=AttemptId("r/1"), reason="tbt_slo", message="too slow")
    actions = desk.report("d0", failed)
    assert (of(actions, Refuse)[0].refusal.status, of(actions, Refuse)[0].refusal.reason) == (
        429,
        "tbt_slo_late",
    )
    assert {name for name, _ in sent(actions, Abort)} == {"p0", "d0"}


def test_reports_of_unknown_instances_are_ignored() -> None:
    assert Desk("p0").report("p7", BlocksChanged(sequence=0)) == []


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    desk = Desk("m0")
    for number in range(500):
        desk.ask(f"ended-{number}", deadline_s=1e9)
        desk.handle(RequestCancelled(RequestId(f"ended-{number}")))
    assert dump(desk.conductor).count(b"ended-") < 100


def finished(num_tokens: int, reason: FinishReason = FinishReason.STOP) -> RequestFinished:
    return RequestFinished(RequestId("r"), reason, num_tokens)


def test_a_stop_string_is_a_finish_and_frees_the_engine() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    desk.decoding()
    desk.now = 1.0
    desk.tokens("d0", 51, 52, 53)
    learned = desk.conductor.output_predictor.lengths.mean
    assert learned.count == 0
    actions = desk.handle(finished(3))
    record = of(actions, RequestEnded)[0].record
    assert (record.outcome, record.num_generated_tokens) == ("stop", 3)
    assert record.num_surplus_tokens == 1 and not of(actions, Refuse)
    assert {name for name, _ in sent(actions, Abort)} == {"p0", "d0"}
    assert (learned.count, learned.value) == (1, 3.0), "what learns from answers learns from it"
    assert desk.handle(finished(3)) == []
    assert desk.tokens("d0", 54) == [], "late tokens change nothing"
    desk.assert_nothing_is_booked()


def test_a_stop_string_that_is_found_after_a_fault_is_a_finish() -> None:
    """A slow reader finds the record while the request waits for its next attempt."""
    desk = Desk("p0", "d0")
    desk.ask()
    desk.decoding()
    desk.tokens("d0", 51, 52)
    desk.handle(InstanceLost(InstanceId("d0"), "it died"))
    assert desk.conductor.num_waiting == 1
    (ended,) = of(desk.handle(finished(2)), RequestEnded)
    assert (ended.record.outcome, ended.record.num_generated_tokens) == ("stop", 2)
    assert desk.conductor.num_waiting == 0
    desk.assert_nothing_is_booked()


def test_a_prefill_is_wasted_unless_its_attempt_gives_the_whole_answer() -> None:
    desk = Desk("p0", "d0")
    desk.ask()
    started = PrefillStarted(attempt_id=AttemptId("r/1"), cached_tokens=0, fetched_tokens=0)
    desk.report("p0", started)
    desk.now = 2.0
    failed = AttemptFailed(attempt_id=AttemptId("r/1"), reason="engine_error", message="oops")
    desk.report("p0", failed)
    desk.report("p0", msgspec.structs.replace(started, attempt_id=AttemptId("r/2")))
    desk.now = 5.0
    desk.decoding("r/2")
    desk.now = 9.0
    (ended,) = of(desk.tokens("d0", 51, finish=FinishReason.STOP, work="r/2"), RequestEnded)
    record = ended.record
    assert (record.prefills_took_s, record.wasted_prefills_took_s) == (5.0, 2.0)
    assert (record.num_wasted_prefills, record.outcome) == (1, "stop")
    assert sum(record.stages_s().values()) == 9.0


def test_an_embedding_is_no_answer_of_one_token() -> None:
    desk = Desk("p0", "d0")
    desk.ask(pooling="last", max_tokens=1)
    done = PrefillDone(
        attempt_id=AttemptId("r/1"), token=Token(0, payload=b"abcd"), finish=FinishReason.STOP
    )
    (ended,) = of(desk.report("p0", done), RequestEnded)
    assert (ended.record.outcome, ended.record.num_generated_tokens) == ("stop", 0)
    assert ended.record.ttft_s == 0.0
    assert desk.conductor.output_predictor.lengths.mean.count == 0
