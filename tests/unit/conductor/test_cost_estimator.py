"""Tests that cost estimates follow the measurements of an instance, and end with the instance."""

from __future__ import annotations

import msgspec
import pytest
from conductor_desk import COST, LAYOUT, Desk, of

from moonpool.conductor.actions import ConductorAction, InstanceLost, Refuse, Send
from moonpool.conductor.forecast.cost_estimator import PROBE_EVERY_S
from moonpool.cost.online import MAX_FACTOR, MIN_SAMPLES, STEPS_PER_SAMPLE
from moonpool.cost.recorded import parse_beliefs
from moonpool.protocol.messages import (
    AttemptId,
    AttemptTokens,
    DecodeAccepted,
    PrefillDone,
    PrefillStarted,
    ReserveDecode,
    StepTokens,
)
from moonpool.types import FinishReason, InstanceId, RequestId, Token

ENOUGH = MIN_SAMPLES * STEPS_PER_SAMPLE + 1  # one more, because a sample ends with the next event
PREFILL_S = COST.prefill_s(10, 0)


def serve(desk: Desk, number: int, prefill_s: float, step_s: float, num_steps: int = 1) -> None:
    """Serves one request alone, with these durations."""
    work = AttemptId(f"r{number}/{number}")
    desk.ask(f"r{number}", use_cache=False)
    desk.report("p0", PrefillStarted(work, 0, 0))
    desk.now += prefill_s
    desk.report("p0", PrefillDone(work, Token(50)))
    desk.report("d0", DecodeAccepted(work))
    desk.now += step_s * num_steps
    tokens = (Token(60),) * num_steps
    item = AttemptTokens(work, tokens, FinishReason.LENGTH)
    desk.report("d0", StepTokens(attempts=(item,), gap_s=step_s))


def predicted(desk: Desk) -> tuple[float, float]:
    desk.ask("probe")
    tracked = desk.conductor.requests[RequestId("probe")]
    record = tracked.record
    assert record.predicted_ttft_s is not None and record.predicted_tbt_s is not None
    return record.predicted_ttft_s, record.predicted_tbt_s


def slow_desk(count: int = ENOUGH, **config: object) -> Desk:
    """Returns a desk whose instance takes three times the profile's time for a prefill, and twice
    for a step."""
    desk = Desk("p0", "d0", **config)
    for number in range(1, count + 1):
        serve(desk, number, 3 * PREFILL_S, 2 * COST.decode_step_s(1, 11))
    return desk


def test_predictions_follow_measurements() -> None:
    ttft_s, tbt_s = predicted(Desk("p0", "d0"))
    slow_ttft_s, slow_tbt_s = predicted(slow_desk())
    assert slow_ttft_s == pytest.approx(3 * ttft_s)
    assert slow_tbt_s == pytest.approx(2 * tbt_s)


def test_a_few_samples_of_steps_change_nothing() -> None:
    assert predicted(slow_desk(ENOUGH - 1))[1] == predicted(Desk("p0", "d0"))[1]


def test_the_first_prompts_correct_those_behind_them() -> None:
    """The mean also counts one imagined prompt that took the expected time."""
    once_s = predicted(Desk("p0", "d0"))[0]
    for count, factor in [(1, 2.0), (2, 7 / 3), (3, 2.5), (ENOUGH - 1, 1 + 2 * 12 / 13)]:
        assert predicted(slow_desk(count))[0] == pytest.approx(factor * once_s)
    assert predicted(slow_desk(2, learning=False))[0] == once_s


def test_a_prompt_that_is_late_corrects_those_behind_it() -> None:
    """A prefill under way takes at least as long as it has taken. A prompt that has only just begun
    must not change the estimate."""
    waits_s = []
    for late in (0.5, 1.0, 3.0):
        desk = Desk("p0", "d0")
        desk.ask("r1", use_cache=False)
        desk.report("p0", PrefillStarted(AttemptId("r1/1"), 0, 0))
        desk.now += late * PREFILL_S
        waits_s.append(predicted(desk)[0] / PREFILL_S)
    assert waits_s == pytest.approx([1.5, 1.0, 2.0])


def test_instances_without_a_prompt_begin_with_what_those_of_their_profile_learned() -> None:
    desk = Desk("p0", "p1", "d0")
    states = desk.conductor.instances
    found = []
    for number in (1, 2):
        asked = f"r{number}"
        desk.ask(asked, use_cache=False)
        tracked = desk.conductor.requests[RequestId(asked)]
        assert tracked.attempt is not None
        name = tracked.attempt.prefill
        desk.report(name, PrefillStarted(tracked.attempt.attempt_id, 0, 0))
        desk.now += 3 * PREFILL_S
        desk.report(name, PrefillDone(tracked.attempt.attempt_id, Token(50)))
        desk.conductor.cost_estimator.learn_first_prefills(desk.now)
        found.append(sorted(state.prefill_factor.value for state in states.values()))
    assert found == [[2.0] * 3, [2.0, 2.0, 2.5]], "the second one began with the first one's"


def test_without_learning_the_profile_holds_and_samples_are_kept() -> None:
    desk = slow_desk(learning=False)
    record = desk.conductor.cost_estimator.record(list(desk.conductor.instances.values()))
    assert record.instances[0].factors["prefill"] == pytest.approx(3.0)
    assert predicted(desk) == predicted(Desk("p0", "d0"))


def test_measurements_equal_to_the_profile_change_nothing() -> None:
    desk = Desk("p0", "d0")
    table = desk.conductor.instance_table
    before = (
        table.prefill_s_per_token.copy(),
        table.decode_base_s.copy(),
        table.decode_s_per_sequence.copy(),
    )
    for number in range(1, 3 * ENOUGH):
        serve(desk, number, PREFILL_S, COST.decode_step_s(1, 11))
    assert [list(x) for x in before] == [
        list(x)
        for x in (table.prefill_s_per_token, table.decode_base_s, table.decode_s_per_sequence)
    ]


def test_repeated_steps_are_steps() -> None:
    desk = Desk("p0", "d0")
    for number in range(1, ENOUGH + 1):
        serve(desk, number, PREFILL_S, 2 * COST.decode_step_s(1, 11), num_steps=5)
    factors = desk.conductor.instances[InstanceId("d0")].decode_factor
    assert factors.value == pytest.approx(2.0)


def test_a_mixed_step_is_no_sample_of_decodes() -> None:
    desk = Desk("p0", "d0")
    desk.ask("r")
    desk.decoding()
    for _ in range(4 * ENOUGH):
        desk.now += 1.0
        # these steps have a gap_s of 0, because they are not of decodes alone
        desk.tokens("d0", 60)
    assert desk.conductor.instances[InstanceId("d0")].decode_factor.samples == ()


def test_prefills_in_a_queue_are_timed_one_after_another() -> None:
    """All prefills have been announced as started. The wait for the prefill before must not count
    as slowness."""
    desk = Desk("p0", "d0")
    works = []
    for number in range(1, 2 * ENOUGH + 1):
        desk.ask(f"r{number}", use_cache=False)
        works.append(AttemptId(f"r{number}/{number}"))
        desk.report("p0", PrefillStarted(works[-1], 0, 0))
    for work in works:
        desk.now += 2 * PREFILL_S
        desk.report("p0", PrefillDone(work, Token(50), FinishReason.STOP))
    state = desk.conductor.instances[InstanceId("p0")]
    assert state.prefill_factor.value == pytest.approx(2.0)


@pytest.mark.parametrize("learning", [True, False])
def test_a_new_factor_applies_to_the_present_queue(learning: bool) -> None:
    """The wait for prefills that were booked with the old factor must follow the new factor."""
    desk = Desk("p0", "d0", learning=learning)
    works = []
    for number in range(1, 3 * ENOUGH + 1):
        desk.ask(f"r{number}", use_cache=False)
        works.append(AttemptId(f"r{number}/{number}"))
    left = len(works) - ENOUGH
    for work in works[:ENOUGH]:
        desk.report("p0", PrefillStarted(work, 0, 0))
        desk.now += 2 * PREFILL_S
        desk.report("p0", PrefillDone(work, Token(50), FinishReason.STOP))
    queue_s = desk.conductor.instance_table.queue_s(desk.now).item(0)
    assert queue_s == pytest.approx(left * PREFILL_S * (2 if learning else 1))


def test_admission_corrects_for_late_first_tokens() -> None:
    desk = Desk("p0", "d0")
    for number in range(1, MIN_SAMPLES + 2):
        serve(desk, number, 1.5 * PREFILL_S, COST.decode_step_s(1, 11))
    assert desk.conductor.instance_table.ttft_tail == pytest.approx(1.5)
    for number in range(MIN_SAMPLES + 2, MIN_SAMPLES + 50):
        serve(desk, number, 0.5 * PREFILL_S, COST.decode_step_s(1, 11))
    assert desk.conductor.instance_table.ttft_tail == 1.0, (
        "never is more promised than is predicted"
    )


def test_measured_time_is_compared_with_the_tokens_actually_computed() -> None:
    """Half of the prompt was cached, and the prefill took half of the time."""
    desk = Desk("p0", "d0")
    for number in range(1, 2 * ENOUGH):
        work = AttemptId(f"r{number}/{number}")
        desk.ask(f"r{number}", use_cache=False)
        desk.report("p0", PrefillStarted(work, 5, 0))
        desk.now += COST.prefill_s(10, 5)
        desk.report("p0", PrefillDone(work, Token(50), FinishReason.STOP))
    assert desk.conductor.instances[InstanceId("p0")].prefill_factor.value == 1.0


def test_on_a_mixed_instance_decodes_explain_longer_prefills() -> None:
    """Prompts share steps with the decodes of an answer. The prediction includes the decodes, so
    the instance must not count as slow."""
    desk = Desk("m0", chunk_tokens=4)
    desk.ask("r1", max_tokens=100)
    work = AttemptId("r1/1")
    desk.report("m0", PrefillStarted(work, 0, 0))
    desk.tokens("m0", 50, work=work)
    table = desk.conductor.instance_table
    assert table.decoding_batch.item(0) == 1
    beside_s = table.prefill_s(10, 0.0).item(0)
    # A step of 3 prompt tokens and a decode takes as long as reading the weights.
    assert beside_s == pytest.approx(PREFILL_S * COST.decode_step_s(1, 0) / 0.003)
    for number in range(2, ENOUGH + 2):
        work = AttemptId(f"r{number}/{number}")
        desk.ask(f"r{number}", use_cache=False)
        desk.report("m0", PrefillStarted(work, 0, 0))
        desk.now += beside_s
        desk.tokens("m0", 50, finish=FinishReason.STOP, work=work)
    factor = desk.conductor.instances[InstanceId("m0")].prefill_factor
    assert factor.value == 1.0 and factor.samples == pytest.approx([1.0] * MIN_SAMPLES, abs=0.07)


def test_transfer_times_are_learned() -> None:
    desk = Desk("p0", "p1", "d0")
    num_bytes = 8 * LAYOUT.token_bytes
    expected_s = COST.transfer_s(num_bytes, same_host=True)
    for number in range(1, ENOUGH + 1):
        work = AttemptId(f"r{number}/{number}")
        desk.ask(f"r{number}", use_cache=False)
        tracked = desk.conductor.requests[RequestId(f"r{number}")]
        attempt = tracked.attempt
        assert attempt is not None
        prefill = attempt.prefill
        attempt.fetch_from = InstanceId("p1" if prefill == "p0" else "p0")
        started = PrefillStarted(work, 8, 8, fetch_s=3 * expected_s)
        desk.conductor.cost_estimator.prefill_started(tracked, started, desk.now)
        attempt.fetch_from = None
        desk.report(prefill, PrefillDone(work, Token(50), FinishReason.STOP))
    factors = [desk.conductor.instances[InstanceId(p)].transfer_factor for p in ("p0", "p1")]
    assert sum(len(factor.samples) for factor in factors) > 0
    for factor in factors:
        assert all(sample == pytest.approx(3.0) for sample in factor.samples)


def test_a_new_incarnation_starts_from_its_profile() -> None:
    desk = slow_desk()
    desk.join("p0", incarnation=2)
    desk.handle(InstanceLost(InstanceId("d0"), "it died"))
    desk.join("d0", incarnation=2)
    assert predicted(desk) == predicted(Desk("p0", "d0"))
    for state in desk.conductor.instances.values():
        assert state.prefill_factor.samples == state.decode_factor.samples == ()


def test_a_lost_instance_leaves_no_factors_in_its_row() -> None:
    desk = slow_desk()
    desk.handle(InstanceLost(InstanceId("p0"), "it died"))
    desk.join("p9")
    assert predicted(desk)[0] == predicted(Desk("p0", "d0"))[0]


def uneven(desk: Desk, number: int, shared: bool = False) -> None:
    """Plays an answer of which a tenth of the gaps are three times as long as the others. With
    `shared`, a prompt was computed in one of its steps."""
    num_gaps, longest = 20, 3.0
    work = AttemptId(f"r{number}/{number}")
    desk.ask(f"r{number}", use_cache=False)
    desk.decoding(work)
    step_s = COST.decode_step_s(1, 11)
    for gap in range(num_gaps):
        gap_s = step_s * (longest if gap % 10 == 9 else 1.0)
        desk.now += gap_s
        finish = FinishReason.LENGTH if gap == num_gaps - 1 else None
        item = AttemptTokens(work, (Token(60),), finish)
        alone = not (shared and gap == 0)
        desk.report("d0", StepTokens(attempts=(item,), gap_s=gap_s if alone else 0.0))


def test_admission_judges_slos_by_the_longest_gaps() -> None:
    """A mean step within the SLO is too slow if every tenth gap is three times as long."""
    slo = {"tbt_s": 1.5 * COST.decode_step_s(1, 11)}
    for learning in (True, False):
        desk = Desk("p0", "d0", learning=learning, admission="early")
        for number in range(1, MIN_SAMPLES + 1):
            uneven(desk, number)
        assert not refused(desk.ask("even", **slo)), "a few answers show nothing"
        desk.decoding(f"even/{MIN_SAMPLES + 1}")
        desk.tokens("d0", 60, finish=FinishReason.STOP, work=f"even/{MIN_SAMPLES + 1}")
        uneven(desk, MIN_SAMPLES + 2)
        assert refused(desk.ask("late", **slo)) == learning
        tail = desk.conductor.cost_estimator.tbt_tail.value
        # the longest gap is 3 steps long, and the mean gap 1.2
        assert tail == pytest.approx(3.0 / 1.2, rel=0.1)


def test_gaps_with_a_prompt_are_no_samples_of_decodes() -> None:
    desk = Desk("p0", "d0")
    for number in range(1, 2 * MIN_SAMPLES):
        uneven(desk, number, shared=True)
    assert desk.conductor.instance_table.tbt_tail == 1.0


def tolerance(desk: Desk) -> float:
    """Returns the decode instance's tolerance for one more request."""
    command = of(desk.ask("r100"), Send)[0].command
    assert isinstance(command, ReserveDecode)
    return command.attempt.tolerance


def test_the_decode_instances_check_allows_for_the_longest_gaps() -> None:
    desk = Desk("p0", "d0")
    before = tolerance(desk)
    desk = Desk("p0", "d0")
    for number in range(1, MIN_SAMPLES + 2):
        uneven(desk, number)
    after = tolerance(desk)
    assert after == pytest.approx(before / desk.conductor.instance_table.tbt_tail)
    assert desk.conductor.instance_table.tbt_tail > 2.0


def test_errors_are_counted_and_the_record_is_read_back() -> None:
    desk = slow_desk(3)
    beliefs = desk.conductor.cost_estimator
    assert beliefs.ttft_s.count == 3
    errors = -2.0, 2.0 - 3.0, 7 / 3 - 3.0  # each estimate has learned from the answers before it
    assert beliefs.ttft_s.mean == pytest.approx(sum(errors) / 3 * PREFILL_S)
    assert beliefs.ttft_s.ratio(0.5) == pytest.approx(2 / 3, rel=0.03)
    record = beliefs.record(list(desk.conductor.instances.values()))
    assert parse_beliefs(msgspec.json.encode(record)) == record
    assert record.errors["ttft_s"]["count"] == 3


def refused(actions: list[ConductorAction]) -> bool:
    return bool(of(actions, Refuse))


TBT_S = COST.decode_step_s(1, 0)


@pytest.mark.parametrize("slo", [{"ttft_s": 0.6 * PREFILL_S}, {"tbt_s": 0.6 * TBT_S}])
def test_an_estimate_that_rejects_everything_is_probed_on_an_idle_instance(
    slo: dict[str, float],
) -> None:
    """Otherwise, no measurement could correct the estimate."""
    desk = Desk("p0", "d0")
    assert not refused(desk.ask("r1", **slo))
    assert any("admitted to check" in line for line in explained(desk, "r1"))
    desk.now += PROBE_EVERY_S
    assert refused(desk.ask("r2", **slo)), "not idle: it has the first"
    desk.decoding("r1/1")
    desk.tokens("d0", 60, finish=FinishReason.STOP, work="r1/1")
    assert not refused(desk.ask("r3", **slo))


def explained(desk: Desk, name: str) -> tuple[str, ...]:
    return desk.conductor.requests[RequestId(name)].explanation.lines()


def test_an_instance_is_probed_only_now_and_then() -> None:
    desk = Desk("p0", "d0")
    for number, wait_s in ((1, 0.0), (2, PROBE_EVERY_S / 2), (3, PROBE_EVERY_S)):
        desk.now += wait_s
        taken = not refused(desk.ask(f"r{number}", tbt_s=0.6 * TBT_S))
        assert taken == (number != 2)
        if taken:
            desk.decoding(f"r{number}/{number}")
            desk.tokens("d0", 60, finish=FinishReason.STOP, work=f"r{number}/{number}")


@pytest.mark.parametrize("learning", [True, False])
def test_no_probe_beyond_the_largest_correction(learning: bool) -> None:
    factor = 0.9 / MAX_FACTOR if learning else 0.9
    desk = Desk("p0", "d0", learning=learning)
    assert refused(desk.ask("r1", tbt_s=factor * TBT_S))
    assert refused(desk.ask("r2", ttft_s=factor * PREFILL_S))
